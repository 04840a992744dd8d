"""`--mesh` of the language-model example: mistakes, and training on several devices, which changes no result."""

import importlib
import shutil
import sys
from types import ModuleType

import jax
import numpy as np
import pytest

from .lm_runs import EXAMPLES, saved_arrays, saved_losses, write_text

pytestmark = pytest.mark.slow

STEPS = 8
TINY = f"--data text --d-model 16 --d-ff 16 --experts 8 --context 8 --batch 8 --steps {STEPS} --save-every 4".split()
MESHES = ["data=2,expert=4", "data=2,expert=2,tensor=2", "data=8"]


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, default_promotion):
    """Calls the example's `main` as the command line would."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *map(str, arguments)])
        return example("train_lm").main()

    return call


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("mesh")
    write_text(folder)
    return folder


@pytest.fixture
def runs(workplace, train, monkeypatch):
    """Folders of finished runs, by their meshes; each is made once."""
    monkeypatch.chdir(workplace)

    def run(mesh: str | None):
        out = workplace / (mesh or "one device")
        if not out.exists():
            assert train(*TINY, "--out", out, *(["--mesh", mesh] if mesh else [])) == 0
        return out

    return run


MISTAKES = {
    "--mesh data": "must give data a positive whole number, not ''",
    "--mesh data=two": "must give data a positive whole number, not 'two'",
    "--mesh data=0,expert=8": "must give data a positive whole number, not '0'",
    "--mesh data=-2": "must give data a positive whole number, not '-2'",
    "--mesh data=2,data=4": "gives the axis data twice",
    "--mesh date=2": "has an axis 'date'; give data, expert, tensor as in data=2,expert=4",
    "--mesh data=2,": "has an axis ''",
    "--mesh expert=3 --batch 6": "--experts 8 cannot be divided among the 3 devices of expert=3",
    "--mesh tensor=3 --batch 6": "--d-ff 16 cannot be divided among the 3 devices of tensor=3",
    "--mesh data=2,expert=4 --batch 12": "--batch 12 cannot be divided among the 8 devices of --mesh data=2,expert=4",
    "--mesh data=2,expert=2": "needs 4 devices, and there are 8; JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4",
    "--mesh data=16 --batch 16": "needs 16 devices, and there are 8; JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=16",
}


@pytest.mark.parametrize("arguments, message", MISTAKES.items())
def test_mistakes_are_told_in_one_sentence(workplace, train, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(workplace)
    with pytest.raises(SystemExit) as stop:
        train(*TINY, "--out", "mistake", *arguments.split())
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert message in said.err and said.err.count("\n") == 1 and not said.out
    assert not (workplace / "mistake").exists()


@pytest.mark.parametrize(
    "mesh, message",
    [
        (None, "3 processes need --mesh to say what they share"),
        ("data=8", "has 8 devices, which 3 processes cannot divide among them"),
    ],
)
def test_processes_have_to_fit_the_mesh(monkeypatch, mesh, message):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(example("lm_data").InputError, match=message):
        example("lm_mesh").make_mesh(mesh, example("lm_model").Shape(), 8)


@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_that_of_one_device(runs, mesh):
    """Up to the order of sums, whose rounding a few steps of training amplify."""
    one, several = saved_losses(runs(None), STEPS), saved_losses(runs(mesh), STEPS)
    assert several.keys() == one.keys() and len(one) == 2
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "before, after",
    [("data=2,expert=4", None), (None, "data=2,expert=2,tensor=2"), ("data=2,expert=4", "expert=8")],
)
def test_resumes_on_another_mesh(runs, train, workplace, before, after):
    interrupted = workplace / f"from {before} to {after}"
    shutil.copytree(runs(before), interrupted)
    shutil.rmtree(interrupted / "checkpoints" / str(STEPS))  # as if it had stopped half-way
    assert train(*TINY, "--out", interrupted, "--resume", *(["--mesh", after] if after else [])) == 0
    actual, expected = saved_arrays(interrupted, STEPS), saved_arrays(runs(None), STEPS)
    assert actual.keys() == expected.keys()
    for name in expected:
        wrong = np.linalg.norm(np.nan_to_num(actual[name] - expected[name]))
        assert wrong <= 1e-4 * np.linalg.norm(np.nan_to_num(expected[name])), name


def test_devices_hold_their_own_experts(default_promotion):
    lm_mesh, train_lm = example("lm_mesh"), example("train_lm")
    settings = train_lm.Settings(d_model=16, d_ff=16, experts=8, layers=3, steps=4, batch=8)
    mesh = lm_mesh.make_mesh("data=2,expert=2,tensor=2", settings, settings.batch)
    state = train_lm.initialise(settings, mesh)
    held = lambda model: model.blocks.feed_forward.experts.w_down.addressable_data(0).shape
    adam = state.optimiser[1][0]
    assert held(state.model) == held(adam.mu) == held(adam.nu) == (3, 4, 8, 16)
    assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(state[:2]))
    expected = train_lm.initialise(settings)
    assert all(map(np.array_equal, jax.tree.leaves(state[:2]), jax.tree.leaves(expected[:2])))
