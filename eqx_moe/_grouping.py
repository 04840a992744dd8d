"""Grouping: from the experts of every token to rows sorted by expert, and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from ._grouping_pallas import group_by_counting
from ._pallas import why_no_pallas
from ._permute import check_indexable, combine_rows, dispatch_rows
from ._routing import Routing, known_or_none
from ._vma import check_unsharded

# `k * experts` up to which counting is faster than sorting on an H200: 48 against 119 us at 8 * 128 and 24576 tokens,
# 350 against 140 at 16 * 256 and 32768 tokens.
_MOST_TO_COUNT = 1024


class Grouping(eqx.Module):
    """The permutation that sorts assignments (a token and one of its experts) by expert, and its inverse.

    - `order`: int32, `[rows]`; the assignment `token * k + choice` of every row, or `tokens * k` for the rows past
      `sum(sizes)`, which belong to none.
    - `position`: int32, `[tokens, k]`; the row of every assignment, or `rows` for tokens that are routed nowhere.
    - `sizes`: int32, `[experts]`; rows of every expert, which is also its load.
    """

    order: Int32[Array, " rows"]
    position: Int32[Array, "tokens k"]
    sizes: Int32[Array, " experts"]


def group_by_expert(routing: Routing) -> Grouping:
    """Sorts the assignments by expert, and those of one expert by token.

    **Arguments:**

    - `routing`: an [`eqx_moe.Routing`][]; ids outside `range(num_experts)` are put last, in no group.

    **Returns:** an [`eqx_moe.Grouping`][] with `rows = tokens * k`.

    **Raises:** `ValueError` if `tokens * k` does not fit into 31 bits.
    """
    check_unsharded(tokens=routing.experts)
    rows = routing.experts.size
    check_indexable(rows, "tokens * k")
    experts = known_or_none(routing.experts, routing.num_experts)
    by_sorting = lambda experts: _group_by_sorting(experts, routing.num_experts)
    k = experts.shape[1]
    if why_no_pallas("cuda") is None and 0 < rows and k * routing.num_experts <= _MOST_TO_COUNT:
        by_counting = jax.custom_batching.custom_vmap(lambda experts: group_by_counting(experts, routing.num_experts))
        by_counting.def_vmap(lambda n, _, experts: (jax.vmap(by_sorting)(experts), (True, True, True)))
        return Grouping(*lax.platform_dependent(experts, cuda=by_counting, default=by_sorting))
    return Grouping(*by_sorting(experts))


def dispatch(x: Float[Array, "tokens d_model"], grouping: Grouping) -> Float[Array, "rows d_model"]:
    """Copies every token to the rows of its experts; the adjoint of [`eqx_moe.combine`][].

    **Arguments:**

    - `x`: `[tokens, d_model]`.
    - `grouping`: of the same tokens.

    **Returns:** `[rows, d_model]`, of the dtype of `x`; rows that belong to no assignment are zero.
    """
    _check_tokens(x, grouping.position)
    return dispatch_rows(x, grouping.order, grouping.position)


def combine(rows: Float[Array, "rows d_model"], grouping: Grouping) -> Float[Array, "tokens d_model"]:
    """Sums the rows of every token, in float32; the adjoint of [`eqx_moe.dispatch`][].

    **Arguments:**

    - `rows`: `[rows, d_model]`; what stands in rows that belong to no assignment, NaN included, has no effect.
    - `grouping`: of the same rows.

    **Returns:** `[tokens, d_model]`, of the dtype of `rows`; zero for tokens that are routed nowhere.
    """
    _check_rows(rows, grouping.order)
    return combine_rows(rows, grouping.order, grouping.position)


def row_weights(routing: Routing, grouping: Grouping) -> Float32[Array, " rows"]:
    """The routing weights in row order, zero in rows that belong to no assignment.

    **Arguments:**

    - `routing`: an [`eqx_moe.Routing`][].
    - `grouping`: made from it by [`eqx_moe.group_by_expert`][].

    **Returns:** float32, `[rows]`.
    """
    _check_assignments(routing.weights, grouping.position)
    if routing.num_experts != grouping.sizes.shape[0]:
        raise ValueError(f"experts: the routing has {routing.num_experts}, the grouping {grouping.sizes.shape[0]}")
    return dispatch_rows(routing.weights.reshape(-1, 1), grouping.order, grouping.position.reshape(-1, 1))[:, 0]


def _group_by_sorting(experts: Int[Array, "tokens k"], num_experts: int) -> tuple[Array, Array, Array]:
    """`order`, `position` and `sizes`; ids of `num_experts` belong nowhere."""
    flat, rows = experts.reshape(-1), experts.size
    index = jnp.arange(rows, dtype=jnp.int32)
    order, sizes = _sort(flat, index, num_experts)
    position = jnp.zeros(rows, jnp.int32).at[order].set(index, unique_indices=True)
    # The assignments of tokens that are routed nowhere were sorted past the last group.
    order = jnp.where(index < sizes.sum(dtype=sizes.dtype), order, rows)
    position = jnp.where(flat < num_experts, position, rows)
    return order, position.reshape(experts.shape), sizes


def _sort(experts: Int[Array, " rows"], index: Int[Array, " rows"], num_experts: int) -> tuple[Array, Array]:
    """The assignments sorted by expert, stably, and how many each expert has."""
    rows = experts.shape[0]
    bounds = jnp.arange(num_experts + 1, dtype=jnp.int32)
    if (num_experts + 1) * rows < 2**32:
        # One integer holds expert and index: sorting single numbers is several times faster than sorting pairs.
        packed = jnp.sort(experts.astype(jnp.uint32) * rows + index.astype(jnp.uint32))
        order = (packed % max(rows, 1)).astype(jnp.int32)
        starts = jnp.searchsorted(packed, bounds.astype(jnp.uint32) * rows)
    else:
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        starts = jnp.searchsorted(experts[order], bounds)
    return order, jnp.diff(starts).astype(jnp.int32)


# Arguments that hold arrays are taken apart, because axis names are bound per call and not across a module's fields.
def _check_tokens(x: Float[Array, "tokens d_model"], position: Int[Array, "tokens k"]) -> None: ...


def _check_rows(rows: Float[Array, "rows d_model"], order: Int[Array, " rows"]) -> None: ...


def _check_assignments(weights: Float[Array, "tokens k"], position: Int[Array, "tokens k"]) -> None: ...
