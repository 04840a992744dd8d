"""Dispatch with every token read once, for GPUs, in Pallas: a gather by rows would read it `k` times."""

import functools as ft

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from ._pallas import iota, out_struct, power_of_two, why_no_pallas

# Tokens and columns that a program holds in registers at a time, and rows that one looks through for empty ones.
_TOKENS, _COLUMNS, _ROWS = 8, 512, 64
# Narrower tokens are not worth a kernel of their own.
_LEAST_BYTES = 1024


def pays(x: Float[Array, "tokens d_in"], position: Int32[Array, "tokens k"]) -> bool:
    """Whether the kernel can be used here, and reads less than a gather."""
    wide = x.shape[1] * x.dtype.itemsize >= _LEAST_BYTES
    return position.shape[1] > 1 and wide and why_no_pallas("cuda") is None


def dispatch_by_token(
    x: Float[Array, "tokens d_in"],
    order: Int32[Array, " rows"],
    position: Int32[Array, "tokens k"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows d_in"]:
    """Copies every token to its rows, then writes zeros to the rows that belong to none."""
    (tokens, width), rows = x.shape, order.shape[0]
    columns = min(_COLUMNS, power_of_two(width))
    call = ft.partial(
        pl.pallas_call,
        out_shape=out_struct((rows, width), x.dtype, x),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )
    copied = call(ft.partial(_copy, columns=columns), grid=(pl.cdiv(tokens, _TOKENS),), name="moe_dispatch")(
        x, position
    )
    zero = ft.partial(_zero_empty, columns=columns, none=position.size)
    return call(zero, grid=(pl.cdiv(rows, _ROWS),), input_output_aliases={0: 0}, name="moe_dispatch_zeros")(
        copied, order
    )


def _copy(x_ref, position_ref, out_ref, *, columns: int):
    (tokens, width), rows, k = x_ref.shape, out_ref.shape[0], position_ref.shape[1]
    token = pl.program_id(0) * _TOKENS + iota(_TOKENS)
    known = token < tokens
    places = [
        plt.load(position_ref.at[token, jnp.full(_TOKENS, choice, jnp.int32)], mask=known, other=rows)
        for choice in range(k)
    ]

    def step(i, _):
        column = i * columns + iota(columns)
        inside = (column < width)[None, :]
        block = plt.load(x_ref.at[token[:, None], column[None, :]], mask=known[:, None] & inside, other=0)
        for place in places:
            plt.store(out_ref.at[place[:, None], column[None, :]], block, mask=(place < rows)[:, None] & inside)

    lax.fori_loop(0, pl.cdiv(width, columns), step, None)


def _zero_empty(_, order_ref, out_ref, *, columns: int, none: int):
    rows, width = out_ref.shape
    row = pl.program_id(0) * _ROWS + iota(_ROWS)
    empty = (plt.load(order_ref.at[row], mask=row < rows, other=0) >= none) & (row < rows)

    @pl.when(jnp.max(empty.astype(jnp.int32)) > 0)
    def _():
        def step(i, _):
            column = i * columns + iota(columns)
            place = jnp.where(empty, row, rows)  # the interpreter writes what is masked out as well
            mask = empty[:, None] & (column < width)[None, :]
            plt.store(
                out_ref.at[place[:, None], column[None, :]], jnp.zeros((_ROWS, columns), out_ref.dtype), mask=mask
            )

        lax.fori_loop(0, pl.cdiv(width, columns), step, None)
