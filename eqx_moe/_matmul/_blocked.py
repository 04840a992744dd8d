"""Grouped matmul as a walk over blocks of rows."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._dtypes import accumulator
from .._vma import match_varying
from ._base import AbstractGroupedMatmul, Problem


class BlockedDot(AbstractGroupedMatmul):
    """Every expert's rows, a fixed block at a time, times the expert's own slice of the weights.

    The walk skips empty experts, does no more arithmetic than the groups have rows (rounded up to `tail` rows an
    expert) and reads each expert's weights once. It is plain JAX and runs everywhere; it is the default on CPUs.

    **Arguments:**

    - `block`: rows multiplied at a time while a group has that many left.
    - `tail`: rows multiplied at a time at the end of a group.
    """

    block: int = eqx.field(static=True, default=128)
    tail: int = eqx.field(static=True, default=32)

    def __check_init__(self):
        if not 0 < self.tail <= self.block:
            raise ValueError(f"`tail` must lie between 1 and `block`: got tail={self.tail}, block={self.block}")

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        return self._multiply_rows(x, w, sizes, contract=0)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        return self._multiply_rows(y, w, sizes, contract=1)

    def _multiply_rows(self, x: Array, w: Array, sizes: Array, *, contract: int) -> Array:
        """Rows of `x` times the expert's weights, contracting the weights' axis `contract`."""
        x, w, sizes, out = match_varying(x, w, sizes, jnp.zeros((x.shape[0], w.shape[2 - contract]), x.dtype))

        def visit(expert, start, stop, out):
            weights = lax.dynamic_index_in_dim(w, expert, keepdims=False)

            def whole(start, size, out):
                product = _dot(lax.dynamic_slice_in_dim(x, start, size), weights, (1, contract))
                return lax.dynamic_update_slice_in_dim(out, product, start, 0)

            def part(start, size, out):
                at, inside = _window(start, stop, size, x.shape[0])
                product = _dot(lax.dynamic_slice_in_dim(x, at, size), weights, (1, contract))
                kept = jnp.where(inside, product, lax.dynamic_slice_in_dim(out, at, size))
                return lax.dynamic_update_slice_in_dim(out, kept, at, 0)

            return self._walk(start, stop, x.shape[0], whole, part, out)

        return _for_each_group(sizes, visit, out)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        shape, wide = (x.shape[1], y.shape[1]), accumulator(x.dtype)
        x, y, sizes, out, zero = match_varying(
            x, y, sizes, jnp.zeros((sizes.shape[0], *shape), x.dtype), jnp.zeros(shape, wide)
        )

        def whole(start, size, total):
            a, b = (lax.dynamic_slice_in_dim(z, start, size) for z in (x, y))
            return total + _dot(a, b, (0, 0), wide)

        def visit(expert, start, stop, out):
            def part(start, size, total):
                at, inside = _window(start, stop, size, x.shape[0])
                a, b = (jnp.where(inside, lax.dynamic_slice_in_dim(z, at, size), 0) for z in (x, y))
                return total + _dot(a, b, (0, 0), wide)

            total = self._walk(start, stop, x.shape[0], whole, part, zero)
            return lax.dynamic_update_index_in_dim(out, total.astype(x.dtype), expert, 0)

        return _for_each_group(sizes, visit, out)

    def _walk(self, start, stop, rows, whole, part, carry):
        """Carries `carry` over the rows from `start` to `stop`: whole blocks first, then masked parts."""
        block, tail = min(self.block, rows), min(self.tail, rows)
        start, carry = lax.while_loop(
            lambda state: state[0] + block <= stop,
            lambda state: (state[0] + block, whole(state[0], block, state[1])),
            (start, carry),
        )
        return lax.while_loop(
            lambda state: state[0] < stop,
            lambda state: (state[0] + tail, part(state[0], tail, state[1])),
            (start, carry),
        )[1]

    def why_not(self, platform: str, problem: Problem) -> str | None:
        if platform == "tpu":
            return "a walk over blocks leaves a TPU's matrix unit idle between them"
        return None


def _for_each_group(sizes: Int[Array, " experts"], visit, carry):
    """Carries `carry` through `visit(expert, start, stop, carry)` for every expert that has rows."""
    stops = jnp.cumsum(sizes, dtype=sizes.dtype)
    busy = jnp.nonzero(sizes, size=sizes.shape[0], fill_value=0)[0]

    def step(i, carry):
        expert = busy[i]
        return visit(expert, stops[expert] - sizes[expert], stops[expert], carry)

    return lax.fori_loop(0, jnp.count_nonzero(sizes), step, carry)


def _window(start, stop, size: int, rows: int) -> tuple[Array, Array]:
    """Where to read `size` rows so that `start` is among them and all exist, and which of them lie in the group."""
    at = jnp.minimum(start, rows - size)
    index = at + jnp.arange(size, dtype=at.dtype)
    return at, ((index >= start) & (index < stop))[:, None]


def _dot(a: Array, b: Array, contract: tuple[int, int], out_dtype=None) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    product = lax.dot_general(a, b, dimensions, preferred_element_type=accumulator(a.dtype))
    return product.astype(out_dtype or a.dtype)
