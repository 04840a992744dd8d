"""Expert parallelism: the local layer with `send` before and `receive` after the experts."""

import dataclasses
import enum
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ._exchange._auto import AutoExchange
from ._exchange._base import AbstractExchange, ExchangePlan, check_capacity_factor
from ._experts import PRE_ACTIVATION, Experts
from ._grouping import Grouping, group_by_expert, row_weights
from ._init import check_positive
from ._linear import linear
from ._routing import Routing
from ._vma import match_varying, varying_axes


class Overflow(enum.Enum):
    """What happens to assignments that do not fit into a receive buffer of bounded size. They are counted in
    [`eqx_moe.MoEStats`][]`.overflow` always."""

    COUNT = "they are dropped"
    EXACT = "further rounds serve them, until none is left"
    RAISE = "the output becomes NaN, and `check_overflow` raises after the step"


class Width(enum.Enum):
    """One of the two widths of an expert."""

    D_MODEL = "d_model"
    D_FF = "d_ff"


class ExpertParallel(eqx.Module):
    """How a layer is divided among the devices of a mesh, inside `jax.shard_map`.

    ```python
    parallel = eqx_moe.ExpertParallel(axis="expert")
    moe = eqx_moe.MoE(512, 1024, 16, rule=eqx_moe.SoftmaxTopK(k=2), parallel=parallel, key=key)
    specs = eqx_moe.partition_specs(moe)
    tokens = jax.P(("data", "expert"))
    run = jax.shard_map(lambda moe, x: moe(x)[0], mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    ```

    By default nothing is ever dropped, and buffers are as large as the worst routing needs;
    [`eqx_moe.plan_memory`][] says beforehand what that is, and what the alternatives are.

    - `axis`: the mesh axis over which experts are sharded, and tokens too; `None` if every device has all experts, or
      gathers them along `fsdp_axis`.
    - `exchange`: an [`eqx_moe.AbstractExchange`][].
    - `capacity_factor`: receive buffers as a multiple of what perfect balance would need, or `None` for the worst case.
    - `overflow`: what happens to assignments that do not fit into them, an [`eqx_moe.Overflow`][].
    - `chunks`: the tokens of a shard pass in so many parts, one after another, each sent and computed again in the
      backward pass: buffers are smaller by that factor.
    - `tensor_axis`: a mesh axis over which `d_ff` is sharded, or `None`.
    - `sequence_parallel`: whether tokens are sharded over `tensor_axis` too: they are gathered before the experts, and
      the results reduce-scattered. Otherwise they must be the same along it, and results are all-reduced.
    - `fsdp_axis`: a mesh axis over which the experts' weights are sharded too, and gathered for use, in the dtype of
      the tokens, in the forward pass and again in the backward pass, while their gradients are reduce-scattered in the
      dtype of the parameters; or `None`. Usually the axis of the data.
    - `fsdp_width`: along which of their widths, an [`eqx_moe.Width`][].
    """

    axis: str | None = eqx.field(static=True, default="expert")
    exchange: AbstractExchange = AutoExchange()
    capacity_factor: float | int | None = eqx.field(static=True, default=None, kw_only=True)
    overflow: Overflow = eqx.field(static=True, default=Overflow.COUNT, kw_only=True)
    chunks: int = eqx.field(static=True, default=1, kw_only=True)
    tensor_axis: str | None = eqx.field(static=True, default=None, kw_only=True)
    sequence_parallel: bool = eqx.field(static=True, default=True, kw_only=True)
    fsdp_axis: str | None = eqx.field(static=True, default=None, kw_only=True)
    fsdp_width: Width = eqx.field(static=True, default=Width.D_FF, kw_only=True)

    def __check_init__(self):
        check_capacity_factor(self.capacity_factor)
        check_positive(chunks=self.chunks)
        axes = [axis for axis in (self.axis, self.tensor_axis, self.fsdp_axis) if axis is not None]
        if len(set(axes)) < len(axes):
            raise ValueError(f"axis, tensor_axis and fsdp_axis must be different mesh axes: got {axes}")
        if self.axis is None and (self.capacity_factor is not None or self.overflow is not Overflow.COUNT):
            raise ValueError("axis=None exchanges nothing, so there are no buffers for capacity_factor and overflow")

    def __call__(
        self, experts: Experts, x: Float[Array, "tokens d_model"], routing: Routing
    ) -> tuple[Float[Array, "tokens d_model"], Int32[Array, ""]]:
        """**Arguments:**

        - `experts`: this device's part of an [`eqx_moe.Experts`][].
        - `x`: `[tokens, d_model]`, this device's.
        - `routing`: an [`eqx_moe.Routing`][] of these tokens over the experts of all devices.

        **Returns:** the output, like `x`, and the number of assignments that did not fit, int32: every one counted by
        one of the devices that tokens are divided among.

        **Raises:** `ValueError` if sizes do not fit the mesh.
        """
        _check_tokens(x, routing.experts)
        self._check_mesh(experts, x, routing)
        if x.shape[0] == 0:
            return x, match_varying(jnp.zeros((), jnp.int32), x)[0]
        if self.tensor_axis is None:
            return _serve_in_chunks(self, experts, x, routing)
        index = lax.axis_index(self.tensor_axis)
        if experts.b_down is not None:  # one device along the axis adds it, or it would be summed over them
            experts = eqx.tree_at(lambda experts: experts.b_down, experts, jnp.where(index == 0, experts.b_down, 0))
        if not self.sequence_parallel:
            y, overflow = _serve_in_chunks(self, experts, x, routing)
            return lax.psum(y, self.tensor_axis), overflow
        gather = lambda leaf: lax.all_gather(leaf, self.tensor_axis, tiled=True)
        y, overflow = _serve_in_chunks(self, experts, gather(x), jax.tree.map(gather, routing))
        overflow = jnp.where(index == 0, overflow, 0)  # each device along the axis counts the same
        return lax.psum_scatter(y, self.tensor_axis, tiled=True), overflow

    def _check_mesh(self, experts: Experts, x: Float[Array, "tokens d_model"], routing: Routing) -> None:
        tensor, fsdp, shards = map(_axis_size, (self.tensor_axis, self.fsdp_axis, self.axis))
        if self.tensor_axis in varying_axes(x) and not self.sequence_parallel:
            raise ValueError(
                f"tokens differ along the mesh axis {self.tensor_axis!r}, and sequence_parallel=False adds up what its "
                "devices compute for the same tokens: use sequence_parallel=True, or replicate the tokens along it"
            )
        if routing.num_experts % shards:
            raise ValueError(
                f"experts={routing.num_experts} cannot be divided among the {shards} shards of the mesh axis "
                f"{self.axis!r}"
            )
        held, d_model, _, d_ff = experts.w_gate_up.shape
        over_model, over_ff = (fsdp, 1) if self.fsdp_width is Width.D_MODEL else (1, fsdp)
        for name, whole, parts, part in (
            ("experts", routing.num_experts, shards, held),
            ("d_model", x.shape[1], over_model, d_model),
            ("d_ff", experts.d_ff, over_ff * tensor, d_ff),
        ):
            if parts * part != whole:
                raise ValueError(
                    f"{name}={whole} of the experts should be divided among {parts} devices, and this one holds "
                    f"{part}: shard the layer as `eqx_moe.partition_specs` says"
                )


def expert_specs(parallel: ExpertParallel, experts: Experts) -> Experts:
    """The `PartitionSpec` of every array, in the structure of `experts`."""
    over_ff = (parallel.tensor_axis, parallel.fsdp_axis if parallel.fsdp_width is Width.D_FF else None)
    d_ff = tuple(axis for axis in over_ff if axis is not None) or None
    d_model = parallel.fsdp_axis if parallel.fsdp_width is Width.D_MODEL else None
    specs = {
        "w_gate_up": jax.P(parallel.axis, d_model, None, d_ff),
        "w_down": jax.P(parallel.axis, d_ff, d_model),
        "b_gate_up": jax.P(parallel.axis, None, d_ff),
        "b_down": jax.P(parallel.axis, d_model),
    }
    here = [name for name in specs if getattr(experts, name) is not None]
    where = lambda experts: [getattr(experts, name) for name in here]
    return eqx.tree_at(where, experts, [specs[name] for name in here])


def _axis_size(axis: str | None) -> int:
    try:
        return 1 if axis is None else lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"the layer is divided over the mesh axis {axis!r}, which does not exist here: call it inside "
            "`jax.shard_map` over a mesh that has this axis, or make it with parallel=None"
        ) from error


def _serve_in_chunks(
    parallel: ExpertParallel, experts: Experts, x: Float[Array, "tokens d_model"], routing: Routing
) -> tuple[Float[Array, "tokens d_model"], Int32[Array, ""]]:
    if parallel.chunks == 1:
        return _serve(parallel, experts, x, routing)
    if x.shape[0] % parallel.chunks:
        fewer = max(n for n in range(1, parallel.chunks) if x.shape[0] % n == 0)
        raise ValueError(
            f"tokens={x.shape[0]} of a device cannot be divided into chunks={parallel.chunks}: the next smaller number "
            f"of chunks that divides them is {fewer}"
        )

    # Rematerialised as a whole, so that gathered weights are not kept, and by chunk, so that buffers are not.
    @jax.checkpoint
    def run(experts, x, routing):
        experts = jax.tree.map(lambda leaf: match_varying(leaf, x)[0], _gather_weights(parallel, experts, x))
        serve = jax.checkpoint(ft.partial(_serve, dataclasses.replace(parallel, fsdp_axis=None), experts))
        split = lambda leaf: leaf.reshape(parallel.chunks, -1, *leaf.shape[1:])
        y, overflow = lax.map(lambda chunk: serve(*chunk), jax.tree.map(split, (x, routing)))
        return y.reshape(x.shape), overflow.sum(dtype=jnp.int32)

    return run(experts, x, routing)


def _serve(
    parallel: ExpertParallel, experts: Experts, x: Float[Array, "tokens d_model"], routing: Routing
) -> tuple[Float[Array, "tokens d_model"], Int32[Array, ""]]:
    """All rounds that the policy asks for."""
    if parallel.axis is None:
        grouping = group_by_expert(routing)
        y = _compute(parallel, experts, x, grouping, row_weights(routing, grouping))
        return y, match_varying(jnp.zeros((), jnp.int32), x)[0]
    y, plan = _exchange_and_compute(parallel, experts, x, routing, 0)
    if parallel.overflow is Overflow.RAISE:
        y = jnp.where(lax.psum(plan.overflow, parallel.axis) > 0, jnp.nan, y)
    if parallel.overflow is not Overflow.EXACT:
        return y, plan.overflow
    return _serve_the_rest(parallel, experts, x, routing, y, plan.rounds), jnp.zeros_like(plan.overflow)


def _serve_the_rest(
    parallel: ExpertParallel,
    experts: Experts,
    x: Float[Array, "tokens d_model"],
    routing: Routing,
    y: Float[Array, "tokens d_model"],
    rounds: Int32[Array, ""],
) -> Float[Array, "tokens d_model"]:
    """Adds the rounds after the first. Their number is known on the device only, their largest one here: a scan over
    that many, which skips those that are not needed, is differentiable where a loop is not."""
    (tokens, k), shards = routing.experts.shape, _axis_size(parallel.axis)
    rows = parallel.exchange.rows(tokens, k, routing.num_experts, shards, parallel.capacity_factor)
    # As if a shard had k experts or more: a rule may give a token the same expert several times.
    most = -(-parallel.exchange.rows(tokens, k, k * shards, shards, None) // max(rows, 1))
    if most == 1:
        return y
    # The same everywhere: along `fsdp_axis` devices gather weights together, and others may have gradients to sum.
    axes = varying_axes(y) | ({parallel.fsdp_axis} if parallel.fsdp_axis is not None else set())
    rounds = lax.pmax(match_varying(rounds, y)[0], tuple(sorted(axes))) if axes else rounds

    compute = lambda *args: _exchange_and_compute(parallel, *args)[0]
    skip = lambda _, x, *rest: match_varying(jnp.zeros_like(x), y)[0]

    @jax.checkpoint  # around the condition, or what it needs would be kept once for every round
    def step(experts, x, routing, round):
        experts = jax.tree.map(lambda leaf: match_varying(leaf, x)[0], experts)  # whose transpose is a sum over devices
        return lax.cond(round < rounds, compute, skip, experts, x, routing, round)

    add = lambda y, round: (y + step(experts, x, routing, round), None)
    return lax.scan(add, y, jnp.arange(1, most, dtype=jnp.int32))[0]


def _exchange_and_compute(
    parallel: ExpertParallel,
    experts: Experts,
    x: Float[Array, "tokens d_model"],
    routing: Routing,
    round: int | Int32[Array, ""],
) -> tuple[Float[Array, "tokens d_model"], ExchangePlan]:
    exchange = parallel.exchange
    assert parallel.axis is not None
    plan = exchange.plan(routing, axis_name=parallel.axis, capacity_factor=parallel.capacity_factor, round=round)
    rows, weights = exchange.send(x, routing.weights, plan)
    rows = _compute(parallel, experts, rows, plan.grouping, weights)
    return exchange.receive(rows, plan), plan


def _compute(
    parallel: ExpertParallel,
    experts: Experts,
    x: Float[Array, "capacity d_model"],
    grouping: Grouping,
    weights: Float[Array, " rows"],
) -> Float[Array, "capacity d_model"]:
    if parallel.fsdp_axis is None:
        return experts(x, grouping, weights)

    @ft.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(PRE_ACTIVATION))
    def run(experts, x, grouping, weights):
        return _gather_weights(parallel, experts, x)(x, grouping, weights)

    return run(experts, x, grouping, weights)


def _gather_weights(parallel: ExpertParallel, experts: Experts, x: Float[Array, "n d_model"]) -> Experts:
    """The experts with whole widths, as far as `fsdp_axis` divides them: gathered in the dtype of `x`, while their
    gradients are summed over devices in the dtype of the parameters, as they are in any other layout."""
    axis = parallel.fsdp_axis
    if axis is None:
        return experts

    def gather(leaf, spec):
        sharded = [i for i, axes in enumerate(spec) if axis == axes or (isinstance(axes, tuple) and axis in axes)]
        if not sharded:
            return leaf
        (dimension,), own = sharded, leaf.dtype

        def whole(_, leaf):
            return (lax.all_gather(leaf.astype(x.dtype), axis, axis=dimension, tiled=True).astype(own),)

        def part(_, leaf):
            return (lax.psum_scatter(leaf, axis, scatter_dimension=dimension, tiled=True),)

        return linear(whole, part, (), match_varying(leaf, x)[0])[0]

    return jax.tree.map(gather, experts, expert_specs(parallel, experts))


def _check_tokens(x: Float[Array, "tokens d_model"], experts: Int32[Array, "tokens k"]) -> None: ...
