"""Runs of examples/train_lm.py, and what they left."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

EXAMPLES = Path(__file__).parents[1] / "examples"


def start(folder: Path, *command: object, **environment: str) -> "subprocess.Popen[str]":
    """Python in a process of its own, and in `folder`."""
    settings = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(EXAMPLES.parent),
        "JAX_PLATFORMS": "cpu",
        # Nearly all of a tiny run is compilation.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | settings | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def running(folder: Path, *command: object, **environment: str) -> "Iterator[subprocess.Popen[str]]":
    """The same, and ended at the end."""
    process = start(folder, *command, **environment)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def write_text(folder: Path) -> None:
    """Something to train on, under the name `text`."""
    (folder / "text").write_text("".join(file.read_text() for file in sorted(EXAMPLES.glob("*.py"))))


def saved_arrays(out: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name, whatever devices wrote it."""
    path = (out / "checkpoints" / str(step) / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(path, ocp.args.PyTreeRestore(restore_args=whole))
    flat, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def saved_losses(out: Path, step: int) -> dict[str, np.ndarray]:
    return {name: array for name, array in saved_arrays(out, step).items() if "losses" in name}
