"""The executor that starts workers as processes of this machine, one per device.

Workers end with their driver: they are asked to save by SIGTERM when it ends, however it ends. So
the next driver finds checkpoints and no processes. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwise.errors import UsageError
from headwise.execute.base import Handle, Job, Status, last_lines, open_log
from headwise.execute.leases import host

GRACE = 30.0  # seconds that a worker has to save


@dataclass
class _Slot:
    """A device, and the job that has it."""

    device: str  # an index for CUDA_VISIBLE_DEVICES; empty: a core
    process: subprocess.Popen[bytes] | None = None
    job: str = ""
    deadline: float = 0.0  # when it is killed, once it was asked to save and end


class Local:
    """Processes of this machine. `devices` has an entry per worker: the index of a GPU, or "" for
    one core."""

    name = "local"
    address = "local"
    outlives = False
    by_value = False

    def __init__(self, devices: Sequence[str], python: str = sys.executable) -> None:
        self.python = python
        self._slots = [_Slot(device) for device in devices]
        self._waiting: list[tuple[str, Job]] = []
        self._ended: dict[str, str] = {}  # job -> why
        self._submitted = 0
        self._whose = f"{host()} {os.getpid()}"

    def slots(self) -> int:
        """How many workers run at once."""
        return len(self._slots)

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Queue jobs; they are started as devices are free."""
        handles = []
        for job in jobs:
            self._submitted += 1
            name = f"{self._whose} {self._submitted}"
            self._waiting.append((name, job))
            handles.append(Handle(self.name, name, job.group, job.attempt, str(job.log)))
        self._start()
        return handles

    def poll(self, handles: Sequence[Handle]) -> list[Status]:
        """What each job does now."""
        self._start()
        waiting = {name for name, _ in self._waiting}
        running = {slot.job for slot in self._slots}
        statuses = []
        for handle in handles:
            if handle.job in waiting:
                status = Status("waiting")
            elif handle.job in running:
                status = Status("running")
            elif handle.job in self._ended:
                status = Status("ended", self._ended[handle.job] or last_lines(handle.log))
            else:
                status = Status("unknown")
            statuses.append(status)
        return statuses

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ask workers to save and end, and kill those that do not in time."""
        names = {handle.job for handle in handles}
        for name, _ in self._waiting:
            if name in names:
                self._ended[name] = "cancelled before it began"
        self._waiting = [(name, job) for name, job in self._waiting if name not in names]
        for slot in self._slots:
            if slot.process is not None and slot.job in names and not slot.deadline:
                slot.process.terminate()
                slot.deadline = time.monotonic() + GRACE

    def close(self) -> None:
        """End all workers."""
        self._waiting = []
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.terminate()
        end = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._reap()

    def _reap(self) -> None:
        """Free the devices of workers that have ended."""
        for slot in self._slots:
            if slot.process is not None and slot.deadline and time.monotonic() > slot.deadline:
                slot.process.kill()
            if slot.process is not None and (code := slot.process.poll()) is not None:
                killed = f"killed by signal {-code}" if code < 0 else ""
                self._ended[slot.job] = killed
                slot.process, slot.job, slot.deadline = None, "", 0.0

    def _start(self) -> None:
        """Give free devices work."""
        self._reap()
        for slot in self._slots:
            if slot.process is None and self._waiting:
                slot.job, job = self._waiting.pop(0)
                slot.process = self._process(slot.device, job)

    def _process(self, device: str, job: Job) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            # PyTorch has one thread, nothing is imported from the folder of the command, and the
            # worker ends with this process.
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "HEADWISE_PARENT": str(os.getpid()),
            **({"CUDA_VISIBLE_DEVICES": _visible(device)} if device else {}),
        }
        with open_log(job.log) as log:
            return subprocess.Popen(
                job.command(self.python),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is the driver's to hear
            )


def _visible(device: str) -> str:
    """The name of the GPU that this process sees by a number, which may be one of a few."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[int(device)] if int(device) < len(names) else device


def devices_of(text: str, gpus: Callable[[], int], cores: int) -> list[str]:
    """What `--devices` takes: `0,1` or `all` GPUs; without any GPU a number of cores, as in
    `cpu:4`. `gpus` counts those that are there.

    >>> devices_of("0,2", lambda: 4, 8), devices_of("all", lambda: 2, 8)
    (['0', '2'], ['0', '1'])
    >>> devices_of("cpu:2", int, 8)
    ['', '']
    """
    if text.partition(":")[0] == "cpu":
        count = text.partition(":")[2] or str(cores)
        if not count.isdecimal() or not 1 <= int(count) <= 1024:
            raise UsageError(f"--devices cpu:N has N from 1 to 1024, got {text!r}")
        return [""] * int(count)
    there = gpus()
    chosen = [str(i) for i in range(there)] if text == "all" else text.split(",")
    if text == "all" and not there:
        return [""] * cores
    for index in chosen:
        if not index.isdecimal() or int(index) >= there:
            raise UsageError(
                f"--devices takes GPUs by number (0,1), all, or cpu:N, got {text!r}; there are "
                f"{there} GPUs"
            )
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"--devices names each GPU once, got {text!r}")
    return chosen
