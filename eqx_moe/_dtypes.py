"""In what precision sums are taken."""

import jax.numpy as jnp


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed: at least float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
