"""Sorting assignments by expert by counting, for GPUs, in Pallas.

The tokens are dealt out to programs in order. One kernel counts what every program's tokens assign to every expert,
one adds up the counts of the programs before, and one then knows the place of every assignment.
"""

import functools as ft

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32

from ._pallas import iota, out_struct, power_of_two
from ._vma import match_varying

# Assignments' one-hot numbers that a program holds in registers, and how many programs there are at most.
_NUMBERS = 2048
_PROGRAMS = 1024


def group_by_counting(
    experts: Int32[Array, "tokens k"], num_experts: int, *, interpret: bool = False
) -> tuple[Int32[Array, " rows"], Int32[Array, "tokens k"], Int32[Array, " experts"]]:
    """`order`, `position` and `sizes` of a [`eqx_moe.Grouping`][]; ids are in `range(num_experts)`, or `num_experts`
    for assignments that belong nowhere."""
    tokens, k = experts.shape
    width = max(16, power_of_two(num_experts))
    height = min(max(1, _NUMBERS // width), power_of_two(tokens))
    steps = pl.cdiv(pl.cdiv(tokens, height), _PROGRAMS)
    programs = pl.cdiv(tokens, height * steps)
    call = ft.partial(
        pl.pallas_call, compiler_params=plt.CompilerParams(num_warps=4, num_stages=1), interpret=interpret
    )
    shape = lambda shape: out_struct(shape, jnp.int32, experts)
    size = {"height": height, "steps": steps}
    counts = call(ft.partial(_count, **size), grid=(programs,), out_shape=shape((programs, width)), name="moe_count")(
        experts
    )
    columns = min(width, 16)
    before, total = call(
        ft.partial(_add_up, columns=columns),
        grid=(width // columns,),
        out_shape=(shape((programs, width)), shape((width,))),
        name="moe_add_up",
    )(counts)
    (nowhere, _) = match_varying(jnp.full(tokens * k, tokens * k, jnp.int32), experts)
    order, position = call(
        ft.partial(_place, num_experts=num_experts, **size),
        grid=(programs,),
        out_shape=(shape((tokens * k,)), shape((tokens, k))),
        input_output_aliases={3: 0},
        name="moe_place",
    )(experts, before, total, nowhere)
    return order, position, total[:num_experts]


def _of_block(experts_ref, block, height: int, width: int):
    """The tokens of a block, and for every choice its ids and, of every expert, whether it is the one."""
    tokens, k = experts_ref.shape
    token = block * height + iota(height)
    chosen = []
    for choice in range(k):
        ids = plt.load(experts_ref.at[token, jnp.full(height, choice, jnp.int32)], mask=token < tokens, other=width)
        chosen.append((ids, ids[:, None] == iota(width)[None, :]))
    return token, chosen


def _count(experts_ref, counts_ref, *, height: int, steps: int):
    width = counts_ref.shape[1]
    first = pl.program_id(0) * steps

    def step(i, counts):
        _, chosen = _of_block(experts_ref, first + i, height, width)
        return counts + jnp.sum(sum(mine.astype(jnp.int32) for _, mine in chosen), axis=0, dtype=jnp.int32)

    counts = lax.fori_loop(0, steps, step, jnp.zeros(width, jnp.int32))
    plt.store(counts_ref.at[pl.program_id(0), iota(width)], counts)


def _add_up(counts_ref, before_ref, total_ref, *, columns: int):
    programs = counts_ref.shape[0]
    program = iota(power_of_two(programs))
    column = pl.program_id(0) * columns + iota(columns)
    index = (program[:, None], column[None, :])
    known = jnp.broadcast_to((program < programs)[:, None], (program.shape[0], columns))
    counts = plt.load(counts_ref.at[index], mask=known, other=0)
    plt.store(before_ref.at[index], jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts, mask=known)
    plt.store(total_ref.at[column], jnp.sum(counts, axis=0, dtype=jnp.int32))


def _place(
    experts_ref, before_ref, total_ref, _, order_ref, position_ref, *, num_experts: int, height: int, steps: int
):
    tokens, k = experts_ref.shape
    width = total_ref.shape[0]
    columns = iota(width)
    total = plt.load(total_ref.at[columns])
    start = jnp.cumsum(total, axis=0, dtype=jnp.int32) - total + plt.load(before_ref.at[pl.program_id(0), columns])
    first = pl.program_id(0) * steps

    def step(i, start):
        token, chosen = _of_block(experts_ref, first + i, height, width)
        counts = sum(mine.astype(jnp.int32) for _, mine in chosen)
        free = (
            start[None, :] + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
        )  # the next free place of every expert
        for choice, (ids, mine) in enumerate(chosen):
            place = jnp.sum(jnp.where(mine, free, 0), axis=1, dtype=jnp.int32)
            free = free + mine.astype(jnp.int32)
            grouped = (token < tokens) & (ids < num_experts)
            place = jnp.where(grouped, place, tokens * k)  # the interpreter writes what is masked out as well
            plt.store(order_ref.at[place], token * k + choice, mask=grouped)
            plt.store(position_ref.at[token, jnp.full(height, choice, jnp.int32)], place, mask=token < tokens)
        return start + jnp.sum(counts, axis=0, dtype=jnp.int32)

    lax.fori_loop(0, steps, step, start)
