"""What exchanges move and allocate, and a model of how long that takes.

Bytes and rows follow from the code and are exact at a perfectly balanced load. Seconds are computed from the constants
of `H200` below, and have never been compared with a run on several GPUs.
"""

import dataclasses
import math

from ._base import AbstractExchange, check_capacity_factor
from ._gather import AllGatherReduceScatter
from ._padded import PaddedAllToAll
from ._ragged import RaggedAllToAll


@dataclasses.dataclass(frozen=True)
class Link:
    """How a device is connected: bytes per second in one direction, and seconds that every collective costs."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """Nodes of some devices each: `node` connects those of one node, `network` every device to other nodes."""

    devices_per_node: int
    node: Link
    network: Link
    memory_bandwidth: float  # bytes per second
    sorted_ids: float  # per second, with their inverse and counts
    flops: float  # per second, of the experts' products


_REACHED = 0.8  # assumed: the share of a vendor's bandwidth that a large collective reaches

H200 = Machine(
    devices_per_node=8,  # from the vendor's figures: HGX and DGX H200
    node=Link(
        bandwidth=_REACHED * 450e9,  # from the vendor's figures: NVLink, 900 GB/s in both directions together
        latency=20e-6,  # assumed
    ),
    network=Link(
        bandwidth=_REACHED * 50e9,  # from the vendor's figures: one InfiniBand adapter of 400 Gb/s per GPU
        latency=50e-6,  # assumed
    ),
    memory_bandwidth=_REACHED * 4.8e12,  # from the vendor's figures: 4.8 TB/s
    sorted_ids=1.4e9,  # assumed: what one GPU did by itself, 200,000 ids in 145 us
    flops=550e12,  # assumed: about what one GPU did by itself on large layers; the vendor's figure is 989e12
)

# Which exchange is best depends little on the width: that of 4096 numbers of 2 bytes stands for all.
REFERENCE_WIDTH = 4096


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes that the choice of an exchange depends on: `tokens` of one shard, and the rest."""

    tokens: int
    k: int
    experts: int
    shards: int
    capacity_factor: float | int | None

    def __post_init__(self):
        for name, least in (("tokens", 0), ("k", 1), ("experts", 1), ("shards", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.k > self.experts:
            raise ValueError(f"k={self.k} cannot be larger than experts={self.experts}")
        if self.experts % self.shards:
            raise ValueError(
                f"experts={self.experts} cannot be divided among the {self.shards} shards: choose a number of shards "
                "that divides it"
            )
        check_capacity_factor(self.capacity_factor)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows of width `d_model` of one device in one forward pass, in one round.

    - `scattered`, `gathered`: rows from other devices, by an all-to-all or by an all-gather; as many go back.
    - `labels`: ids that come along with them, and as many weights.
    - `send`, `receive`: rows that are packed before, and that arrive.
    - `experts`: rows that the experts compute at most.
    - `returned`: rows of results that are packed, and that arrive back.
    - `sorted_ids`: ids sorted for the plan.
    """

    scattered: float | int
    gathered: float | int
    labels: float | int
    send: int
    receive: int
    experts: int
    returned: int
    sorted_ids: int

    @property
    def allocated(self) -> int:
        """Rows of all buffers that the exchange needs."""
        return self.send + self.receive + self.returned


def traffic_of(exchange: AbstractExchange, sizes: Sizes) -> Traffic:
    """What `exchange`, one of the library's own, moves and allocates."""
    tokens, k, shards = sizes.tokens, sizes.k, sizes.shards
    rows = exchange.rows(tokens, k, sizes.experts, shards, sizes.capacity_factor)
    assignments, others = tokens * k, (shards - 1) / shards
    if isinstance(exchange, PaddedAllToAll):
        moved = rows * others
        return Traffic(moved, 0, moved, rows, rows, rows, 2 * rows, assignments + rows)
    if isinstance(exchange, RaggedAllToAll):
        moved = min(assignments, rows) * others
        return Traffic(moved, 0, moved, assignments, rows, rows, rows + assignments, assignments + rows)
    if isinstance(exchange, AllGatherReduceScatter):
        everything, moved = shards * tokens, (shards - 1) * tokens
        return Traffic(0, moved, moved * k, 0, everything, rows, everything, everything * k)
    raise ValueError(f"there is no cost model for {exchange}: it has one for the library's own exchanges")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one layer costs a device in one forward and backward pass.

    - `bytes_moved`: that arrive from other devices.
    - `bytes_allocated`: of buffers in the forward pass.
    - `seconds`: by the model.
    """

    bytes_moved: float | int
    bytes_allocated: float | int
    seconds: float


def exchange_cost(traffic: Traffic, shards: int, row_bytes: int) -> Cost:
    """Of sending and receiving, once each forward and backward; ids and weights come along in 4 bytes each."""
    # Forward: rows with ids and weights, then results. Backward: the gradients of both and of the weights.
    passes = 4 * row_bytes
    labels = 12 * traffic.labels
    share = labels / (traffic.scattered + traffic.gathered or 1)
    scattered, gathered = (rows * (passes + share) for rows in (traffic.scattered, traffic.gathered))
    allocated = traffic.allocated * row_bytes
    touched = 2 * 2 * allocated  # written and read, forward and backward
    moving = _transfer_seconds(scattered, gathered, shards)
    waiting = 7 * (H200.network if shards > H200.devices_per_node else H200.node).latency  # collectives
    local = touched / H200.memory_bandwidth + traffic.sorted_ids / H200.sorted_ids
    return Cost(scattered + gathered, allocated, moving + local + (waiting if shards > 1 else 0))


def weight_gathering_cost(*, experts: int, d_model: int, d_ff: int, gates: int, shards: int, itemsize: int) -> Cost:
    """Of the alternative without any exchange: experts sharded over the same devices and gathered for use, in the
    forward pass and again in the backward pass, and their gradient reduce-scattered; parameters have `itemsize` bytes
    each, as the tokens have."""
    weights = (gates + 1) * experts * d_model * d_ff * itemsize
    moved = 3 * weights * (shards - 1) / shards
    link = H200.network if shards > H200.devices_per_node else H200.node
    waiting = 3 * 2 * link.latency if shards > 1 else 0
    touched = 3 * 2 * weights / H200.memory_bandwidth  # written and read
    return Cost(moved, weights, _transfer_seconds(0, moved, shards) + touched + waiting)


def compute_seconds(*, tokens: int, k: int, d_model: int, d_ff: int, gates: int) -> float:
    """The experts' products in the forward and backward pass at a balanced load, whatever the number of shards."""
    return 3 * 2.0 * tokens * k * d_model * d_ff * (gates + 1) / H200.flops


def _transfer_seconds(scattered: float | int, gathered: float | int, shards: int) -> float:
    """The slower of the two links, which work at the same time. What is scattered crosses the network once for every
    device; what is gathered enters a node once, divided among its devices, and goes on inside it."""
    node = H200.devices_per_node
    outside = max(shards - node, 0) / max(shards - 1, 1)
    network = scattered * outside + gathered * outside / node
    inside = scattered * (1 - outside) + gathered
    return max(network / H200.network.bandwidth, inside / H200.node.bandwidth)


def chunk_sizes(tokens: int) -> list[int]:
    """The numbers of equal chunks that `tokens` can be divided into, smallest first."""
    small = [n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0]
    return sorted({*small, *(tokens // n for n in small)})
