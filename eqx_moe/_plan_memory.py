"""What expert parallelism allocates on every device, told before anything is compiled."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from ._exchange._base import AbstractExchange
from ._exchange._cost import Sizes, chunk_sizes, traffic_of
from ._exchange._gather import AllGatherReduceScatter
from ._exchange._padded import PaddedAllToAll
from ._exchange._ragged import RaggedAllToAll
from ._init import check_positive, float_dtype


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Bytes of the forward pass of one layer on one device, with one exchange; a row of [`eqx_moe.MemoryPlan`][]."""

    exchange: AbstractExchange
    capacity_factor: float | int | None
    chunks: int
    send: int
    receive: int
    pre_activation: int
    activation: int
    output: int
    returned: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in _BUFFERS)


_BUFFERS = ("send", "receive", "pre_activation", "activation", "output", "returned")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What [`eqx_moe.plan_memory`][] found; `print` it for a table in MiB.

    - `rows`: one for every choice, with the fields
        - `exchange`, `capacity_factor`, `chunks`: the choice, as [`eqx_moe.ExpertParallel`][] takes it;
        - `send`: bytes of the rows packed to be sent, and `receive`, of those that arrive;
        - `pre_activation`, `activation`, `output`: bytes of what the experts compute;
        - `returned`: bytes of the results packed to be sent back, and of those that arrive;
        - `total`: the sum.
    - `too_large`: exchanges of which not even one token at a time fits the budget, in the worst case.
    - `sizes`: what was asked, in words.
    - `budget`: bytes, or `None`.
    """

    rows: tuple[Buffers, ...]
    too_large: tuple[AbstractExchange, ...]
    sizes: str
    budget: int | None

    def __str__(self) -> str:
        heads = (
            "exchange",
            "buffers",
            "chunks",
            "send",
            "receive",
            "pre-act.",
            "activ.",
            "output",
            "returned",
            "total",
        )
        table = [heads, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
        align = lambda i, cell: cell.ljust(widths[i]) if i < 2 else cell.rjust(widths[i])
        lines = ["  ".join(align(i, cell) for i, cell in enumerate(line)).rstrip() for line in table]
        budget = "" if self.budget is None else f", budget {_mib(self.budget)}"
        lines.insert(0, f"MiB per device in the forward pass of one layer: {self.sizes}{budget}")
        lines += [f"{_name(each)}, worst case: one token at a time does not fit the budget" for each in self.too_large]
        return "\n".join(lines)


def plan_memory(
    *,
    tokens: int,
    d_model: int,
    d_ff: int,
    experts: int,
    k: int,
    shards: int,
    dtype: DTypeLike = jnp.bfloat16,
    capacity_factor: float | int | None = 1.25,
    budget: int | None = None,
    gates: int = 2,
) -> MemoryPlan:
    """What every exchange allocates on a device: with buffers for the worst routing, with buffers bounded by a factor,
    and, for the worst routing, with tokens in as few equal chunks as fit a budget.

    ```python
    print(eqx_moe.plan_memory(tokens=4096, d_model=7168, d_ff=2048, experts=256, k=8, shards=64, budget=8 * 2**30))
    ```

    These are the large buffers of one forward pass, all counted as if alive at once. Some are reused before the last is
    made; forward and backward pass together need up to twice as much, for one chunk at a time. Parameters, and the
    grouped matmul's own scratch memory, are not counted. On CPU [`eqx_moe.RaggedAllToAll`][] is emulated and takes
    more.

    **Arguments:**

    - `tokens`: tokens of one device.
    - `d_model`, `d_ff`: widths of the tokens and of one expert.
    - `experts`, `k`: how many there are, and are chosen per token.
    - `shards`: devices among which the experts are divided.
    - `dtype`: of the tokens.
    - `capacity_factor`: of the bounded buffers, a multiple of what perfect balance would need, or `None` for none.
    - `budget`: bytes per device that the buffers may take; without it nothing is chunked.
    - `gates`: 2 for gated experts, else 1.

    **Returns:** an [`eqx_moe.MemoryPlan`][]. An exchange of which not even one token at a time fits the budget has no
    chunked row in it, and is named in its `too_large`.

    **Raises:** `ValueError` if sizes do not fit together.
    """
    check_positive(tokens=tokens, d_model=d_model, d_ff=d_ff, gates=gates)
    dtype = float_dtype("dtype", dtype)
    if budget is not None:
        check_positive(budget=budget)
    factors = (None,) if capacity_factor is None else (None, capacity_factor)
    rows, too_large = [], []
    for exchange in (AllGatherReduceScatter(), RaggedAllToAll(), PaddedAllToAll()):

        def buffers(factor, chunks=1, exchange=exchange):
            sizes = Sizes(tokens // chunks, k, experts, shards, factor)
            return _buffers(exchange, sizes, chunks, d_model * dtype.itemsize, d_ff * dtype.itemsize, gates)

        rows += [buffers(factor) for factor in factors]
        if budget is not None:
            fitting = (row for n in chunk_sizes(tokens) if (row := buffers(None, n)).total <= budget)
            chunked = next(fitting, None)
            (too_large if chunked is None else rows).append(exchange if chunked is None else chunked)
    sizes = f"{tokens} tokens of {d_model}, {experts} experts of {d_ff}, k={k}, {shards} shards, {dtype.name}"
    return MemoryPlan(tuple(rows), tuple(too_large), sizes, budget)


def _buffers(
    exchange: AbstractExchange, sizes: Sizes, chunks: int, token_bytes: int, expert_bytes: int, gates: int
) -> Buffers:
    traffic = traffic_of(exchange, sizes)
    return Buffers(
        exchange,
        sizes.capacity_factor,
        chunks,
        send=traffic.send * token_bytes,
        receive=traffic.receive * token_bytes,
        pre_activation=traffic.experts * gates * expert_bytes,
        activation=traffic.experts * expert_bytes,
        output=traffic.experts * token_bytes,
        returned=traffic.returned * token_bytes,
    )


def _cells(row: Buffers) -> tuple[str, ...]:
    bound = "worst case" if row.capacity_factor is None else f"{row.capacity_factor} x balanced"
    sizes = (_mib(getattr(row, name)) for name in (*_BUFFERS, "total"))
    return _name(row.exchange), bound, str(row.chunks), *sizes


def _name(exchange: AbstractExchange) -> str:
    return type(exchange).__name__


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size >= 10 * 2**20 else f"{size / 2**20:.3g}"
