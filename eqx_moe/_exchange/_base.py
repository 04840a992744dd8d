"""The contract of an exchange: how tokens reach the shards that hold their experts, and how the results come back."""

import abc
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .._grouping import Grouping, group_by_expert
from .._permute import dispatch_rows
from .._routing import Routing, known_or_none


class ExchangePlan(eqx.Module):
    """What one shard sends and receives; made by [`eqx_moe.AbstractExchange`][]`.plan` and read by its other methods.

    - `grouping`: an [`eqx_moe.Grouping`][] of what arrives, by local expert. Its `tokens` are the `capacity` rows of
      the receive buffer.
    - `overflow`: int32; assignments that this plan does not serve, because a buffer of bounded size is full. Every
      one is counted by one shard: the sum over shards is their number.
    - `rounds`: int32, the same on all shards; how many rounds serve all assignments, at least 1.
    - `transport`: what the exchange needs to move rows; only the exchange that made it reads it.
    """

    grouping: Grouping
    overflow: Int32[Array, ""]
    rounds: Int32[Array, ""]
    transport: Any


class AbstractExchange(eqx.Module):
    """Moves tokens between the shards of a mesh axis, inside `jax.shard_map`.

    `send` copies every token to the shards that hold its experts, and its routing weights with it; `receive` is the
    adjoint of the former, so it sums for every token what comes back. Each shard holds `local_experts = experts /
    shards` experts: those from `index * local_experts` on.

    Nothing is dropped unless `capacity_factor` bounds the buffers; then round 0 serves the first assignments, in the
    order of the tokens, round 1 the next ones, and `plan.rounds` rounds serve all. Nothing is written out of bounds.

    An exchange of your own needs the four methods below; keep all fields static.
    """

    @abc.abstractmethod
    def rows(self, tokens: int, k: int, experts: int, shards: int, capacity_factor: float | int | None) -> int:
        """How many rows the experts of a shard get to compute at most, in one round.

        **Arguments:**

        - `tokens`: tokens of one shard.
        - `k`, `experts`, `shards`: sizes.
        - `capacity_factor`: buffers as a multiple of what perfect balance would need, or `None` for the worst case.
        """

    @abc.abstractmethod
    def plan(
        self,
        routing: Routing,
        *,
        axis_name: str,
        capacity_factor: float | int | None = None,
        round: int | Int32[Array, ""] = 0,
    ) -> ExchangePlan:
        """Decides what goes where.

        **Arguments:**

        - `routing`: an [`eqx_moe.Routing`][] of this shard's tokens over all `experts`.
        - `axis_name`: the mesh axis over which the experts are sharded.
        - `capacity_factor`: buffers as a multiple of what perfect balance would need, or `None` for the worst case.
        - `round`: which of the assignments to serve, if the buffers are bounded.
        """

    @abc.abstractmethod
    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        """The tokens for this shard's experts, from all shards, and the routing weights that come with them, in the
        order of the rows of `plan.grouping`; linear in `x` and in `weights`."""

    @abc.abstractmethod
    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        """The results of this shard's tokens, each summed over the shards; linear in `rows`."""


def split_experts(routing: Routing, axis_name: str) -> tuple[int, int]:
    """The number of shards and of experts that each holds; raises `ValueError` unless they divide."""
    shards = lax.axis_size(axis_name)
    if routing.num_experts % shards:
        raise ValueError(
            f"experts={routing.num_experts} cannot be divided among the {shards} shards of the mesh axis {axis_name!r}"
        )
    return shards, routing.num_experts // shards


def group_by_shard(routing: Routing, shards: int) -> Grouping:
    """The assignments sorted by the shard that holds their expert, and those of one shard by token."""
    experts = known_or_none(routing.experts, routing.num_experts)
    return group_by_expert(Routing(experts // (routing.num_experts // shards), routing.weights, shards))


def group_arrivals(ids: Int32[Array, "capacity k"], local_experts: int) -> Grouping:
    """What arrived, by local expert; ids of `local_experts` belong to none."""
    return group_by_expert(Routing(ids, jnp.zeros(ids.shape, jnp.float32), local_experts))


def weights_of_rows(weights: Float[Array, "capacity k"], grouping: Grouping) -> Float32[Array, " rows"]:
    """The weights of what arrived, in the order of the experts' rows."""
    flat = weights.astype(jnp.float32).reshape(-1, 1)
    return dispatch_rows(flat, grouping.order, grouping.position.reshape(-1, 1))[:, 0]


def bounded(worst: int, balanced: float | int, capacity_factor: float | int | None) -> int:
    """`capacity_factor` times `balanced` rounded up, at least 1 and at most `worst`, which `None` stands for."""
    if capacity_factor is None:
        return worst
    return min(worst, max(1, math.ceil(capacity_factor * balanced)))


def check_capacity_factor(capacity_factor: float | int | None) -> None:
    """Raises `ValueError` unless it is positive and finite, or `None`."""
    if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
        raise ValueError(f"capacity_factor={capacity_factor} must be positive and finite, or None for the worst case")


def rounds_for(rows: Int32[Array, ""], capacity: int) -> Int32[Array, ""]:
    """How many rounds of `capacity` rows serve `rows`; at least 1."""
    return jnp.maximum((rows + capacity - 1) // max(capacity, 1), 1)
