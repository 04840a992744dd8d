"""The exchange of exactly the rows there are, over `lax.ragged_all_to_all`."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from .._permute import combine_rows, dispatch_rows, take_filled
from .._routing import Routing
from .._vma import match_varying
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


class _Slices(eqx.Module):
    """What a shard sends, by the shard that it goes to, and what it gets, by the shard that it comes from.

    - `order`, `position`: of its own assignments, sorted by the shard that holds their expert.
    - `starts`: where the slice for every shard starts in what it sends.
    - `remote`: where that slice is written on the shard that it goes to.
    - `sizes`: of these slices.
    - `arrivals`: where the slice from every shard is written here.
    - `origins`: where that slice starts on the shard that it comes from.
    - `arriving`: its size.
    """

    order: Int32[Array, " rows"]
    position: Int32[Array, "tokens k"]
    starts: Int32[Array, " shards"]
    remote: Int32[Array, " shards"]
    sizes: Int32[Array, " shards"]
    arrivals: Int32[Array, " shards"]
    origins: Int32[Array, " shards"]
    arriving: Int32[Array, " shards"]
    capacity: int = eqx.field(static=True)
    axis_name: str = eqx.field(static=True)


class RaggedAllToAll(AbstractExchange):
    """Sends exactly the rows there are, over `jax.lax.ragged_all_to_all`, into one receive buffer for all shards.

    XLA has that collective on GPUs and TPUs; elsewhere an emulation, which gathers what all shards send, gives the same
    numbers and is meant for tests. In the worst case the buffer holds all assignments of all shards' tokens, `shards`
    times as many as balanced routing needs; a `capacity_factor` bounds it. Under skew it needs a smaller factor than
    [`eqx_moe.PaddedAllToAll`][], whose every cell has to be large enough by itself.
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
        capacity = self.rows(tokens, k, routing.num_experts, shards, capacity_factor)
        by_shard = group_by_shard(routing, shards)
        slices, rounds = _slices(by_shard.sizes, capacity, axis_name, round)
        slices = _Slices(by_shard.order, by_shard.position, **slices, capacity=capacity, axis_name=axis_name)
        sent = take_filled(routing.experts.reshape(-1) % local_experts, by_shard.order, fill=local_experts)
        ids = _there(sent, jnp.full(capacity, local_experts, jnp.int32), slices)
        overflow = (by_shard.sizes - slices.sizes).sum(dtype=jnp.int32)
        return ExchangePlan(group_arrivals(ids[:, None], local_experts), overflow, rounds, slices)

    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        slices = plan.transport
        tokens = dispatch_rows(x, slices.order, slices.position)
        flat = dispatch_rows(weights.reshape(-1, 1), slices.order, slices.position.reshape(-1, 1))
        arrived = _there(flat, jnp.zeros((slices.capacity, 1), weights.dtype), slices)
        out = jnp.zeros((slices.capacity, x.shape[1]), x.dtype)
        return _there(tokens, out, slices), weights_of_rows(arrived, plan.grouping)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        slices = plan.transport
        out = jnp.zeros((slices.order.shape[0], rows.shape[1]), rows.dtype)
        offsets = slices.arrivals, slices.arriving, slices.origins, slices.sizes
        back = ragged_all_to_all(rows, out, *offsets, axis_name=slices.axis_name)
        return combine_rows(back, slices.order, slices.position)


def ragged_all_to_all(
    operand: Shaped[Array, "rows *d"],
    output: Shaped[Array, "capacity *d"],
    input_offsets: Int32[Array, " shards"],
    send_sizes: Int32[Array, " shards"],
    output_offsets: Int32[Array, " shards"],
    recv_sizes: Int32[Array, " shards"],
    *,
    axis_name: str,
) -> Shaped[Array, "capacity *d"]:
    """`jax.lax.ragged_all_to_all`, which see, or its emulation where XLA has none.

    Derivatives are JAX's own: its transpose is wrong for `output` if slices are empty (jax 0.12), so pass a constant.
    """
    operands = match_varying(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    native = lambda *operands: lax.ragged_all_to_all(*operands, axis_name=axis_name)
    emulated = lambda *operands: _emulate(*operands, axis_name=axis_name)
    return lax.platform_dependent(*operands, cpu=emulated, default=native)


def _emulate(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name: str) -> Array:
    """Every row of the output looks for the slice that covers it, and fetches its row from what all shards send."""
    del send_sizes  # each is another shard's `recv_sizes`
    swap = lambda x: lax.all_to_all(x, axis_name, 0, 0, tiled=True)
    place, landing = jnp.arange(output.shape[0], dtype=jnp.int32)[:, None], swap(output_offsets)[None]
    within = place - landing
    covered = (within >= 0) & (within < recv_sizes[None])
    start = swap(input_offsets) + jnp.arange(landing.shape[1], dtype=jnp.int32) * operand.shape[0]
    source = jnp.where(covered, start[None] + within, 0).sum(axis=1, dtype=jnp.int32)  # at most one covers a row
    everything = lax.all_gather(operand, axis_name, tiled=True)
    found = everything.at[source].get(mode="clip")
    return jnp.where(covered.any(axis=1).reshape(-1, *[1] * (output.ndim - 1)), found, output)


def _there(sent: Shaped[Array, "rows *d"], out: Shaped[Array, "capacity *d"], slices: _Slices) -> Array:
    """Sends the slices to the shards they are for, into `out`."""
    offsets = slices.starts, slices.sizes, slices.remote, slices.arriving
    return ragged_all_to_all(sent, out, *offsets, axis_name=slices.axis_name)


def _slices(
    sizes: Int32[Array, " shards"], capacity: int, axis_name: str, round: int | Int32[Array, ""]
) -> tuple[dict[str, Array], Int32[Array, ""]]:
    """The offsets and sizes of all slices of `round`, and how many rounds there are.

    Rows for one shard are numbered through, those of the first shard first; round `r` serves the numbers from
    `r * capacity` on.
    """
    counts = lax.all_gather(sizes, axis_name)  # [from, to]
    before = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    window = round * capacity
    first = jnp.clip(window - before, 0, counts)
    size = jnp.clip(window + capacity - before, 0, counts) - first
    start = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts + first
    landing = jnp.clip(before + first - window, 0, capacity)
    me = lax.axis_index(axis_name)
    rounds = lax.pmax(rounds_for(counts.sum(axis=0, dtype=jnp.int32).max(), capacity), axis_name)
    sent = {"starts": start[me], "remote": landing[me], "sizes": size[me]}
    return sent | {"arrivals": landing[:, me], "origins": start[:, me], "arriving": size[:, me]}, rounds
