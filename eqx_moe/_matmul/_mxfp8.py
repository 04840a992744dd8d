"""Products of MXFP8 numbers, emulated: the numerics of Blackwell's matrix units on any hardware."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ._auto import AutoGroupedMatmul
from ._base import AbstractGroupedMatmul, Problem, Side, group_of_row

# Numbers that share a scale, and the largest one of the format E4M3.
BLOCK = 32
_LARGEST = 448.0


class EmulatedMXFP8(AbstractGroupedMatmul):
    """Rounds both operands of every product to MXFP8, then has another kernel multiply them.

    This is what Transformer Engine's MXFP8 recipe computes on Blackwell GPUs (format E4M3 in forward and backward, one
    scale per 32 numbers along the axis that is summed over), up to the order of the sums; nothing is faster or smaller
    for it. Each product rounds its own operands afresh: `x` along `d_in` forward, and along the rows of its group for
    the weights' gradient. Transformer Engine's own kernel is not called on any hardware.

    Numbers rounded to MXFP8 are exact in bfloat16, in which they are multiplied if the operands are bfloat16, and else
    in float32. Products of an inner width of 1 (biases) are not rounded. See
    [the specification](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf) and
    [arXiv:2506.08027](https://arxiv.org/abs/2506.08027) for the scale that is rounded up.

    **Arguments:**

    - `matmul`: the kernel, any [`eqx_moe.AbstractGroupedMatmul`][].

    **Raises:** `ValueError` when it is traced for widths that are no multiples of 32.
    """

    matmul: AbstractGroupedMatmul = eqx.field(static=True, default=AutoGroupedMatmul())

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        _check_width("d_in", x.shape[1])
        x_rounded, w_rounded = round_to_mxfp8(x, axis=1), round_to_mxfp8(w, axis=1)
        return self.matmul.nn(x_rounded, w_rounded, sizes).astype(x.dtype)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        _check_width("d_out", y.shape[1])
        y_rounded, w_rounded = round_to_mxfp8(y, axis=1), round_to_mxfp8(w, axis=2)
        return self.matmul.nt(y_rounded, w_rounded, sizes).astype(y.dtype)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        x_rounded, y_rounded = (_round_along_rows(operand, sizes) for operand in (x, y))
        return self.matmul.tn(x_rounded, y_rounded, sizes).astype(x.dtype)

    def why_not(self, platform: str, problem: Problem) -> str | None:
        return self.matmul.why_not(platform, _rounded(problem))

    def resolve(self, platform: str, problem: Problem) -> AbstractGroupedMatmul:
        if 1 in (problem.d_in, problem.d_out):
            return self.matmul.resolve(platform, problem)
        return EmulatedMXFP8(self.matmul.resolve(platform, _rounded(problem)))


def round_to_mxfp8(x: Float[Array, "..."], *, axis: int) -> Float[Array, "..."]:
    """`x` with every number rounded to the nearest that MXFP8 can hold, ties to even.

    Each 32 numbers along `axis` share a scale, the least power of two with which the largest of them does not exceed
    448; each is then a number of 3 bits behind the leading one. In a block that holds a NaN or an infinity, these
    become NaN; beside an infinity all other numbers become zero.

    **Arguments:**

    - `x`: of any shape.
    - `axis`: of a length that is a multiple of 32.

    **Returns:** bfloat16 if `x` is, else float32; of the shape of `x`.

    **Raises:** `ValueError` for another length.
    """
    _check_width(f"axis {axis}", x.shape[axis])
    blocks = jnp.moveaxis(x, axis, -1)
    blocks = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // BLOCK, BLOCK)
    exponents = _exponents(_magnitude(blocks).max(-1, initial=0, keepdims=True))
    rounded = _round(blocks, exponents).reshape(*blocks.shape[:-2], x.shape[axis])
    return jnp.moveaxis(rounded, -1, axis)


def _rounded(problem: Problem) -> Problem:
    """What is left for the other kernel: gathered operands, in the dtype of rounded ones."""
    return dataclasses.replace(problem, dtype=_dtype_of_rounded(problem.dtype), side=Side.NONE)


def _dtype_of_rounded(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def _round_along_rows(x: Float[Array, "rows n"], sizes: Int[Array, " experts"]) -> Float[Array, "rows n"]:
    """Rounded along the rows of every group, whose last block may be shorter; rows of no group become zero."""
    rows, experts = x.shape[0], sizes.shape[0]
    group = group_of_row(rows, sizes)
    blocks = (sizes + BLOCK - 1) // BLOCK
    before = lambda counts: jnp.append(jnp.cumsum(counts, dtype=jnp.int32) - counts, 0)
    within = jnp.arange(rows, dtype=jnp.int32) - before(sizes)[group]
    most = rows // BLOCK + experts
    block = jnp.where(group < experts, before(blocks)[group] + within // BLOCK, most)
    largest = jax.ops.segment_max(_magnitude(x), block, num_segments=most, indices_are_sorted=True)
    exponents = _exponents(largest).at[block].get(mode="fill", fill_value=0)
    return jnp.where((group < experts)[:, None], _round(x, exponents), 0)


def _magnitude(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Absolute values in float32, without NaN, which has no say in the scale."""
    return jnp.where(jnp.isnan(x), 0, jnp.abs(x)).astype(jnp.float32)


def _exponents(largest: Float[Array, "..."]) -> Int[Array, "..."]:
    """The biased exponent (E8M0) of the scale: that of `largest / 448`, rounded up."""
    bits = lax.bitcast_convert_type(largest * np.float32(1 / _LARGEST), jnp.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    return jnp.minimum(jnp.where((fraction > 0) & (exponent > 0), exponent + 1, exponent), 254)


def _round(x: Float[Array, "..."], exponents: Int[Array, "..."]) -> Float[Array, "..."]:
    """To E4M3 after division by the scale, and back. Blocks of exponent 0 hold zeros, or what rounds to them."""
    power = lambda biased: lax.bitcast_convert_type(biased << 23, jnp.float32)
    scaled = x.astype(jnp.float32) * jnp.where(exponents == 0, 0, power(254 - exponents))
    narrow = jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    return (narrow.astype(jnp.float32) * power(exponents)).astype(_dtype_of_rounded(x.dtype))


def _check_width(name: str, width: int) -> None:
    if width % BLOCK:
        raise ValueError(f"EmulatedMXFP8: {name}={width} must be a multiple of {BLOCK}, the numbers that share a scale")
