"""The exchange over NCCL's expert-parallel kernels, by way of Transformer Engine."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from .. import _te_ep
from .._grouping import Grouping
from .._init import check_positive
from .._linear import linear
from .._matmul._auto import default_platform
from .._permute import invert
from .._routing import Routing, known_or_none
from .._stats import expert_load
from .._te_ep import Kernels
from .._vma import match_varying
from ._base import (
    AbstractExchange,
    ExchangePlan,
    bounded,
    group_by_shard,
    rounds_for,
    split_experts,
    weights_of_rows,
)
from ._nccl_emulated import Emulated, rows_of_slots, slots_for


@dataclasses.dataclass(frozen=True)
class NCCLGroup:
    """What NCCL's expert parallelism is started with, once in every process: one for all layers of a program.

    - `experts`, `d_model`: of every layer.
    - `tokens`: the most that a device sends at once, which is those of a chunk.
    - `k`: the most experts of a token.
    - `shards`: devices along the mesh axis of the experts.
    """

    experts: int
    d_model: int
    tokens: int
    k: int
    shards: int

    def __post_init__(self):
        check_positive(**dataclasses.asdict(self))
        if self.k > self.experts:
            raise ValueError(f"k={self.k} cannot be larger than experts={self.experts}")
        if self.experts % self.shards:
            raise ValueError(f"experts={self.experts} cannot be divided among shards={self.shards}")

    def bootstrap(self, mesh: jax.sharding.Mesh, axis: str = "expert") -> None:
        """Starts it in all processes together, before the first step. On a machine without NVIDIA GPUs it does nothing:
        the exchange is emulated there.

        **Arguments:**

        - `mesh`: of all devices.
        - `axis`: the one over which experts are sharded.

        **Raises:** `ValueError` if the mesh does not fit; `RuntimeError` if another group was started before, or if it
        cannot be used on this machine, with the remedy.
        """
        global _started
        if mesh.shape.get(axis) != self.shards:
            raise ValueError(
                f"the group has shards={self.shards}, and the mesh has {dict(mesh.shape)}: along {axis!r} it must have "
                "as many devices"
            )
        if default_platform() != "cuda" or _started == self:
            return
        if _started is not None:
            raise RuntimeError(f"{_started} was started in this process before {self}: `finalize` that one first")
        if (reason := _te_ep.why_no_te_ep()) is not None:
            raise RuntimeError(reason)
        local_experts = self.experts // self.shards
        slots = slots_for(self.shards * self.tokens * min(self.k, local_experts), local_experts)
        _te_ep.bootstrap(mesh, axis, experts=self.experts, d_model=self.d_model, tokens=self.tokens, slots=slots)
        _started = self

    def finalize(self) -> None:
        """Ends it, so that another group can be started; JAX forgets what it has compiled."""
        global _started
        if _started == self:
            _te_ep.finalize()
            _started = None

    def check(self, tokens: int, k: int, experts: int, shards: int) -> None:
        """Raises `ValueError` unless a layer of these sizes can use it."""
        wrong = [
            f"{name}={layer}, and the group has {mine}"
            for name, layer, mine in (("experts", experts, self.experts), ("shards", shards, self.shards))
            if layer != mine
        ]
        wrong += [
            f"{name}={layer}, and the group has at most {most}"
            for name, layer, most in (("tokens", tokens, self.tokens), ("k", k, self.k))
            if layer > most
        ]
        if wrong:
            raise ValueError(
                f"the layer does not fit the group that NCCLExchange was made with: {'; '.join(wrong)}. There is one "
                "group in a process, so give it the sizes that fit all layers"
            )


# The group that this process has started.
_started: NCCLGroup | None = None


class _Wired(eqx.Module):
    """- `handle`: the routing state that the kernels made.
    - `ids`: of the assignments of this round, -1 for the others.
    - `wire`: the operations that move rows.
    """

    handle: Shaped[Array, " handle"]
    ids: Int32[Array, "tokens k"]
    wire: Kernels | Emulated = eqx.field(static=True)


class NCCLExchange(AbstractExchange):
    """NCCL's own dispatch and combine for expert parallelism
    ([arXiv:2603.13606](https://arxiv.org/abs/2603.13606)), called through Transformer Engine. By its
    authors' account, tokens are put together inside a node before they cross the network.

    On NVIDIA GPUs it takes bfloat16 tokens, at least two GPUs with NVLink multicast, NCCL 2.30.4, Transformer Engine,
    and [`eqx_moe.NCCLGroup`][]`.bootstrap` before the first step; on other platforms an emulation gives the same
    numbers and is meant for tests. No token may have the same expert twice. Only the emulation can be batched by
    `jax.vmap`.

    **It has never run on GPUs**: its emulation and what is lowered for GPUs are tested, the kernels are not.

    **Arguments:**

    - `group`: an [`eqx_moe.NCCLGroup`][].
    """

    group: NCCLGroup = eqx.field(static=True)

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
        self.group.check(tokens, k, routing.num_experts, shards)
        rows = self.rows(tokens, k, routing.num_experts, shards, capacity_factor)
        served, rounds, overflow = _serve(routing, shards, rows, axis_name, round)
        ids = jnp.where(served, routing.experts, -1)
        load = lax.psum(expert_load(Routing(ids, routing.weights, routing.num_experts)), axis_name)
        first = lax.axis_index(axis_name) * local_experts
        sizes = lax.dynamic_slice_in_dim(match_varying(load, first)[0], first, local_experts)
        wire = _wire(self.group, local_experts, k, rows, axis_name)
        handle = match_varying(wire.prepare(ids), ids)[0]
        return ExchangePlan(_group_slots(sizes, rows, wire.slots), overflow, rounds, _Wired(handle, ids, wire))

    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        wire, state = plan.transport.wire, (plan.transport.handle, plan.transport.ids)
        _check_tokens(self.group, x)

        def forward(state, x, weights):
            return match_varying(*wire.dispatch(*state, x, weights), x)[:2]

        def back(state, rows, row_weights):
            x, weights = wire.dispatch_transposed(state[0], rows, row_weights, state[1].shape[0])
            x, weights, _ = match_varying(x, weights, rows)
            return _where_served(state[1], x), jnp.where(state[1] >= 0, weights, 0)

        rows, row_weights = linear(forward, back, state, *match_varying(x, weights.astype(jnp.float32)))
        return rows, weights_of_rows(row_weights[:, None], plan.grouping)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        wire, state = plan.transport.wire, (plan.transport.handle, plan.transport.ids)

        def forward(state, rows):
            y = match_varying(wire.combine(state[0], rows, state[1].shape[0]), rows)[0]
            return (_where_served(state[1], y),)

        def back(state, y):
            return match_varying(wire.combine_transposed(state[0], _where_served(state[1], y)), y)[:1]

        return linear(forward, back, state, rows)[0]


def _wire(group: NCCLGroup, local_experts: int, k: int, rows: int, axis_name: str) -> Kernels | Emulated:
    slots = slots_for(rows, local_experts)
    if default_platform() != "cuda":
        return Emulated(local_experts, k, slots, axis_name)
    if _started != group:
        other = "none" if _started is None else str(_started)
        raise RuntimeError(f"{group} was not started in this process ({other} was): call its `bootstrap` beforehand")
    return Kernels(local_experts, k, slots)


def _check_tokens(group: NCCLGroup, x: Float[Array, "tokens d_model"]) -> None:
    if x.shape[1] != group.d_model:
        raise ValueError(f"d_model={x.shape[1]}, and the group that NCCLExchange was made with has {group.d_model}")
    if default_platform() == "cuda" and x.dtype != jnp.bfloat16:
        raise ValueError(f"NCCL's kernels move bfloat16, and tokens are {x.dtype}: cast them, or use another exchange")


def _where_served(ids: Int32[Array, "tokens k"], x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
    """Zero for tokens that go nowhere: the kernels may leave them unwritten."""
    return jnp.where((ids >= 0).any(axis=1, keepdims=True), x, 0)


def _serve(
    routing: Routing, shards: int, rows: int, axis_name: str, round: int | Int32[Array, ""]
) -> tuple[Bool[Array, "tokens k"], Int32[Array, ""], Int32[Array, ""]]:
    """Which assignments are served in `round`, of how many rounds, and how many are not. Those for one shard are
    numbered through, the first shard's first; round `r` serves the numbers from `r * rows` on."""
    by_shard = group_by_shard(routing, shards)
    counts = lax.all_gather(by_shard.sizes, axis_name)  # [from, to]
    before = (jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts)[lax.axis_index(axis_name)]
    starts = jnp.cumsum(by_shard.sizes, dtype=jnp.int32) - by_shard.sizes
    known = known_or_none(routing.experts, routing.num_experts) < routing.num_experts
    shard = jnp.where(known, routing.experts // (routing.num_experts // shards), 0)
    number = (before - starts)[shard] + by_shard.position
    served = known & (number // max(rows, 1) == round)
    rounds = lax.pmax(rounds_for(counts.sum(axis=0, dtype=jnp.int32).max(), rows), axis_name)
    return served, rounds, (known & ~served).sum(dtype=jnp.int32)


def _group_slots(sizes: Int32[Array, " experts"], rows: int, slots: int) -> Grouping:
    """Of the rows among the slots that hold one."""
    position = rows_of_slots(sizes, slots, fill=rows)
    nowhere = jnp.where(position < rows, position, slots)
    return Grouping(invert(nowhere, slots)[:rows], position[:, None], sizes)
