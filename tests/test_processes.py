"""Several processes on this machine: training across them, the launcher, and what happens when one of them dies."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from .lm_runs import EXAMPLES, running, saved_losses, start, write_text

pytestmark = pytest.mark.slow

TRAIN, LAUNCH = EXAMPLES / "train_lm.py", EXAMPLES / "launch_local.py"
STEPS = 20
TINY = "--data text --d-model 16 --d-ff 16 --experts 8 --layers 1 --context 8 --batch 8".split()
# docs/clusters.md states these seconds.
NOTICED_WITHIN, STOPPED_WITHIN = 40, 15


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def single(workplace: Path) -> dict[str, np.ndarray]:
    process = start(workplace, TRAIN, *TINY, "--steps", STEPS, "--save-every", STEPS, "--out", "single")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return saved_losses(workplace / "single", STEPS)


@pytest.mark.parametrize("processes, mesh", [(2, "data=1,expert=4"), (4, "expert=4")])
def test_training_equals_that_of_one_process(workplace, single, processes, mesh):
    """Experts lie in all processes. Sums over devices are taken in another order, and 20 steps amplify what float32
    rounds, to less than 1e-6 here; one token that went astray would change the third digit."""
    out = f"{processes}_processes"
    arguments = [*TINY, "--steps", STEPS, "--save-every", STEPS, "--mesh", mesh, "--out", out]
    process = start(workplace, LAUNCH, processes, "--", TRAIN, *arguments)
    said, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert said.count("nats per byte") == 2 and said.count("--- sample ---") == 1, "one process speaks for all"
    assert (workplace / out / "loss.png").exists()
    actual = saved_losses(workplace / out, STEPS)
    assert actual.keys() == single.keys() and len(single) == 2
    for name, expected in single.items():
        np.testing.assert_allclose(actual[name], expected, rtol=1e-4, err_msg=name)


def endless(out: str) -> list[object]:
    return [TRAIN, *TINY, "--steps", 10**6, "--save-every", 10**6, "--mesh", "expert=2", "--out", out]


def wait_for_training(process: "subprocess.Popen[str]") -> None:
    """Until the progress bar shows a loss."""
    assert process.stderr is not None
    said = ""
    while "loss" not in said:
        letter = process.stderr.read(1)
        assert letter, f"it ended before training: {said}"
        said += letter


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_noticed_by_the_other(workplace, victim):
    """Without the launcher's help. Process 0 is the one that the others report to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    command = endless(f"killed_{victim}")
    with (
        running(workplace, *command, **shared, JAX_PROCESS_ID="0") as first,
        running(workplace, *command, **shared, JAX_PROCESS_ID="1") as second,
    ):
        wait_for_training(first)
        killed, other = (first, second) if victim == 0 else (second, first)
        killed.kill()
        _, err = other.communicate(timeout=NOTICED_WITHIN)
        assert other.returncode != 0
        assert "another task died" in err


def children(process: "subprocess.Popen[str]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_the_launcher_stops_the_others_when_one_is_killed(workplace):
    with running(workplace, LAUNCH, 2, "--", *endless("launched")) as launcher:
        wait_for_training(launcher)
        pids = children(launcher)
        os.kill(pids[1], signal.SIGKILL)
        _, err = launcher.communicate(timeout=STOPPED_WITHIN)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "process 1 was ended by SIGKILL: stopping the others" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ctrl_c_saves_once_for_all(workplace):
    with running(workplace, LAUNCH, 2, "--", *endless("interrupted")) as launcher:
        wait_for_training(launcher)
        launcher.send_signal(signal.SIGINT)
        said, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, err
    assert "stopped after step" in said and "Traceback" not in err
    newest = max(int(path.name) for path in (workplace / "interrupted" / "checkpoints").iterdir())
    assert f"stopped after step {newest}" in said
    assert np.isfinite(saved_losses(workplace / "interrupted", newest)["['losses']"][:newest]).all()


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
number = os.environ["JAX_PROCESS_ID"]
print("here is", number, "with", os.environ["JAX_NUM_CPU_DEVICES"], "of", os.environ["JAX_NUM_PROCESSES"])
if number == "1":
    time.sleep(1)
    sys.exit(7)
time.sleep(100)
"""


def test_the_launcher_kills_what_does_not_listen(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    started = time.monotonic()
    with running(tmp_path, LAUNCH, 3, "--devices-per-process", 2, "--", "stubborn.py") as launcher:
        said, err = launcher.communicate(timeout=60)
    assert time.monotonic() - started < STOPPED_WITHIN + 3
    assert launcher.returncode == 7
    assert "process 1 ended with status 7: stopping the others" in err
    assert sorted(said.splitlines()) == [
        "[1] here is 1 with 2 of 3",
        "[2] here is 2 with 2 of 3",
        "here is 0 with 2 of 3",
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("0 -- script.py", "the number of processes must be positive, not 0"),
        ("2 --devices-per-process -1 -- script.py", "--devices-per-process must be positive, not -1"),
        ("2 -- nowhere.py", "nowhere.py is not a file"),
        ("two -- script.py", "invalid int value: 'two'"),
        ("2", "required: command"),
    ],
)
def test_launcher_mistakes_are_told_in_one_sentence(tmp_path, arguments, message):
    (tmp_path / "script.py").touch()
    process = start(tmp_path, LAUNCH, *arguments.split())
    said, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in err and err.count("\n") == 1 and not said
