"""The language-model example as a user runs it: whole runs, interruption and resumption, and input that cannot work."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"
STEPS = 300
TINY = f"--d-model 16 --d-ff 16 --experts 4 --context 16 --batch 4 --steps {STEPS} --save-every 50".split()


def start(*arguments: object, cwd: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),
        "JAX_PLATFORMS": "cpu",
        # Nearly all of a tiny run is compilation.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(cwd / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def leaves(folder: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, by name, as raw bytes."""
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore((folder / "checkpoints" / str(step) / "state").absolute())
    flat, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in flat}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train_lm")
    (folder / "text").mkdir()
    for source in SCRIPT.parent.glob("*.py"):
        shutil.copy(source, folder / "text")
    return folder


@pytest.fixture(scope="module")
def straight(workplace: Path) -> "subprocess.CompletedProcess[str]":
    process = start(*TINY, "--data", "text", cwd=workplace)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_run_writes_plots_and_checkpoints_without_warnings(workplace, straight):
    out = workplace / "runs" / "moe"
    assert straight.returncode == 0, straight.stderr
    assert checkpoints(out) == [STEPS - 50, STEPS]
    for name in ("loss.png", "expert_load.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert str(out) in straight.stdout
    losses = np.loadtxt(out / "loss.csv", delimiter=",", skiprows=1)
    assert (losses[:, 0] == np.arange(1, STEPS + 1)).all()
    assert np.isfinite(losses[:, 1]).all() and np.isfinite(losses[[STEPS - 51, STEPS - 1], 2]).all()
    assert "--- sample ---" in straight.stdout
    assert "100%" in straight.stderr
    # Not "nothing but progress": XLA itself complains on machines so busy that compiling takes minutes.
    assert not re.search("warn|error|traceback", straight.stderr, re.IGNORECASE), straight.stderr
    held_out = [float(line.split()[-4]) for line in straight.stdout.splitlines() if line.startswith("step ")]
    assert len(held_out) == STEPS // 50
    assert held_out[-1] < held_out[0] < np.log(256)


def test_interrupted_and_resumed_run_ends_bit_identically(workplace, straight):
    arguments = [*TINY, "--data", "text", "--out", "interrupted"]
    process = start(*arguments, cwd=workplace)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 50:"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    stopped = checkpoints(workplace / "interrupted")[-1]
    assert 50 <= stopped < STEPS
    assert f"stopped after step {stopped}" in out and "Traceback" not in err

    resumed = start(*arguments, "--resume", cwd=workplace)
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert out.splitlines()[-1].split("nats")[0] == straight.stdout.splitlines()[-1].split("nats")[0]
    assert leaves(workplace / "interrupted", STEPS) == leaves(workplace / "runs" / "moe", STEPS)


def test_dense_bfloat16_run_of_few_steps(workplace):
    process = start(*TINY, "--steps", 3, "--dense", "--bf16", "--data", "text", cwd=workplace)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert checkpoints(workplace / "runs" / "dense") == [3]
    assert not (workplace / "runs" / "dense" / "expert_load.png").exists()


def test_diverged_run_stops_and_leaves_its_checkpoint(workplace):
    arguments = ["--steps", 40, "--save-every", 2, "--learning-rate", 1e30]
    process = start(*TINY, *arguments, "--data", "text", "--out", "diverged", cwd=workplace)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.search(r"error: the loss is (nan|inf) at step \d+: lower --learning-rate", err) and "Traceback" not in err
    assert checkpoints(workplace / "diverged")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Calls the example's `main` with wrong input; returns the one line that it says."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    train_lm = importlib.import_module("train_lm")

    def refuse(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            train_lm.main()
        said = capsys.readouterr()
        assert stop.value.code == 2
        assert said.err.count("\n") == 1 and not said.out
        return said.err

    return refuse


WRONG_INPUT = {
    "--data nowhere": "nowhere is neither a file nor a folder",
    "--data empty.txt": "no text in empty.txt",
    "--data folder": "no text in folder",
    "--data binary": "no text in binary",
    "--data short.txt": "more than one --context 16",
    "--top-k 5": "--top-k 5 is above --experts 4",
    "--experts 0": "--experts must be a positive number, not 0",
    "--steps -1": "--steps must be a positive number, not -1",
    "--learning-rate nan": "--learning-rate must be a positive number, not nan",
    "--seed -1": "--seed must be in [0, 2**32), not -1",
    "--d-ff 1000000000000": "not enough memory",
    "--heads 3": "--d-model 16 must be a multiple of twice --heads 3",
    "--batch many": "invalid int value: 'many'",
    "--colour red": "unrecognized arguments: --colour red",
    "--out occupied": "occupied",
    "--resume": "holds no checkpoint",
    "--resume --out nowhere": "nowhere",
}


@pytest.mark.parametrize("arguments, message", WRONG_INPUT.items())
def test_wrong_input_is_told_in_one_sentence(tmp_path, monkeypatch, refusal, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "occupied").write_text("a file")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary").write_bytes(bytes(1000))
    (tmp_path / "text").write_text("enough of text\n" * 100)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert message in refusal(*TINY, "--data", "text", *arguments.split())
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "runs" not in path.parts}
    assert after == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "already holds checkpoints"),
        ("--resume --experts 8", "made with --experts 4, not 8"),
        ("--resume --learning-rate 0.5 --seed 3", "--learning-rate 0.02, not 0.5 and --seed 0, not 3"),
        ("--resume --data text/lm_model.py", "made with --data"),
    ],
)
def test_checkpoints_of_another_run_are_left_alone(workplace, straight, refusal, monkeypatch, arguments, message):
    monkeypatch.chdir(workplace)
    before = leaves(workplace / "runs" / "moe", STEPS)
    assert message in refusal(*TINY, "--data", "text", *arguments.split())
    assert leaves(workplace / "runs" / "moe", STEPS) == before


def test_damaged_checkpoint_is_told_in_one_sentence(workplace, straight):
    shutil.copytree(workplace / "runs" / "moe", workplace / "damaged")
    for path in (workplace / "damaged" / "checkpoints" / str(STEPS) / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"not what was saved")
    process = start(*TINY, "--data", "text", "--out", "damaged", "--resume", cwd=workplace)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "is damaged" in err and err.count("\n") == 1
