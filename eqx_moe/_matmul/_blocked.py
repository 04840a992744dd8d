"""Grouped matmul as a walk over blocks of rows."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._dtypes import accumulator
from .._vma import match_varying
from ._base import AbstractGroupedMatmul, Problem


class BlockedDot(AbstractGroupedMatmul):
    """Every expert's rows, a block at a time, times the expert's own slice of the weights.

    The walk skips empty experts, reads the weights of each other expert once, and takes the smallest block that holds
    what is left of a group, so that most groups are one product and little is computed for nothing. It is plain JAX and
    runs everywhere; it is the default on CPUs.

    **Arguments:**

    - `blocks`: the sizes of block to choose from, in rows, growing.
    """

    blocks: tuple[int, ...] = eqx.field(
        static=True, default=(16, 32, 64, 96, 112, 128, 144, 160, 192, 224, 256, 288, 320, 384, 512)
    )

    def __check_init__(self):
        if not self.blocks or self.blocks[0] < 1 or list(self.blocks) != sorted(set(self.blocks)):
            raise ValueError(f"blocks={self.blocks} must be positive and growing")

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        return self._multiply_rows(x, w, sizes, contract=0)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        return self._multiply_rows(y, w, sizes, contract=1)

    def _multiply_rows(self, x: Array, w: Array, sizes: Array, *, contract: int) -> Array:
        """Rows of `x` times the expert's weights, contracting the weights' axis `contract`.

        A block that is larger than what is left of its group writes into the rows of the next groups, which overwrite
        them in their turn; only where no rows are left for that is it moved back and masked.
        """
        rows = x.shape[0]
        # Left to itself, `lax.empty` forgets the mesh while it is traced (seen with jax 0.10.2 to 0.12.0).
        unsharded = jax.typeof(x).sharding.update(spec=jax.P(None, None))
        out = lax.empty((rows, w.shape[2 - contract]), x.dtype, out_sharding=unsharded)
        x, w, sizes, out = match_varying(x, w, sizes.astype(jnp.int32), out)

        def visit(expert, start, stop, out):
            weights = lax.dynamic_index_in_dim(w, expert, keepdims=False)

            def multiply(size, start, out):
                product = _dot(lax.dynamic_slice_in_dim(x, start, size), weights, (1, contract))
                return lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), start, 0)

            def multiply_last(size, start, out):
                at, inside = _window(start, stop, size, rows)
                product = _dot(lax.dynamic_slice_in_dim(x, at, size), weights, (1, contract)).astype(x.dtype)
                kept = jnp.where(inside, product, lax.dynamic_slice_in_dim(out, at, size))
                return lax.dynamic_update_slice_in_dim(out, kept, at, 0)

            return self._walk(start, stop, rows, multiply, multiply_last, out)

        out = _for_each_group(sizes, visit, out)
        return _zero_from(sizes.sum(dtype=sizes.dtype), out, min(self.blocks[-1], rows))

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        shape, wide = (x.shape[1], y.shape[1]), accumulator(x.dtype)
        x, y, sizes, out, zero = match_varying(
            x, y, sizes.astype(jnp.int32), jnp.zeros((sizes.shape[0], *shape), x.dtype), jnp.zeros(shape, wide)
        )

        def visit(expert, start, stop, out):
            def accumulate(size, start, total):
                at, inside = _window(start, stop, size, x.shape[0])
                a, b = (jnp.where(inside, lax.dynamic_slice_in_dim(z, at, size), 0) for z in (x, y))
                return total + _dot(a, b, (0, 0))

            total = self._walk(start, stop, x.shape[0], accumulate, accumulate, zero)
            return lax.dynamic_update_index_in_dim(out, total.astype(x.dtype), expert, 0)

        return _for_each_group(sizes, visit, out)

    def _walk(self, start, stop, rows, step, last_step, carry):
        """Carries `carry` through `step(size, start, carry)` for blocks from `start` to `stop`, each the smallest that
        holds what is left or else the largest; through `last_step` where such a block would reach past all `rows`."""
        sizes = sorted({min(size, rows) for size in self.blocks})
        # A loop per size, which runs at most once but for the largest. A `lax.switch` over the sizes would read better,
        # but on jax 0.10 it copies a large carry in every step instead of updating it in place.
        state = (start, carry)
        for smaller, size in reversed(list(zip([0, *sizes], sizes, strict=False))):
            fits = lambda state, smaller=smaller, size=size: (stop - state[0] > smaller) & (state[0] <= rows - size)
            state = lax.while_loop(fits, ft.partial(_advance, size, step), state)
        return lax.while_loop(lambda state: state[0] < stop, ft.partial(_advance, sizes[0], last_step), state)[1]

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


def _advance(size, step, state):
    start, carry = state
    return start + size, step(size, start, carry)


def _zero_from(start, out: Float[Array, "rows d_out"], size: int) -> Float[Array, "rows d_out"]:
    """`out` with zeros in the rows from `start` on, written `size` rows at a time."""
    rows = out.shape[0]

    def body(state):
        start, out = state
        at, inside = _window(start, rows, size, rows)
        kept = jnp.where(inside, 0, lax.dynamic_slice_in_dim(out, at, size))
        return start + size, lax.dynamic_update_slice_in_dim(out, kept, at, 0)

    return lax.while_loop(lambda state: state[0] < rows, body, (start, out))[1]


def _window(start, stop, size: int, rows: int) -> tuple[Array, Array]:
    """Where to read `size` rows so that `start` is among them and all exist, and which of them lie in the group."""
    at = jnp.minimum(start, rows - size)
    index = at + jnp.arange(size, dtype=at.dtype)
    return at, ((index >= start) & (index < stop))[:, None]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=accumulator(a.dtype))
