"""Grouped matmul by Transformer Engine."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._pallas import zero_tail
from .._te import grouped_product, why_no_te
from ._base import AbstractGroupedMatmul, Problem, Product, Side
from ._tiled import TiledDot

# Below so many rows per expert it can be many times slower than `TiledDot`: at 64 it took 1.8 ms instead of 0.24 for
# 8192 rows of 2048 -> 1536 on an H200; at 512 it was fast in every shape that was tried.
_ROWS_PER_EXPERT = 512
# `TiledDot` gathers while it loads, which loses it less than gathering first would; measured on an H200.
_WIDTH_WORTH_GATHERING = {Product.NN: 1536, Product.NT: 1024, Product.TN: 1024}
# cuBLAS reads rows in pieces of 16 bytes.
_WIDTH = 8


class TEGroupedGemm(AbstractGroupedMatmul):
    """The grouped GEMM of NVIDIA's Transformer Engine, for bfloat16 on Hopper GPUs and later ones.

    Sizes stay on the device, and nothing waits for the host.

    **Raises:** `ImportError` where Transformer Engine or its cuBLAS is missing or too old, with the remedy.
    """

    def __check_init__(self):
        if (reason := why_no_te()) is not None:
            raise ImportError(reason)

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        _check(x, w.shape[1:])
        return zero_tail(grouped_product(x, w, sizes), sizes)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        _check(y, w.shape[1:])
        return zero_tail(grouped_product(y, w, sizes, transpose_b=True), sizes)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        _check(x, (x.shape[1], y.shape[1]))
        return grouped_product(x, y, sizes, a_is_ragged_inside=True)

    def why_not(self, platform: str, problem: Problem) -> str | None:
        if platform != "cuda":
            return f"Transformer Engine does not run on {platform}"
        if (reason := _why_not_shape(problem.dtype, (problem.d_in, problem.d_out))) is not None:
            return reason
        if problem.rows < _ROWS_PER_EXPERT * problem.experts:
            return f"it is slow below {_ROWS_PER_EXPERT} rows per expert"
        least = _WIDTH_WORTH_GATHERING[problem.product]
        if problem.side in (Side.A, Side.B) and problem.kept_width < least:
            return f"gathering its rows first does not pay below a width of {least}"
        return None

    def resolve(self, platform: str, problem: Problem) -> AbstractGroupedMatmul:
        if 1 in (problem.d_in, problem.d_out):  # biases, which are not worth its attention
            return TiledDot()
        return self


def _why_not_shape(dtype: jnp.dtype, widths: tuple[int, ...]) -> str | None:
    if dtype != jnp.bfloat16:
        return f"its device-side kernel takes bfloat16, not {dtype}"
    if any(width % _WIDTH for width in widths):
        return f"widths {' and '.join(map(str, widths))} must be multiples of {_WIDTH}"
    return None


def _check(a: Array, widths: tuple[int, ...]) -> None:
    if (reason := _why_not_shape(a.dtype, widths)) is not None:
        raise ValueError(f"TEGroupedGemm: {reason}: cast or pad, or leave the choice to AutoGroupedMatmul")
