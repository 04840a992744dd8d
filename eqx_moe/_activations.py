"""Activations of an expert: from the output of its up-projection(s) to the input of its down-projection."""

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._dtypes import accumulator

if TYPE_CHECKING:  # type checkers know only the concrete form
    from typing import ClassVar as AbstractClassVar
else:
    from equinox import AbstractClassVar


class AbstractActivation(eqx.Module):
    """An activation of an expert; all fields are static.

    `gates` is 2 if the expert has a gate and an up-projection, whose outputs are `h[:, 0]` and `h[:, 1]`, and 1 if it
    has an up-projection alone.
    """

    gates: AbstractClassVar[int]

    @abc.abstractmethod
    def of_parts(self, *parts: Any, **_: Any) -> Float[Array, "*rows d_ff"]:
        """The activation of the gate and the up-projection, or of the latter alone; elementwise.

        **Arguments:** `gates` arrays of one shape, in at least float32.

        **Returns:** an array of that shape.
        """

    def __call__(self, h: Float[Array, "*rows gates d_ff"]) -> Float[Array, "*rows d_ff"]:
        """The activation of `h`, whose `gates` axis holds the parts."""
        check_gates(self, h.shape[-2])
        return self.of_parts(*(h[..., i, :] for i in range(h.shape[-2])))


class SwiGLU(AbstractActivation):
    """`silu(gate) * up` ([arXiv:2002.05202](https://arxiv.org/abs/2002.05202))."""

    gates: ClassVar[int] = 2

    def of_parts(self, gate: Float[Array, "*rows d_ff"], up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        return jax.nn.silu(gate) * up


class GeGLU(AbstractActivation):
    """`gelu(gate) * up`, with the exact GELU ([arXiv:2002.05202](https://arxiv.org/abs/2002.05202)).

    **Arguments:**

    - `approximate`: whether to use the tanh approximation of GELU instead.
    """

    gates: ClassVar[int] = 2
    approximate: bool = eqx.field(static=True, default=False)

    def of_parts(self, gate: Float[Array, "*rows d_ff"], up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        return jax.nn.gelu(gate, approximate=self.approximate) * up


class ReGLU(AbstractActivation):
    """`relu(gate) * up` ([arXiv:2002.05202](https://arxiv.org/abs/2002.05202))."""

    gates: ClassVar[int] = 2

    def of_parts(self, gate: Float[Array, "*rows d_ff"], up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        return jax.nn.relu(gate) * up


class ClampedSwiGLU(AbstractActivation):
    """`gate * sigmoid(alpha * gate) * (up + offset)` with clamped inputs, as in gpt-oss
    ([arXiv:2508.10925](https://arxiv.org/abs/2508.10925)).

    **Arguments:**

    - `limit`: `gate` is clamped from above, `up` from both sides.
    - `alpha`: slope inside the sigmoid.
    - `offset`: added to `up`.
    """

    gates: ClassVar[int] = 2
    limit: float | int = eqx.field(static=True, default=7.0)
    alpha: float | int = eqx.field(static=True, default=1.702)
    offset: float | int = eqx.field(static=True, default=1.0)

    def __check_init__(self):
        if self.limit <= 0:
            raise ValueError(f"limit={self.limit} must be positive")

    def of_parts(self, gate: Float[Array, "*rows d_ff"], up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.offset)


class GELU(AbstractActivation):
    """`gelu(up)` without a gate, exact ([arXiv:1606.08415](https://arxiv.org/abs/1606.08415)).

    **Arguments:**

    - `approximate`: whether to use the tanh approximation instead.
    """

    gates: ClassVar[int] = 1
    approximate: bool = eqx.field(static=True, default=False)

    def of_parts(self, up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        return jax.nn.gelu(up, approximate=self.approximate)


class SquaredReLU(AbstractActivation):
    """`relu(up) ** 2` without a gate ([arXiv:2109.08668](https://arxiv.org/abs/2109.08668))."""

    gates: ClassVar[int] = 1

    def of_parts(self, up: Float[Array, "*rows d_ff"]) -> Float[Array, "*rows d_ff"]:
        return jnp.square(jax.nn.relu(up))


def weighted_activation(
    h: Float[Array, "rows gates d_ff"], weights: Float[Array, " rows"] | None, activation: AbstractActivation
) -> Float[Array, "rows d_ff"]:
    """The activation times the row's weight, computed in at least float32 and rounded once."""
    wide = h.astype(accumulator(h.dtype))
    act = activation(wide)
    act = act if weights is None else act * weights.astype(wide.dtype)[:, None]
    return act.astype(h.dtype)


def check_gates(activation: AbstractActivation, gates: int) -> None:
    """Raises `ValueError` unless `gates` is what the activation needs."""
    if gates != activation.gates:
        raise ValueError(f"gates: {activation} needs {activation.gates}, got {gates}")
