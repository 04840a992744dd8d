"""How parameters start."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def scaled_normal(key: Array, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype) -> Array:
    """Normal numbers of variance `1 / fan_in`."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(1 / math.sqrt(fan_in), dtype)


def float_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """`dtype` as one that can be computed in; raises `ValueError` unless it is a float of two bytes or more."""
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f'{name}={dtype!r} is no dtype: use one such as jnp.float32 or "bfloat16"') from error
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(f"{name}={found.name} must be float32, bfloat16, float16 or float64")
    return found


def check_positive(**sizes: int) -> None:
    """Raises `ValueError` naming the first size that is not positive."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
