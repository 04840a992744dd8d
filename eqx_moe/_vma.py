"""What a primitive owes the mesh: varying manual axes, as `jax.shard_map(..., check_vma=True)` tracks them, and the
shardings of explicit axes."""

import functools as ft
from collections.abc import Callable

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


def check_unsharded(**arrays: ArrayLike) -> None:
    """Raises `ValueError` naming the first array that explicit mesh axes split: rows are sorted among all tokens."""
    for name, x in arrays.items():
        spec = jax.typeof(x).sharding.spec
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"{name} is sharded as {spec} over explicit mesh axes, and experts are grouped among the tokens of one "
                f"device: call the layer inside `jax.shard_map`, or replicate {name} with `jax.reshard` first"
            )


def reshaped(value, shape: tuple[int, ...]):
    """The abstract value of another shape, on the same mesh and not sharded."""
    sharding = value.sharding.update(spec=jax.P(*(None,) * len(shape)))
    return value.update(shape=shape, sharding=sharding, weak_type=False)


def on_the_mesh(apply: Callable[..., Array]) -> Callable[..., Array]:
    """`apply` within the mesh of its first operand: lowering rules are traced outside of any, and what they make there
    (buffers, indices) would not meet their operands."""

    @ft.wraps(apply)
    def run(first: Array, *rest: Array, **parameters):
        with jax.sharding.use_abstract_mesh(jax.typeof(first).sharding.mesh):
            return apply(first, *rest, **parameters)

    return run
