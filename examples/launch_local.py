"""Start a script in several processes of this machine, which together are one `jax.distributed` run.

    python examples/launch_local.py 2 -- examples/train_lm.py --mesh data=2,expert=4
    python examples/launch_local.py 2 --devices-per-process 4 -- examples/train_lm.py --mesh data=2,expert=4

For trying out on one machine what a cluster would do. Of GPUs, each process gets as many as it is to have devices. The
first process has the terminal, the others' lines get their number in front. If one fails the others are told to stop
(SIGTERM), and killed 10 seconds later; the status is that of the one that failed. Ctrl-C is passed on to all, once; a
second one stops them. What cannot work is told in one sentence, with status 2.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TextIO

GRACE_SECONDS = 10
Process = subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], count: int, devices: int | None) -> list[Process]:
    address = f"127.0.0.1:{free_port()}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    shared |= {"JAX_NUM_PROCESSES": str(count), "PYTHONUNBUFFERED": "1"}
    if devices is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(devices)
    processes, width = [], devices or 1
    for number in range(count):
        ids = ",".join(map(str, range(number * width, (number + 1) * width)))
        pipe = None if number == 0 else subprocess.PIPE
        # A session of its own: Ctrl-C reaches it from here only, and so exactly once.
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | shared | {"JAX_PROCESS_ID": str(number), "JAX_LOCAL_DEVICE_IDS": ids},
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        processes.append(process)
    return processes


def pass_on(number: int, source: TextIO, target: TextIO) -> None:
    for line in source:
        target.write(f"[{number}] {line}")
        target.flush()


def forward_output(processes: list[Process]) -> list[threading.Thread]:
    threads = []
    for number, process in enumerate(processes):
        for source, target in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
            if source is not None:
                thread = threading.Thread(target=pass_on, args=(number, source, target), daemon=True)
                thread.start()
                threads.append(thread)
    return threads


def send(processes: list[Process], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def stop(processes: list[Process]) -> None:
    """Ends those that are left: by SIGTERM, and if that does not help by SIGKILL."""
    send(processes, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    send(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def shell_status(status: int) -> int:
    """That of a process ended by a signal is negative; a shell adds 128."""
    return 128 - status if status < 0 else status


def wait(processes: list[Process]) -> int:
    """The status of the first process that fails, or 0 when all are done."""
    interrupts: list[int] = []
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda number, _: interrupts.append(number))
    passed_on = False
    while True:
        statuses = [process.poll() for process in processes]
        failed = next(((number, status) for number, status in enumerate(statuses) if status), None)
        if None not in statuses:
            return shell_status(failed[1]) if failed else 0
        if len(interrupts) > 1 or signal.SIGTERM in interrupts:
            return 128 + interrupts[-1]
        if failed and not interrupts:
            number, status = failed
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            print(f"launch_local.py: process {number} {how}: stopping the others", file=sys.stderr)
            return shell_status(status)
        if interrupts and not passed_on:
            passed_on = True
            send(processes, signal.SIGINT)
        time.sleep(0.05)


def main() -> int:
    parser = ArgumentParser(usage=SUPPRESS, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int, help="how many")
    parser.add_argument("--devices-per-process", type=int, help="default: one GPU, or what the script wants")
    parser.add_argument("command", nargs="+", help="after --, the script and its arguments")
    given = parser.parse_args()
    devices = given.devices_per_process
    for name, value in ("the number of processes", given.processes), ("--devices-per-process", devices):
        if value is not None and value < 1:
            parser.error(f"{name} must be positive, not {value}")
    if not Path(given.command[0]).is_file():
        parser.error(f"{given.command[0]} is not a file")
    processes = start(given.command, given.processes, devices)
    threads = forward_output(processes)
    try:
        status = wait(processes)
    finally:
        stop(processes)
    for thread in threads:
        thread.join(timeout=1)
    return status


if __name__ == "__main__":
    sys.exit(main())
