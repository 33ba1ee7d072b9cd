"""The executor for Slurm: a job is one element of an array, and its script starts a worker.

    submit   one sbatch for many jobs; its script comes through a pipe and lies nowhere
    poll     squeue, and for what is no longer queued scontrol, or sacct where there are accounts
    cancel   scancel: SIGTERM, at which workers save, and SIGKILL after the cluster's KillWait

Nobody waits for what a job hands over: a job that was killed hands over nothing, and a cluster
without accounts never says so. What is believed is the queue, and the store.

Slurm puts jobs of a lost node, and preempted ones, back in its queue by itself and keeps their ids,
so they are waiting again. What runs into its time limit has ended. Standard library only; submitit
where it is installed (slurm_submitit.py).
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import headwise
from headwise.errors import UsageError, bounded, nearest, shown
from headwise.execute.base import Handle, Job, State, Status, last_lines

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")
OURS = {  # sbatch's options that are set here
    *("array", "error", "input", "job-name", "open-mode", "output", "parsable"),
    *("test-only", "wait", "wrap"),
}
NAME = "headwise"  # of every job
JOB_ID = r"\d{1,10}(_\d{1,7})?"
# Ends of a script whose node does not see the group's folder, so that nothing could be written.
NOT_SEEN = 113
GONE = "Invalid job id|already completing or completed"  # what has ended, or is just ending
# Threads of PyTorch where the engine does not set them itself: as many as the job has cores
THREADS = "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}"
MOST_SLOTS = 32  # for which a sweep is cut where nobody says how many
MOST_JOBS = 500  # of one array; a cluster takes 1,000 unless it says otherwise
ANSWER = 60.0  # seconds that a command of Slurm may take
# What Slurm's commands complain of while its head is away, and when to ask it again
AWAY = "Unable to contact|Socket timed out|Connection refused|has not answered|temporarily"
PAUSES = (2.0, 5.0, 15.0)
SHORTEST, LONGEST = 1.0, 10.0  # seconds between two questions; longer while nothing changes
WAITING = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    "SPECIAL_EXIT",
}


class SlurmError(RuntimeError):
    """A command of Slurm failed, and why."""


# ---- options


def options_of(words: Sequence[str]) -> dict[str, str]:
    """What sbatch is given, of the words after `--slurm`; an option without a value has none.

    >>> options_of(["partition=long", "time=8:00:00", "exclusive", "cpus_per_task=4"])
    {'partition': 'long', 'time': '8:00:00', 'exclusive': '', 'cpus-per-task': '4'}
    """
    options = {}
    for word in words:
        key, _, value = word.partition("=")
        key = key.strip().removeprefix("--").replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", key) or "\n" in value or "\0" in value:
            raise UsageError(
                f"--slurm takes options of sbatch as key=value, such as partition=gpu, "
                f"time=8:00:00, gpus=1; got {shown(word)}"
            )
        if key in OURS:
            raise UsageError(f"--slurm {key}: headwise sets this option of sbatch itself")
        options[key] = value.strip()
    return options


def flags_of(options: Mapping[str, str]) -> list[str]:
    """Options as sbatch's command line has them."""
    return [f"--{key}={value}" if value else f"--{key}" for key, value in options.items()]


# ---- commands


def environment() -> dict[str, str]:
    """What a job inherits: all but what describes the job that this process may itself be in."""
    inside = "SLURM_JOB_ID" in os.environ
    ours = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in os.environ.items()
        if not (inside and name.startswith(("SLURM_", "SLURMD_")) and name not in ours)
    }


def ask(*words: str, text: str | None = None) -> str:
    """What a command of Slurm prints, or a SlurmError with its reason in one line."""
    try:
        made = subprocess.run(
            words,
            env=environment(),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered for {ANSWER:.0f} s") from None
    except OSError as e:
        raise SlurmError(f"{words[0]}: {e}") from None
    if made.returncode:
        raise SlurmError(
            reason_of(made.stderr) or f"{words[0]} failed, exit code {made.returncode}"
        )
    return made.stdout


def reason_of(errors: str) -> str:
    """The reason in what a command of Slurm complains; the last line is the one that counts.

    >>> reason_of("sbatch: error: invalid partition specified: x\\n"
    ...           "sbatch: error: Batch job submission failed: Invalid partition name specified\\n")
    'Batch job submission failed: Invalid partition name specified'
    """
    lines = [" ".join(line.split()) for line in errors.splitlines() if line.strip()]
    lines = [re.sub(r"^(\w+: )?(error|fatal): |^\w+: ", "", line) for line in lines]
    lines = [line for line in lines if not line.startswith("Try ")]
    return lines[-1] if lines else ""


def submitted(flags: Sequence[str], script: str) -> str:
    """Give a script to sbatch; returns the job's id."""
    for pause in (*PAUSES, 0.0):
        try:
            out = ask("sbatch", "--parsable", *flags, text=script)
            return out.strip().splitlines()[-1].partition(";")[0]
        except SlurmError as e:
            if not pause or not re.search(AWAY, str(e)):
                raise refusal(flags, e) from None
        time.sleep(pause)
    raise AssertionError


def refusal(flags: Sequence[str], error: Exception) -> UsageError:
    """What Slurm would not take, as the user's mistake."""
    return UsageError(f"Slurm took no job ({' '.join(flags)}): {error}")


def check_slurm() -> None:
    """Refuse a machine that cannot submit."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"--on slurm needs Slurm's commands on this machine, it has no {', '.join(missing)}; "
            "run it on a login node of the cluster"
        )
    try:
        ask("squeue", "-h", "-o", "%i", "-j", "1")
    except SlurmError as e:
        if "Invalid job id" not in str(e):
            raise UsageError(f"--on slurm: the cluster does not answer: {e}") from None


# ---- scripts


def setup_of(python_path: str | None = None) -> str:
    """The lines by which a job's Python finds this headwise, whatever `--export` says."""
    package = str(Path(headwise.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH", "") if python_path is None else python_path
    folders = [str(Path(part).absolute()) for part in path.split(os.pathsep) if part]
    folders = list(dict.fromkeys([*folders, package]))
    return (
        f"export PYTHONPATH={shlex.quote(os.pathsep.join(folders))}\n"
        "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1\n"
    )


def command_of(job: Job) -> str:
    """What the shell of a job runs: the worker in its place, so that signals reach it."""
    return f"{log_to(job.log)}; exec {shlex.join(job.command())}"


def log_to(path: Path) -> str:
    """Have a shell write to a group's log; a link in somebody's store could lead anywhere."""
    folder, log = shlex.quote(str(path.parent)), shlex.quote(str(path))
    return f"[ -d {folder} ] && [ ! -L {log} ] || exit {NOT_SEEN}; exec >>{log} 2>&1"


def script_of(jobs: Sequence[Job]) -> str:
    """The script of an array: each element runs one job's command."""
    cases = "".join(f"{i}) {command_of(job)} ;;\n" for i, job in enumerate(jobs))
    return f"#!/bin/sh\n{setup_of()}{THREADS}\ncase $SLURM_ARRAY_TASK_ID in\n{cases}esac\n"


# ---- the executor


class Submit(Protocol):
    """Submits one array, of which `most` run at once; returns an id for each job."""

    def __call__(self, jobs: Sequence[Job], options: Mapping[str, str], most: int) -> list[str]: ...


def submit_by_sbatch(jobs: Sequence[Job], options: Mapping[str, str], most: int) -> list[str]:
    """One array by sbatch. What a worker prints is in its group's log, and Slurm has no more to
    say than squeue and scontrol tell."""
    flags = [
        f"--job-name={NAME}",
        f"--array=0-{len(jobs) - 1}%{most}",
        "--output=/dev/null",
        *([] if "no-requeue" in options else ["--requeue"]),
        *flags_of(options),
    ]
    array = submitted(flags, script_of(jobs))
    return [f"{array}_{i}" for i in range(len(jobs))]


def way_to_submit(options: Mapping[str, str]) -> tuple[Submit, dict[str, str]]:
    """submitit where it is installed and `submitit=no` is not said; what is left for sbatch."""
    rest = dict(options)
    wanted = rest.pop("submitit", "auto")
    choices = ("auto", "yes", "no")
    if wanted not in choices:
        raise UsageError(f"--slurm submitit={shown(wanted)}; {nearest(wanted, choices)}")
    there = importlib.util.find_spec("submitit") is not None
    if wanted == "yes" and not there:
        raise UsageError("--slurm submitit=yes needs submitit: pip install 'headwise[slurm]'")
    if wanted == "no" or not there:
        return submit_by_sbatch, rest
    from headwise.execute.slurm_submitit import submit_by_submitit

    return submit_by_submitit, rest


class Slurm:
    """Jobs in the queue of a cluster that this machine can submit to."""

    name = "slurm"
    address = "slurm"
    outlives = True
    by_value = False

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.submit_array, self.options = way_to_submit(options_of(words))
        jobs = self.options.pop("jobs", "")
        if jobs and not (jobs.isdecimal() and 1 <= int(jobs) <= MOST_JOBS):
            raise UsageError(f"--slurm jobs=N has N from 1 to {MOST_JOBS}, got {shown(jobs)}")
        self.most = int(jobs or 0)
        check_slurm()
        self._seen: dict[str, tuple[State, str]] = {}  # as squeue showed them last
        self._ended: dict[str, Status] = {}
        self.ask_soon()

    def slots(self) -> int:
        """What `jobs` says; else the jobs of this size for which the partition has devices, or
        cores without `gpus`, and few of a large cluster's."""
        return self.most or min(MOST_SLOTS, slots_of(self.options))

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Queue jobs, in arrays."""
        handles = []
        for at in range(0, len(jobs), MOST_JOBS):
            some = jobs[at : at + MOST_JOBS]
            ids = self.submit_array(some, self.options, self.most or len(some))
            handles += [
                Handle(self.name, job_id, job.group, job.attempt, str(job.log))
                for job_id, job in zip(ids, some, strict=True)
            ]
        self.ask_soon()
        return handles

    def ask_soon(self) -> None:
        """Ask the queue at the next poll."""
        self._asked, self._wait = float("-inf"), SHORTEST

    def poll(self, handles: Sequence[Handle]) -> list[Status]:
        """A status each. The queue is asked every second, and up to every 10 while nothing
        changes."""
        now, trouble = time.monotonic(), ""
        if now - self._asked >= self._wait:
            self._asked = now
            try:
                seen = queue()
                self._wait = SHORTEST if seen != self._seen else min(LONGEST, 1.25 * self._wait)
                self._seen = seen
            except SlurmError as e:
                trouble = f"the queue cannot be seen: {e}"
                self._wait = LONGEST
        return [self._status(handle, trouble) for handle in handles]

    def _status(self, handle: Handle, trouble: str) -> Status:
        if handle.job in self._ended:
            return self._ended[handle.job]
        if handle.job in self._seen:
            state, line = self._seen[handle.job]
            return Status(state, trouble or line)
        if trouble:
            return Status("unknown", trouble)
        try:
            status = status_of_ended(handle)
        except SlurmError as e:
            return Status("unknown", str(e))
        if status.state == "ended":
            self._ended[handle.job] = status
        return status

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Have jobs save and end."""
        jobs = [handle.job for handle in handles if handle.job not in self._ended]
        # A store may be somebody's, and name any job.
        jobs = [job for job in jobs if re.fullmatch(JOB_ID, job)]
        for at in range(0, len(jobs), MOST_JOBS):
            try:
                ask("scancel", f"--name={NAME}", *jobs[at : at + MOST_JOBS])
            except SlurmError as e:
                if not re.search(GONE, str(e)):
                    raise
        self.ask_soon()

    def close(self) -> None:
        """Nothing is held; jobs stay in the queue."""


# ---- what Slurm knows


def queue() -> dict[str, tuple[State, str]]:
    """This user's jobs that wait or run, and why they wait."""
    user = pwd.getpwuid(os.getuid()).pw_name
    found: dict[str, tuple[State, str]] = {}
    for line in ask("squeue", "-h", "-r", "-u", user, "-o", "%i|%T|%r").splitlines():
        job_id, state, reason = line.strip().split("|", 2)
        waits = state in WAITING
        found[job_id] = (
            "waiting" if waits else "running",
            f"Slurm: {reason}" if waits and reason not in ("None", "Priority", "Resources") else "",
        )
    return found


def status_of_ended(handle: Handle) -> Status:
    """What became of a job that is no longer in the queue."""
    fields = {}
    if not re.fullmatch(JOB_ID, handle.job):
        return Status("unknown", f"{shown(handle.job)} is no job of Slurm")
    try:
        fields = dict(_fields(ask("scontrol", "show", "job", "-o", handle.job)))
    except SlurmError as e:
        if "Invalid job id" not in str(e):
            raise
    state, code = fields.get("JobState", ""), fields.get("ExitCode", "")
    if not state:
        state, code = _accounted(handle.job)
    if not state:
        return Status("unknown", "Slurm does not know the job any more")
    if state in WAITING:
        return Status("waiting")
    if state in ("RUNNING", "COMPLETING", "SUSPENDED"):
        return Status("running")
    number = code.partition(":")[0]
    if number == str(NOT_SEEN):
        folder = Path(handle.log).parent
        why = f"its node does not see {folder}: the store must be where all nodes see it"
        return Status("ended", why)
    said = last_lines(handle.log) if state in ("COMPLETED", "FAILED") else ""
    why = state.lower().replace("_", " ") + (f", exit code {number}" if state == "FAILED" else "")
    return Status("ended", bounded(said) or f"Slurm: {why}")


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split():
        key, _, value = word.partition("=")
        yield key, value


def _accounted(job_id: str) -> tuple[str, str]:
    """State and exit code of a job in the cluster's accounts; empty where it keeps none."""
    if shutil.which("sacct") is None:
        return "", ""
    try:
        out = ask("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
    except SlurmError:
        return "", ""
    state, _, code = (out.splitlines() or [""])[-1].partition("|")
    return state.partition(" ")[0], code  # CANCELLED by 1000


def slots_of(options: Mapping[str, str]) -> int:
    """How many jobs with these options the nodes have room for, when nobody else is there."""
    flags = ["-p", options["partition"]] if options.get("partition") else []
    try:
        lines = ask("sinfo", "-h", "-N", *flags, "-o", "%N|%c|%G|%T").splitlines()
    except SlurmError:
        return 1
    nodes = dict(line.strip().split("|", 1) for line in lines)
    gpus = next((options[k] for k in ("gpus", "gpus-per-node", "gres") if options.get(k)), "")
    wanted = int(re.findall(r"\d+", f"1 {gpus}")[-1]) or 1
    cores = re.match(r"\d+", options.get("cpus-per-task", "1"))
    found = 0
    for node in nodes.values():
        count, devices, state = node.split("|")
        if state.startswith(("down", "drain", "fail", "maint", "inval")):
            continue
        if gpus:
            there = sum(int(n) for n in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", devices))
            found += there // wanted
        else:
            found += int(count) // max(1, int(cores[0]) if cores else 1)
    return max(1, found)
