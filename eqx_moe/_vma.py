"""Varying manual axes, which `jax.shard_map(..., check_vma=True)` tracks, and how an operation joins its inputs'."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Shaped


def varying_axes(x: Shaped[Array, "..."]) -> frozenset[str]:
    """The manual mesh axes over which `x` may differ between devices; empty outside `jax.shard_map`."""
    axis_type = jax.typeof(x).manual_axis_type
    return frozenset(axis_type.varying) if axis_type is not None else frozenset()


def match_varying(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Marks every array as varying over the union of all their axes, which is what a primitive's operands must be."""
    operands = tuple(map(jnp.asarray, arrays))  # derivatives may be NumPy arrays
    axes = frozenset().union(*map(varying_axes, operands))
    missing = [tuple(sorted(axes - varying_axes(x))) for x in operands]
    return tuple(lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing, strict=True))
