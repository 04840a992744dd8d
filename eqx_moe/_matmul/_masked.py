"""Grouped matmul as one dense product per expert: the oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._dtypes import accumulator
from ._base import AbstractGroupedMatmul, group_of_row, in_groups


class MaskedDense(AbstractGroupedMatmul):
    """Every expert multiplies every row, and a mask keeps the products that count.

    It costs `experts` times the arithmetic of the other kernels and the memory of `rows * experts * d_in` numbers, and
    is here to be obviously right: the other kernels are tested against it. Nothing past the groups reaches the result,
    but a NaN or an infinity within a group, or in its weights, may spread to other groups; so it may in
    [`eqx_moe.RaggedDot`][], while [`eqx_moe.BlockedDot`][] keeps groups apart.
    """

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        return self._rows("reb,ebc->rc", x, w, sizes)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        return self._rows("rec,ebc->rb", y, w, sizes)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        y = jnp.where(in_groups(y.shape[0], sizes), y, 0)
        return _einsum("reb,rc->ebc", _spread(x, sizes), y)

    def _rows(self, equation: str, x: Array, w: Array, sizes: Array) -> Array:
        return jnp.where(in_groups(x.shape[0], sizes), _einsum(equation, _spread(x, sizes), w), 0)


def _spread(x: Float[Array, "rows d_in"], sizes: Int[Array, " experts"]) -> Float[Array, "rows experts d_in"]:
    """Every row in the column of its own expert, zero in the others."""
    own = jax.nn.one_hot(group_of_row(x.shape[0], sizes), sizes.shape[0], dtype=bool)
    return jnp.where(own[:, :, None], x[:, None, :], 0)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype)).astype(a.dtype)
