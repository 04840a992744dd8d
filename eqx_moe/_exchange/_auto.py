"""The automatic choice of an exchange, which can say why."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from .._init import float_dtype
from .._matmul._auto import PLATFORMS, default_platform
from .._routing import Routing
from ._base import AbstractExchange, ExchangePlan, split_experts
from ._cost import REFERENCE_WIDTH, Cost, Sizes, exchange_cost, traffic_of, weight_gathering_cost
from ._gather import AllGatherReduceScatter
from ._padded import PaddedAllToAll
from ._ragged import RaggedAllToAll


class _Chosen(eqx.Module):
    exchange: AbstractExchange
    plan: ExchangePlan


@dataclasses.dataclass(frozen=True)
class ExchangeSelection:
    """What [`eqx_moe.AutoExchange`][] chose, and why it rejected the rest; `print` it.

    All costs are those of one layer on one device, forward and backward, each with `bytes_moved` (from other devices),
    `bytes_allocated` (buffers of the forward pass) and `seconds`, which are computed and not measured: see
    [Scaling](../scaling.md).

    - `exchange`: the exchange that will run.
    - `rejected`: pairs of an exchange's name and the reason against it.
    - `costs`: pairs of an exchange's name and its cost, at the width given, or else at 4096 numbers of 2 bytes.
    - `gathered_weights`: the cost of no exchange at all, where experts are sharded over the same devices (FSDP) and
      gathered for use; `None` if the widths were not given.
    """

    exchange: AbstractExchange
    rejected: tuple[tuple[str, str], ...]
    costs: tuple[tuple[str, Cost], ...]
    gathered_weights: Cost | None = None

    @property
    def cost(self) -> Cost:
        """That of the chosen exchange."""
        return dict(self.costs)[str(self.exchange)]

    @property
    def gather_instead(self) -> bool | None:
        """Whether gathering the experts' weights would take less time; `None` if the widths were not given."""
        return None if self.gathered_weights is None else self.gathered_weights.seconds < self.cost.seconds

    def __str__(self) -> str:
        lines = [f"chosen: {self.exchange}: {_told(self.cost)}"]
        lines += [f"rejected: {exchange}: {reason}" for exchange, reason in self.rejected]
        if self.gathered_weights is None:
            return "\n".join(lines)
        other, cost = self.gathered_weights, self.cost
        fewer = "fewer" if other.bytes_moved < cost.bytes_moved else "not fewer"
        advice = "less time: do that instead" if self.gather_instead else "no less time: expert parallelism pays"
        lines.append(f"gathering experts sharded by FSDP: {_told(other)}: {fewer} bytes, {advice}")
        return "\n".join(lines)


class AutoExchange(AbstractExchange):
    """Chooses an exchange by what it moves and allocates, for the platform that JAX uses here by default.

    The choice depends on static sizes only, so that it is the same on all devices and needs no communication; not on
    the width of the tokens. [`eqx_moe.AutoExchange.select`][] tells the choice and the reasons without running
    anything.
    """

    def candidates(self) -> tuple[AbstractExchange, ...]:
        """The exchanges to choose from; of equal ones the first."""
        return AllGatherReduceScatter(), RaggedAllToAll(), PaddedAllToAll()

    def select(
        self,
        *,
        tokens: int,
        k: int,
        experts: int,
        shards: int,
        capacity_factor: float | int | None = None,
        platform: str | None = None,
        d_model: int | None = None,
        d_ff: int | None = None,
        gates: int = 2,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> ExchangeSelection:
        """Which exchange will run, and why not the others.

        **Arguments:**

        - `tokens`: tokens of one device, in one chunk.
        - `k`, `experts`, `shards`: sizes.
        - `capacity_factor`: as for [`eqx_moe.ExpertParallel`][].
        - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; by default the one JAX uses here.
        - `d_model`: the width of the tokens; it changes the costs that are told, not the choice.
        - `d_ff`: the width of an expert; with it the selection says whether gathering weights would be better.
        - `gates`: 2 for gated experts, else 1.
        - `dtype`: of the tokens.

        **Returns:** an [`eqx_moe.ExchangeSelection`][].

        **Raises:** `ValueError` for another platform, or sizes that do not fit together.
        """
        platform = platform or default_platform()
        if platform not in PLATFORMS:
            raise ValueError(f"platform={platform!r} must be one of {', '.join(PLATFORMS)}")
        if d_ff is not None and d_model is None:
            raise ValueError(f"d_ff={d_ff} was given without d_model: give both, or none")
        sizes, itemsize = Sizes(tokens, k, experts, shards, capacity_factor), float_dtype("dtype", dtype).itemsize
        candidates = self.candidates()
        chosen = _choose(candidates, sizes, platform)
        row_bytes = REFERENCE_WIDTH * 2 if d_model is None else d_model * itemsize
        costs = {str(each): exchange_cost(traffic_of(each, sizes), shards, row_bytes) for each in candidates}
        reason = lambda each: _why_not(each, platform) or f"{_told(costs[str(each)])}, by the model not better"
        rejected = tuple((str(each), reason(each)) for each in candidates if each != chosen)
        if d_model is None or d_ff is None:
            return ExchangeSelection(chosen, rejected, tuple(costs.items()))
        widths = {"d_model": d_model, "d_ff": d_ff, "gates": gates, "itemsize": itemsize}
        weights = weight_gathering_cost(experts=experts, shards=shards, **widths)
        return ExchangeSelection(chosen, rejected, tuple(costs.items()), weights)

    def _choose(self, tokens: int, k: int, experts: int, shards: int, factor: float | int | None) -> AbstractExchange:
        return _choose(self.candidates(), Sizes(tokens, k, experts, shards, factor), default_platform())

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
        (tokens, k), (shards, _) = routing.experts.shape, split_experts(routing, axis_name)
        chosen = self._choose(tokens, k, routing.num_experts, shards, capacity_factor)
        plan = chosen.plan(routing, axis_name=axis_name, capacity_factor=capacity_factor, round=round)
        return ExchangePlan(plan.grouping, plan.overflow, plan.rounds, _Chosen(chosen, plan))

    def send(
        self, x: Float[Array, "tokens d_model"], weights: Float[Array, "tokens k"], plan: ExchangePlan
    ) -> tuple[Float[Array, "capacity d_model"], Float32[Array, " rows"]]:
        return plan.transport.exchange.send(x, weights, plan.transport.plan)

    def receive(self, rows: Float[Array, "capacity d_model"], plan: ExchangePlan) -> Float[Array, "tokens d_model"]:
        return plan.transport.exchange.receive(rows, plan.transport.plan)


def _choose(candidates: tuple[AbstractExchange, ...], sizes: Sizes, platform: str) -> AbstractExchange:
    seconds = lambda each: exchange_cost(traffic_of(each, sizes), sizes.shards, 2 * REFERENCE_WIDTH).seconds
    return min((each for each in candidates if _why_not(each, platform) is None), key=seconds)


def _why_not(exchange: AbstractExchange, platform: str) -> str | None:
    """Why `exchange` cannot be used on `platform`; `None` if it can."""
    if isinstance(exchange, RaggedAllToAll) and platform not in ("cuda", "rocm", "tpu"):
        return f"XLA has no ragged all-to-all on {platform}; the emulation is for tests"
    return None


def _told(cost: Cost) -> str:
    moved, allocated = cost.bytes_moved / 2**20, cost.bytes_allocated / 2**20
    return f"moves {moved:.4g} MiB and allocates {allocated:.4g} MiB in {1e3 * cost.seconds:.3g} ms"
