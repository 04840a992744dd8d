"""The exchange by cells of fixed size over `lax.all_to_all`."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from .._grouping import Grouping
from .._permute import combine_rows, dispatch_rows, take_filled
from .._routing import Routing
from ._base import (
    AbstractExchange,
    ExchangePlan,
    bounded,
    group_arrivals,
    group_by_shard,
    rounds_for,
    split_experts,
    weights_of_rows,
)


class _Cells(eqx.Module):
    """The places of assignments in the cells that a shard sends: the assignment of every place, or `tokens * k` for
    none, and the place of every assignment, or the number of places."""

    order: Int32[Array, " capacity"]
    position: Int32[Array, "tokens k"]
    axis_name: str = eqx.field(static=True)


class PaddedAllToAll(AbstractExchange):
    """Every shard sends every other a cell of rows, of the same size for all, over `jax.lax.all_to_all`.

    Runs on every platform. In the worst case a cell holds all assignments of a shard's tokens, so that all cells
    together are `shards` times as large as balanced routing needs; a `capacity_factor` bounds them.
    """

    def rows(self, tokens: int, k: int, experts: int, shards: int, capacity_factor: float | int | None) -> int:
        worst = tokens * min(k, experts // shards)
        return shards * bounded(worst, tokens * k / shards, capacity_factor)

    def plan(
        self,
        routing: Routing,
        *,
        axis_name: str,
        capacity_factor: float | int | None = None,
        round: int | Int32[Array, ""] = 0,
    ) -> ExchangePlan:
        tokens, k = routing.experts.shape
        shards, local_experts = split_experts(routing, axis_name)
        cell = self.rows(tokens, k, routing.num_experts, shards, capacity_factor) // shards
        by_shard = group_by_shard(routing, shards)
        order, position = _cells(by_shard, routing.experts // local_experts, cell, round)
        local_id = jnp.where(routing.experts < routing.num_experts, routing.experts % local_experts, local_experts)
        ids = _swap(take_filled(local_id.reshape(-1), order, fill=local_experts), axis_name)
        served = jnp.clip(by_shard.sizes - round * cell, 0, cell).sum(dtype=jnp.int32)
        rounds = lax.pmax(rounds_for(by_shard.sizes.max(), cell), axis_name)
        overflow = by_shard.sizes.sum(dtype=jnp.int32) - served
        return ExchangePlan(
            group_arrivals(ids[:, None], local_experts), overflow, rounds, _Cells(order, position, axis_name)
        )

    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        cells = plan.transport
        tokens = dispatch_rows(x, cells.order, cells.position)
        flat = dispatch_rows(weights.reshape(-1, 1), cells.order, cells.position.reshape(-1, 1))
        arrived = _swap(flat, cells.axis_name)
        return _swap(tokens, cells.axis_name), weights_of_rows(arrived, plan.grouping)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        cells = plan.transport
        return combine_rows(_swap(rows, cells.axis_name), cells.order, cells.position)


def _swap(cells: Shaped[Array, "capacity ..."], axis_name: str) -> Shaped[Array, "capacity ..."]:
    """Sends cell `s` to shard `s`; the cells that arrive are in the order of the shards that sent them."""
    return lax.all_to_all(cells, axis_name, split_axis=0, concat_axis=0, tiled=True)


def _cells(
    by_shard: Grouping, shard: Int[Array, "tokens k"], cell: int, round: int | Int32[Array, ""]
) -> tuple[Array, Array]:
    """Puts the assignments of `round` into their shards' cells, from the front."""
    sizes, assignments = by_shard.sizes, by_shard.position.size
    places = sizes.shape[0] * cell
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    place = jnp.arange(cell, dtype=jnp.int32)[None] + round * cell
    source = jnp.where(place < sizes[:, None], starts[:, None] + place, assignments)
    order = take_filled(by_shard.order, source.reshape(-1), fill=assignments)
    rank = by_shard.position - take_filled(starts, shard, fill=0) - round * cell
    fits = (by_shard.position < assignments) & (rank >= 0) & (rank < cell)
    return order, jnp.where(fits, shard * cell + rank, places)
