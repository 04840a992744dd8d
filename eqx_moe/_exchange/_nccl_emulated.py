"""What NCCL's expert-parallel kernels do, in plain JAX on any platform: for tests, as everything is gathered."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .._permute import take_filled, take_rows
from .._te_ep import ALIGNMENT
from ._base import group_arrivals


@dataclasses.dataclass(frozen=True)
class Emulated:
    """The operations of `_te_ep.Kernels`, which see."""

    local_experts: int
    k: int
    slots: int
    axis_name: str

    def prepare(self, ids: Int32[Array, "tokens k"]) -> Int32[Array, " slots"]:
        """For every slot the assignment that comes there, numbered through all shards, or their number for none."""
        mine = self._gather(ids) - lax.axis_index(self.axis_name) * self.local_experts
        known = (mine >= 0) & (mine < self.local_experts)
        grouping = group_arrivals(jnp.where(known, mine, self.local_experts), self.local_experts)
        row = rows_of_slots(grouping.sizes, self.slots, fill=grouping.order.shape[0])
        return take_filled(grouping.order, row, fill=grouping.order.shape[0])

    def dispatch(
        self,
        handle: Int32[Array, " slots"],
        ids: Int32[Array, "tokens k"],
        x: Float[Array, "tokens d_model"],
        weights: Float32[Array, "tokens k"],
    ) -> tuple[Float[Array, "slots d_model"], Float32[Array, " slots"]]:
        return self.combine_transposed(handle, x), take_rows(self._gather(weights).reshape(-1, 1), handle)[:, 0]

    def dispatch_transposed(
        self,
        handle: Int32[Array, " slots"],
        rows: Float[Array, "slots d_model"],
        row_weights: Float32[Array, " slots"],
        tokens: int,
    ) -> tuple[Float[Array, "tokens d_model"], Float32[Array, "tokens k"]]:
        weights = self._add_up(row_weights[:, None], handle, tokens * self.k)
        return self.combine(handle, rows, tokens), weights.reshape(tokens, self.k)

    def combine(
        self, handle: Int32[Array, " slots"], rows: Float[Array, "slots d_model"], tokens: int
    ) -> Float[Array, "tokens d_model"]:
        return self._add_up(rows, handle // self.k, tokens)

    def combine_transposed(
        self, handle: Int32[Array, " slots"], y: Float[Array, "tokens d_model"]
    ) -> Float[Array, "slots d_model"]:
        return take_rows(self._gather(y), handle // self.k)

    def _gather(self, x: Array) -> Array:
        return lax.all_gather(x, self.axis_name, tiled=True)

    def _add_up(
        self, rows: Float[Array, "slots d"], place: Int32[Array, " slots"], count: int
    ) -> Float[Array, "{count} d"]:
        total = jnp.zeros((count * lax.axis_size(self.axis_name), rows.shape[1]), rows.dtype)
        return lax.psum_scatter(total.at[place].add(rows, mode="drop"), self.axis_name, tiled=True)


def slots_for(rows: int, local_experts: int) -> int:
    """Places for `rows` rows of any distribution among the experts."""
    padded = rows + (ALIGNMENT - 1) * min(local_experts, rows)
    return -(-padded // ALIGNMENT) * ALIGNMENT


def rows_of_slots(sizes: Int32[Array, " experts"], slots: int, *, fill: int) -> Int32[Array, " slots"]:
    """For every slot the row that lies there, of rows that are sorted by expert; `fill` for padding."""
    ends = jnp.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT, dtype=jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, slot, side="right").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    within = slot - starts[expert]
    first = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    row = take_filled(first, expert, fill=0) + within
    return jnp.where(within < take_filled(sizes, expert, fill=0), row, fill)
