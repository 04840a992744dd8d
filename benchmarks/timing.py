"""Side-by-side timing: every contestant in turn, many times over, so that a disturbance meets them all.

Each timed run follows an untimed one of the same contestant, so that none pays for the memory that the one before it
gave back to the operating system, nor finds its own inputs pushed out of the caches.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def side_by_side(contestants: Mapping[str, tuple[Callable, tuple]], *, repeats: int) -> dict[str, float]:
    """The median milliseconds of each compiled function on its arguments."""
    compiled = {name: jax.jit(function).lower(*args).compile() for name, (function, args) in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repeats):
        for name, run in compiled.items():
            args = contestants[name][1]
            jax.block_until_ready(run(*args))
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": name,
        "cores": cores,
        "devices": [device.device_kind for device in jax.devices()],
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
