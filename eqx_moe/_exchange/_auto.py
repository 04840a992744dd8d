"""The automatic choice of an exchange."""

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .._routing import Routing
from ._base import AbstractExchange, ExchangePlan
from ._gather import AllGatherReduceScatter
from ._padded import PaddedAllToAll
from ._ragged import RaggedAllToAll


class _Chosen(eqx.Module):
    exchange: AbstractExchange
    plan: ExchangePlan


class AutoExchange(AbstractExchange):
    """Chooses by what is moved and allocated."""

    def select(
        self, *, tokens: int, k: int, experts: int, shards: int, capacity_factor: float | int | None, platform: str
    ) -> AbstractExchange:
        if k >= shards:
            return AllGatherReduceScatter()
        if platform in ("gpu", "tpu"):
            return RaggedAllToAll()
        return AllGatherReduceScatter() if capacity_factor is None else PaddedAllToAll()

    def _choose(self, tokens: int, k: int, experts: int, shards: int, factor: float | int | None) -> AbstractExchange:
        sizes = {"tokens": tokens, "k": k, "experts": experts, "shards": shards, "capacity_factor": factor}
        return self.select(**sizes, platform=jax.default_backend())

    def rows(self, tokens: int, k: int, experts: int, shards: int, capacity_factor: float | int | None) -> int:
        chosen = self._choose(tokens, k, experts, shards, capacity_factor)
        return chosen.rows(tokens, k, experts, shards, capacity_factor)

    def plan(
        self,
        routing: Routing,
        *,
        axis_name: str,
        capacity_factor: float | int | None = None,
        round: int | Int32[Array, ""] = 0,
    ) -> ExchangePlan:
        tokens, k = routing.experts.shape
        chosen = self._choose(tokens, k, routing.num_experts, lax.axis_size(axis_name), capacity_factor)
        plan = chosen.plan(routing, axis_name=axis_name, capacity_factor=capacity_factor, round=round)
        return ExchangePlan(plan.grouping, plan.overflow, plan.rounds, _Chosen(chosen, plan))

    def send(self, x: Float[Array, "tokens d_model"], plan: ExchangePlan) -> Float[Array, "capacity d_model"]:
        return plan.transport.exchange.send(x, plan.transport.plan)

    def send_weights(self, weights: Float[Array, "tokens k"], plan: ExchangePlan) -> Float32[Array, " rows"]:
        return plan.transport.exchange.send_weights(weights, plan.transport.plan)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        return plan.transport.exchange.receive(rows, plan.transport.plan)
