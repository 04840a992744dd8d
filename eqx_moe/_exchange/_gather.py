"""The exchange in which every shard sees all tokens of the group."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .._grouping import Grouping
from .._routing import Routing
from ._base import AbstractExchange, ExchangePlan, bounded, group_arrivals, split_experts, weights_of_rows


class _Axis(eqx.Module):
    name: str = eqx.field(static=True)


class AllGatherReduceScatter(AbstractExchange):
    """Every shard gathers the tokens of all shards, computes those for its own experts, and the results are summed and
    scattered (`jax.lax.psum_scatter`, in the dtype of the tokens).

    It moves `shards - 1` times the tokens whatever `k` is, so it is the better choice where `k` is about as large as
    the number of shards, or the tokens are few. Its buffer of tokens never overflows; a `capacity_factor` bounds the
    rows that a shard's experts compute.
    """

    def rows(self, tokens: int, k: int, experts: int, shards: int, capacity_factor: float | int | None) -> int:
        return bounded(shards * tokens * min(k, experts // shards), tokens * k, capacity_factor)

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
        rows = self.rows(tokens, k, routing.num_experts, shards, capacity_factor)
        ids = lax.all_gather(routing.experts, axis_name, tiled=True) - lax.axis_index(axis_name) * local_experts
        mine = (ids >= 0) & (ids < local_experts)
        # Which round serves an assignment: the tokens' order, so that no expert is preferred.
        turn = (jnp.cumsum(mine.reshape(-1), dtype=jnp.int32).reshape(ids.shape) - 1) // max(rows, 1)
        served = mine & (turn == round)
        all_rows = group_arrivals(jnp.where(served, ids, local_experts), local_experts)
        position = jnp.minimum(all_rows.position, rows)  # which only those that are not served exceed
        grouping = Grouping(all_rows.order[:rows], position, all_rows.sizes)
        overflow = (mine & ~served).sum(dtype=jnp.int32)
        rounds = lax.pmax(jnp.where(mine, turn, 0).max(initial=0) + 1, axis_name)
        return ExchangePlan(grouping, overflow, rounds, _Axis(axis_name))

    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        gather = lambda leaf: lax.all_gather(leaf, plan.transport.name, tiled=True)
        return gather(x), weights_of_rows(gather(weights), plan.grouping)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        return lax.psum_scatter(rows, plan.transport.name, tiled=True)
