"""Linear maps whose transposes are given, as `jax.custom_derivatives.linear_call` takes them, of several values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, linear_call
from jaxtyping import Array


def linear(
    forward: Callable[..., tuple[Array, ...]],
    transposed: Callable[..., tuple[Array, ...]],
    residual: Any,
    *values: Array,
) -> tuple[Array, ...]:
    """`forward(residual, *values)`, linear in the values and differentiable both ways: its transpose is
    `transposed(residual, *outputs)`. Unlike `linear_call`, some of the values may have no tangent."""

    @jax.custom_jvp
    def run(residual, *values):
        return forward(residual, *values)

    def differentiate(primals, tangents):
        residual, *values = primals
        here = [not isinstance(tangent, SymbolicZero) for tangent in tangents[1:]]

        def along(residual, moving):
            moving = iter(moving)
            whole = [next(moving) if h else jnp.zeros_like(v) for v, h in zip(values, here, strict=True)]
            return forward(residual, *whole)

        def back(residual, outputs):
            found = transposed(residual, *outputs)
            return tuple(value for value, h in zip(found, here, strict=True) if h)

        moving = tuple(tangent for tangent, h in zip(tangents[1:], here, strict=True) if h)
        return forward(residual, *values), linear_call(along, back, residual, moving)

    run.defjvp(differentiate, symbolic_zeros=True)
    return run(residual, *values)
