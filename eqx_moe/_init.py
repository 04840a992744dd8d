"""How parameters start."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def scaled_normal(key: Array, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype | type) -> Array:
    """Normal numbers of variance `1 / fan_in`."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(1 / math.sqrt(fan_in), dtype)


def check_positive(**sizes: int) -> None:
    """Raises `ValueError` naming the first size that is not positive."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
