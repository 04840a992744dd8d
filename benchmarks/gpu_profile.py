"""Times on a GPU, from JAX's profiler: what ran, for how long, and whether anything waited for the host."""

import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Profile:
    """One call of a compiled function.

    - `ms`: by the host's clock, calls following each other without waiting.
    - `gpu_ms`: during which the GPU ran something.
    - `host_copies`: copies from the GPU to the host.
    - `kernels`: milliseconds of every kernel, the longest first.
    """

    ms: float
    gpu_ms: float
    host_copies: float
    kernels: dict[str, float]


def profile(run: Callable, *args, repeats: int = 3) -> Profile:
    """Profiles `run(*args)`, which must be compiled already."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    # Enough calls in a row that waiting for the last one does not count.
    calls = min(max(round(0.06 / (time.perf_counter() - start)), 3), 30)

    def follow():
        out = None
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        follow()
        times.append(1e3 * (time.perf_counter() - start) / calls)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            follow()
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = list(gpu_events(jax.profiler.ProfileData.from_file(str(file))))
    kernels: dict[str, float] = defaultdict(float)
    for name, start, stop in events:
        kernels[name] += 1e-6 * (stop - start) / calls
    copies = sum("MemcpyD2H" in name for name, _, _ in events) / calls
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return Profile(statistics.median(times), 1e-6 * busy(events) / calls, copies, ordered)


def gpu_events(data: Any) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in nanoseconds of everything that ran on the GPU's streams."""
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield event.name, event.start_ns, event.start_ns + event.duration_ns


def busy(events: list[tuple[str, float, float]]) -> float:
    """Nanoseconds in which at least one of the events ran."""
    total, end = 0.0, 0.0
    for start, stop in sorted((start, stop) for _, start, stop in events):
        start = max(start, end)
        if stop > start:
            total, end = total + stop - start, stop
    return total
