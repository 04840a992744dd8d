"""Checkpoints by Orbax: saved on one mesh and restored on another, and saves that are killed."""

import functools as ft
import signal
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import eqx_moe
from eqx_moe import ExpertParallel

from .helpers import FAST, assert_close, assert_equal, make_moe, normal

pytestmark = pytest.mark.slow


OPTIMISER: Any = optax.adamw(1e-3)
OPTIONS = {"expert_bias": True, "selection_bias": True, "matmul": FAST}
EP, FSDP = ExpertParallel(), ExpertParallel(axis=None, fsdp_axis="data")
BOTH, TENSOR = ExpertParallel(fsdp_axis="data"), ExpertParallel(tensor_axis="data")
# One after another, each restored from what the one before it saved: devices along data and expert, and the layout.
ROUTES = {
    "growing": [(1, 1, EP), (1, 2, EP), (1, 4, EP), (1, 8, EP), (2, 4, EP)],
    "shrinking": [(1, 8, EP), (1, 4, EP), (2, 1, EP), (1, 1, EP)],
    "experts to fsdp and back": [(2, 4, EP), (8, 1, FSDP), (2, 4, BOTH), (4, 1, FSDP), (2, 2, TENSOR), (1, 8, EP)],
}


def make_mesh(data, expert):
    devices, types = jax.devices()[: data * expert], (AxisType.Auto,) * 2
    return jax.make_mesh((data, expert), ("data", "expert"), axis_types=types, devices=devices)


def placed(tree, data, expert):
    """The sharding of every leaf."""
    mesh = make_mesh(data, expert)
    return jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), eqx_moe.partition_specs(tree))


def make_state(parallel, seed=0):
    """A layer, and an optimiser's state whose arrays are not zero, the second moments positive."""
    make = lambda seed: make_moe(8, 16, 8, parallel=parallel, seed=seed, **OPTIONS)
    adam, *rest = OPTIMISER.init(make(seed))
    return make(seed), (adam._replace(mu=make(seed + 1), nu=jax.tree.map(abs, make(seed + 2))), *rest)


def target(data, expert, parallel):
    state = make_state(parallel)
    shape = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(shape, state, placed(state, data, expert))


def manager(folder, **options):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
    return ocp.CheckpointManager(folder, options=options)


def save(folder, step, state):
    with manager(folder) as checkpoints:
        checkpoints.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))


def restore(folder, like):
    with manager(folder) as checkpoints:
        step = checkpoints.latest_step()
        restored = checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
    return step, restored["state"]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_restored_on_another_mesh(route, tmp_path):
    original = make_state(route[0][2])
    save(tmp_path, 0, jax.device_put(original, placed(original, *route[0][:2])))
    for step, (data, expert, parallel) in enumerate(route[1:], 1):
        like = target(data, expert, parallel)
        found, state = restore(tmp_path, like)
        assert found == step - 1
        assert jax.tree.structure(state) == jax.tree.structure(like)
        assert_equal(jax.tree.leaves(state), jax.tree.leaves(original))
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == wanted.sharding
            assert {part.data.shape for part in leaf.addressable_shards} == {wanted.sharding.shard_shape(leaf.shape)}
        save(tmp_path, step, state)


def test_a_restored_layer_goes_on_as_before(tmp_path, default_promotion):
    """One step on 2 x 4 devices by experts, and the same step on 8 by FSDP after restoring."""

    def step(mesh, state):
        moe, optimiser = state
        specs, tokens = eqx_moe.partition_specs(moe), jax.P(("data", "expert"))
        run = jax.shard_map(lambda moe, x: moe(x)[0], mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
        gradients = jax.grad(lambda moe: (run(moe, normal(32, 8)) ** 2).mean())(moe)
        updates, optimiser = OPTIMISER.update(gradients, optimiser, moe)
        return eqx.apply_updates(moe, updates), optimiser

    before = make_state(EP)
    before = jax.device_put(before, placed(before, 2, 4))
    save(tmp_path, 0, before)
    _, after = restore(tmp_path, target(8, 1, FSDP))
    run = lambda state, *sizes: jax.jit(ft.partial(step, make_mesh(*sizes)))(state)
    assert_close(run(after, 8, 1), run(before, 2, 4))


def test_without_parallel_the_structure_is_another(tmp_path):
    """As docs/parallel.md says: leaves by themselves fit, whole trees do not."""
    state = make_state(EP)
    save(tmp_path / "tree", 0, state)
    with pytest.raises(ValueError, match="parallel"):
        restore(tmp_path / "tree", target(1, 1, None))
    save(tmp_path / "leaves", 0, jax.tree.leaves(state))
    _, leaves = restore(tmp_path / "leaves", jax.tree.leaves(target(1, 1, None)))
    assert_equal(leaves, jax.tree.leaves(state))


# Saves step 2 and is killed when Python is about to do the given thing to the given path.
KILLED = """
import os, signal, sys
import jax, orbax.checkpoint as ocp
folder, event, path = sys.argv[1:]
def kill(name, arguments):
    if name == event and str(arguments[0]) == path:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)) as manager:
    manager.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": jax.numpy.ones((64, 64))})))
"""
BEGUN = "2.orbax-checkpoint-tmp"  # the folder that becomes 2 when all of it is written


@pytest.mark.parametrize(
    "event, path",
    [("open", f"{BEGUN}/state.orbax-checkpoint-tmp/_METADATA"), ("os.rename", BEGUN)],
    ids=["amid the files", "before the last step"],
)
def test_a_killed_save_leaves_the_one_before(event, path, tmp_path):
    original = make_state(EP)
    save(tmp_path, 1, jax.device_put(original, placed(original, 2, 4)))
    command = [sys.executable, "-c", KILLED, str(tmp_path), event, str(tmp_path / path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    assert (tmp_path / BEGUN).exists()
    step, state = restore(tmp_path, target(8, 1, FSDP))
    assert step == 1
    assert_equal(jax.tree.leaves(state), jax.tree.leaves(original))
    save(tmp_path, 2, state)
    step, state = restore(tmp_path, target(1, 4, EP))
    assert step == 2
    assert_equal(jax.tree.leaves(state), jax.tree.leaves(original))
