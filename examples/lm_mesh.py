"""Training on several devices, of one process or of several: the options, and where everything lies."""

import contextlib
import functools as ft
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, UInt8

import eqx_moe
from lm_data import InputError
from lm_model import Shape

AXES = {"data": "copies of everything", "expert": "the experts", "tensor": "the width of every expert"}
# A process that dies is missed after so many seconds without a sign of life; the others then stop.
HEARTBEAT_SECONDS = 20
Mesh = jax.sharding.Mesh


def parse(text: str) -> dict[str, int]:
    """The sizes of the axes in `data=2,expert=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise InputError(f"--mesh {text} has an axis {axis!r}; give {', '.join(AXES)} as in data=2,expert=4")
        if axis in sizes:
            raise InputError(f"--mesh {text} gives the axis {axis} twice")
        if not size.isascii() or not size.isdecimal() or not int(size):
            raise InputError(f"--mesh {text} must give {axis} a positive whole number, not {size!r}")
        sizes[axis] = int(size)
    return sizes


def check(text: str, sizes: dict[str, int], shape: Shape, batch: int) -> None:
    """Raises `InputError` unless the mesh divides what it is to divide."""
    devices = math.prod(sizes.values())
    expert, tensor = sizes.get("expert", 1), sizes.get("tensor", 1)
    if not shape.dense and shape.experts % expert:
        raise InputError(f"--experts {shape.experts} cannot be divided among the {expert} devices of expert={expert}")
    if not shape.dense and shape.d_ff % tensor:
        raise InputError(f"--d-ff {shape.d_ff} cannot be divided among the {tensor} devices of tensor={tensor}")
    if batch % devices:
        raise InputError(f"--batch {batch} cannot be divided among the {devices} devices of --mesh {text}")
    if devices % (count := processes()):
        raise InputError(f"--mesh {text} has {devices} devices, which {count} processes cannot divide among them")


def processes() -> int:
    """How many there are to be, by what `launch_local.py`, or Slurm's `srun`, left in the environment."""
    return int(os.environ.get("JAX_NUM_PROCESSES") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def join_processes() -> None:
    """Waits for all processes; from now on their devices are one machine's, and process 0 speaks for all."""
    if processes() == 1 or jax.distributed.is_initialized():
        return
    # XLA would catch SIGTERM to announce a preemption, and a process that hangs could not be ended by it.
    jax.config.update("jax_enable_preemption_service", False)
    number, count = os.environ.get("JAX_PROCESS_ID"), os.environ.get("JAX_NUM_PROCESSES")
    jax.distributed.initialize(  # what is None is found out from Slurm
        num_processes=int(count) if count else None,
        process_id=int(number) if number else None,
        initialization_timeout=120,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=HEARTBEAT_SECONDS,
    )
    if not leads():
        sys.stdout = open(os.devnull, "w")


def leads() -> bool:
    return jax.process_index() == 0


def make_mesh(text: str | None, shape: Shape, batch: int) -> Mesh | None:
    """The mesh of `--mesh`, or none without. On CPU there are as many virtual devices as it needs."""
    if text is None:
        if processes() > 1:
            raise InputError(f"{processes()} processes need --mesh to say what they share, such as --mesh data=2")
        return None
    sizes = parse(text)
    check(text, sizes, shape, batch)
    here = (devices := math.prod(sizes.values())) // processes()
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started, with what it found
            jax.config.update("jax_num_cpu_devices", here)  # leaves GPUs alone
    join_processes()
    if devices != (found := jax.device_count()):
        there = "there is 1" if found == 1 else f"there are {found}"
        remedy = f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={here} in the environment makes as many virtual ones"
        raise InputError(f"--mesh {text} needs {devices} devices, and {there}; {remedy}")
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def parallelism(mesh: Mesh | None) -> eqx_moe.ExpertParallel | None:
    """How the layers of the model are divided among the devices of `mesh`."""
    if mesh is None:
        return None
    of = lambda axis: axis if axis in mesh.axis_names else None
    return eqx_moe.ExpertParallel(axis=of("expert"), tensor_axis=of("tensor"))


def initialise(make: Callable[..., Any], mesh: Mesh | None, *arguments: Any) -> Any:
    """`make(*arguments)`, of which every device computes and holds its own part alone."""
    return jax.jit(make)(*arguments) if mesh is None else eqx_moe.initialise_sharded(make, mesh, *arguments)


def keep_in_place(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `jax.jit`: the same, each device with its own part."""
    if mesh is None:
        return tree
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), eqx_moe.partition_specs(tree))
    return jax.lax.with_sharding_constraint(tree, shardings)


def feed(text: UInt8[np.ndarray, "..."], mesh: Mesh | None, *, axis: int = 0) -> Any:
    """Text, divided along `axis` among all devices; every process hands over what its own devices need."""
    if mesh is None:
        return text
    sharding = jax.NamedSharding(mesh, jax.P(*[None] * axis, mesh.axis_names))
    return jax.make_array_from_callback(text.shape, sharding, lambda index: text[index])


def spread(function: Callable[..., Any], mesh: Mesh | None, text: jax.P | None = None) -> Callable[..., Any]:
    """`function(model, text, axes=axes)` as a function of `model` and `text`, inside one `jax.shard_map` over all axes.

    The text is divided among all devices, unless its spec is given; the results have to be the same on all. On one
    device `axes` is `None`."""
    if mesh is None:
        return ft.partial(function, axes=None)
    body = ft.partial(function, axes=mesh.axis_names)
    divided = jax.P(mesh.axis_names) if text is None else text

    def run(model, text):
        specs = eqx_moe.partition_specs(model), divided
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P())(model, text)

    return run


def anywhere(flag: bool) -> bool:
    """Whether `flag` is true in any process."""
    if jax.process_count() == 1:
        return flag
    flags: Bool[np.ndarray, " processes"] = np.asarray(multihost_utils.process_allgather(np.asarray(flag)))
    return bool(flags.any())
