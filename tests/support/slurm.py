"""A Slurm of our own: two virtual nodes on this machine, each with two make-believe GPUs.

    python tests/support/slurm.py FOLDER      starts one, says how to reach it, ends with Ctrl-C

Everything lies in one folder: keys, sockets, logs, spool folders. The daemons are munged (who are
you), slurmctld (the head) and a slurmd per node; all are on the loopback address, at ports that
were free. It wants root and Debian's slurm-wlm and munge, and neither systemd nor cgroups.

What keeps it quick: the scheduler looks every second, a job put back in the queue waits 5 seconds
(`cred_expire`; 120 is usual), what ignores SIGTERM is killed after 3 (`KillWait`; 30 is usual).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = ("n1", "n2")
GPUS = 2  # of a node
CORES = 4  # that a node says it has
KILL_WAIT = 3
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")


def absent() -> str:
    """Why no Slurm can be started here; empty: it can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd wants root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Bed:
    """A running Slurm. `environment` is what its commands need to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        """What a Slurm command prints."""
        made = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60
        )
        if made.returncode:
            raise RuntimeError(f"{' '.join(words)}: {made.stderr.strip()}")
        return made.stdout

    def nodes(self) -> dict[str, str]:
        """The state of each node."""
        return dict(
            line.split() for line in self.command("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        )

    def jobs(self) -> list[str]:
        """What is queued or running, as squeue shows it: id, state, node."""
        return self.command("squeue", "-h", "-r", "-o", "%i %T %N").splitlines()

    def start(self) -> None:
        """Start all daemons and wait until both nodes are idle."""
        _write(self.folder)
        munge = self.folder / "munge"
        _daemon(
            "munged",
            "--force",
            *(f"--{name}={munge / file}" for name, file in MUNGE_FILES.items()),
        )
        _daemon("slurmctld", "-c", environment=self.environment)
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: set(self.nodes().values()) == {"idle"}, 60, "two idle nodes", self.log)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, and have the head take it back."""
        _daemon("slurmd", "-c", "-N", node, environment=self.environment)

    def kill_node(self, node: str) -> None:
        """A node loses its power: its slurmd and every process of its jobs are gone at once, and
        the head hears of it."""
        _kill(_number_in(self.folder / f"slurmd.{node}.pid"), signal.SIGKILL)
        for number in self.processes(node):
            _kill(number, signal.SIGKILL)
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def processes(self, node: str) -> list[int]:
        """The processes of a node's jobs."""
        return _of_node(node, self.environment["SLURM_CONF"])

    def daemon_of(self, number: int) -> int:
        """The daemon of the step that a process belongs to."""
        while number > 1:
            number = _parent(number)
            if Path(f"/proc/{number}/cmdline").read_bytes().startswith(b"slurmstepd"):
                return number
        raise AssertionError("it is in no step")

    def revive_node(self, node: str) -> None:
        """The node comes back."""
        self.start_node(node)
        wait_for(lambda: node in self.nodes(), 30, f"node {node}", self.log)
        with contextlib.suppress(RuntimeError):  # it may have come back by itself
            self.command("scontrol", "update", f"nodename={node}", "state=resume")
        wait_for(lambda: self.nodes()[node] in ("idle", "mixed"), 30, f"node {node}", self.log)

    def clear(self) -> None:
        """End all jobs, and wait until their processes have ended."""
        self.command("scancel", "--full", "-u", "root")
        wait_for(lambda: not self.jobs(), 30, "an empty queue", self.log)

    def close(self) -> None:
        """End everything that was started here."""
        with contextlib.suppress(RuntimeError):
            self.clear()
        daemons = ["slurmctld.pid", *(f"slurmd.{node}.pid" for node in NODES), "munge/pid"]
        numbers = [_number_in(self.folder / name) for name in daemons]
        numbers += [number for node in NODES for number in self.processes(node)]
        for number in numbers:
            _kill(number, signal.SIGTERM)
        end = time.monotonic() + 5
        while time.monotonic() < end and any(map(_alive, numbers)):
            time.sleep(0.05)
        for number in filter(_alive, numbers):
            _kill(number, signal.SIGKILL)

    def log(self) -> str:
        """The last lines of every log, for a test that failed."""
        return "\n".join(
            f"-- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Bed]:
    """A Slurm for the time of a block."""
    bed = Bed(folder.resolve())
    try:
        bed.start()
        yield bed
    finally:
        bed.close()


def wait_for(
    ready: Callable[[], object], seconds: float, what: str, log: Callable[[], str] = str
) -> None:
    """Return when something is the case."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RuntimeError):  # a head that does not answer yet
            if ready():
                return
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}\n{log()}")
        time.sleep(0.1)


# ---- what lies in the folder

MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _write(folder: Path) -> None:
    """Configuration, keys and the nodes' GPUs."""
    munge = folder / "munge"
    for path, mode in ((folder, 0o755), (folder / "state", 0o755), (munge, 0o711)):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for number in range(GPUS):
        # Slurm sets CUDA_VISIBLE_DEVICES for character devices only; this one is /dev/null.
        device = folder / f"nvidia{number}"
        if not device.exists():
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    lines = [f"NodeName={node} Name=gpu File={folder}/nvidia[0-{GPUS - 1}]" for node in NODES]
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")
    (folder / "slurm.conf").write_text(_configuration(folder))


def _configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    head, *ports = _free_ports(1 + len(NODES))
    settings = {
        "ClusterName": "bed",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": head,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket,cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool.%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.%n.log",
        # nothing of systemd, cgroups, MPI or a database
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SlurmdParameters": "config_overrides",  # as many cores as we say
        "GresTypes": "gpu",
        "JobRequeue": 1,
        "KillWait": KILL_WAIT,
        "ReturnToService": 2,
        "SchedulerType": "sched/builtin",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0,batch_sched_delay=0",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES} "
        f"RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    ]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens at."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


# ---- processes


def _daemon(name: str, *words: str, environment: dict[str, str] | None = None) -> None:
    """Start a daemon, which goes to the background by itself."""
    made = subprocess.run(
        [_program(name) or name, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    if made.returncode:
        raise RuntimeError(f"{name}: {made.stderr.strip()}")


def _of_node(node: str, configuration: str) -> list[int]:
    """The processes of a node's jobs: all that Slurm has given the node's name in its environment,
    and the daemon of each step, which is the parent of its first process."""
    wanted = {f"SLURM_CONF={configuration}".encode(), f"SLURMD_NODENAME={node}".encode()}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.add(int(entry.name))
                parent = _parent(int(entry.name))
                if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                    found.add(parent)
    return sorted(found)


def _parent(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


def _number_in(path: Path) -> int:
    """The process whose number a daemon has written down; 0: none."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _alive(number: int) -> bool:
    return number > 0 and Path(f"/proc/{number}").exists()


def _kill(number: int, how: int) -> None:
    if number > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, how)


if __name__ == "__main__":
    begun = time.monotonic()
    with started(Path(sys.argv[1])) as bed:
        print(f"up in {time.monotonic() - begun:.1f} s: {bed.nodes()}")
        print(f"export SLURM_CONF={bed.environment['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
