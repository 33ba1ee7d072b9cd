"""The executor on Ray: agents in the cluster, one per core or GPU, each with one group at a time.

    ray              a Ray that is started here, on loopback, and ends with the driver
    ray:auto         the Ray that this machine belongs to
    ray://HOST:PORT  a cluster elsewhere, by Ray's client

Ray places the agents, starts them and says when they or their nodes die. Retries are the driver's,
from checkpoints, so Ray is asked for none. On a cluster that was there before, agents are detached:
they stay when the driver ends, and the next driver finds them by the handles in the store. Where an
agent does not see the store, files travel over Ray (ray_agent.py).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, bounded
from headwise.execute.base import Handle, Job, Status, last_lines
from headwise.execute.carried import files_of, take_files
from headwise.execute.own_code import own_classes
from headwise.execute.ray_agent import Agent, Mark, Order, digest_at
from headwise.files import USER_FILE

GRACE = 30.0  # seconds that a group has to save
TOUCH = 10.0  # seconds between two words to an idle agent
COLLECT = 1.0  # seconds between two looks at what an agent wrote where nobody else sees it
ANSWER = 5.0  # seconds within which a cluster's port answers
START = 60.0  # seconds within which a first call into the cluster answers


@dataclass
class _Agent:
    """An agent as the driver sees it."""

    actor: Any
    name: str
    ready: Any  # the answer of its first call
    alive: bool = False
    job: str = ""
    ended: Any = None  # the answer of its work
    carried: bool = False
    collecting: Any = None  # the answer of its changes
    known: dict[str, Mark] = field(default_factory=dict)  # its files as they were taken
    collected: float = 0.0
    deadline: float = 0.0  # when it is killed, once its group was asked to save and end


@dataclass
class _Order:
    """A job that was submitted here."""

    job: Job
    handle: Handle
    order: Order
    carried: bool = False


class Ray:
    """A Ray cluster. `idle` is for how many seconds an agent waits for a driver."""

    name = "ray"
    by_value = True

    def __init__(
        self, address: str, *, idle: float = 60.0, environment: dict[str, str] | None = None
    ) -> None:
        self.address = address
        self.outlives = address != "ray"
        self._idle, self._environment = idle, environment or {}
        self._session = f"headwise-{secrets.token_hex(4)}"
        self._agents: list[_Agent] = []
        self._waiting: list[_Order] = []
        self._orders: dict[str, _Order] = {}
        self._ended: dict[str, str] = {}  # job -> why
        self._folders: dict[str, Path] = {}  # job -> STORE/groups/ID as it is seen from here
        self._submitted = 0
        self._resources: dict[str, float] = {}
        self._looked = self._touched = 0.0
        self._unknown: set[str] = set()  # jobs of former drivers that no agent has
        self._added = {} if self.outlives else _keep_private()
        self._ray = ray_module()
        self._connect()

    # ---- the cluster

    def _connect(self) -> None:
        ray = self._ray
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address.startswith("ray://"):
            host, _, port = self.address.removeprefix("ray://").rpartition(":")
            check_answers(host, int(port))
        try:
            if self.address == "ray":
                ray.init(
                    address="local", include_dashboard=False, _node_ip_address="127.0.0.1",
                    namespace=self._session, **common,
                )  # fmt: skip
            else:
                where = "auto" if self.address == "ray:auto" else self.address
                ray.init(address=where, namespace=self._session, **common)
        except (ConnectionError, RuntimeError, ValueError, OSError) as e:
            raise UsageError(f"no Ray at {self.address}: {_line(e)}") from None
        self._look()

    def _look(self) -> None:
        """See what the cluster has now; nodes come and go."""
        now = time.monotonic()
        if not self._resources or now - self._looked > TOUCH:
            self._resources, self._looked = dict(self._ray.cluster_resources()), now

    def slots(self) -> int:
        """GPUs of the cluster, or its cores where it has none."""
        self._look()
        return max(1, int(self._resources.get("GPU", 0) or self._resources.get("CPU", 0)))

    def _limit(self, device: str) -> int:
        kind = "CPU" if self._without_gpu(device) else "GPU"
        return max(1, int(self._resources.get(kind, 0)))

    def _without_gpu(self, device: str) -> bool:
        return device == "cpu" or (device == "auto" and not self._resources.get("GPU"))

    # ---- the interface

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Queue jobs; they begin as agents are free."""
        handles = []
        for job in jobs:
            if job.device.startswith("cuda") and not self.outlives and self._without_gpu("auto"):
                raise UsageError(f"device {job.device} is not there: Ray sees no GPU here")
            self._submitted += 1
            name = f"{self._session}:{self._submitted}"
            handle = Handle(self.name, name, job.group, job.attempt, str(job.log))
            values, modules = _pickled(job)
            order = Order(
                name, str(job.folder), digest_at(job.folder), job.attempt, values, modules
            )
            self._orders[name] = _Order(job, handle, order)
            self._folders[name] = job.folder
            self._waiting.append(self._orders[name])
            handles.append(handle)
        self._give()
        return handles

    def poll(self, handles: Sequence[Handle]) -> list[Status]:
        """What each job does now."""
        with self._reached():
            self._look()
            for handle in handles:
                self._find(handle)
            self._hear()
            self._collect()
            self._give()
        waiting = {order.handle.job for order in self._waiting}
        running = {agent.job for agent in self._agents if agent.job}
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
        """Have groups save and end; an agent whose group does not is killed."""
        names = {handle.job for handle in handles}
        for order in self._waiting:
            if order.handle.job in names:
                self._ended[order.handle.job] = "cancelled before it began"
        self._waiting = [order for order in self._waiting if order.handle.job not in names]
        for agent in self._agents:
            if agent.job in names and not agent.deadline:
                agent.actor.cancel.remote(agent.job)
                agent.deadline = time.monotonic() + GRACE

    def close(self) -> None:
        """Let go of the cluster. Agents that work stay on a cluster that stays."""
        ray = self._ray
        with contextlib.suppress(Exception):  # a cluster that is gone has nothing to be closed
            for agent in self._agents:
                if not agent.job or not self.outlives:
                    ray.kill(agent.actor)
        with contextlib.suppress(Exception):
            ray.shutdown()
        for name in self._added:
            os.environ.pop(name, None)
        if self._added:
            _read_environment()

    # ---- agents

    def _give(self) -> None:
        """Give free agents work, and ask for as many agents as there is work and room for."""
        for agent in self._agents:
            if agent.alive and not agent.job and self._waiting:
                order = self._waiting.pop(0)
                agent.job = order.handle.job
                agent.carried = order.carried
                sent = order.order
                if order.carried:
                    sent = replace(sent, files=files_of(order.job.folder))
                agent.ended = agent.actor.work.remote(sent)
        if not self._waiting:
            return
        device = self._waiting[0].job.device
        starting = sum(not agent.alive for agent in self._agents)
        while len(self._agents) < self._limit(device) and starting < len(self._waiting):
            self._agents.append(self._new_agent(device))
            starting += 1

    def _new_agent(self, device: str) -> _Agent:
        name = f"agent-{secrets.token_hex(4)}"
        needs = {"num_cpus": 1} if self._without_gpu(device) else {"num_cpus": 1, "num_gpus": 1}
        # One thread for PyTorch, as in every other worker; no retries of Ray's own.
        environment = {"OMP_NUM_THREADS": "1", **self._environment}
        kind = self._ray.remote(Agent).options(
            **needs,
            name=name,
            namespace=self._session,
            lifetime="detached" if self.outlives else None,
            max_concurrency=8,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        actor = kind.remote(self._idle)
        return _Agent(actor, name, actor.ready.remote())

    def _hear(self) -> None:
        """Take the answers that are there, and the ends of agents."""
        now = time.monotonic()
        touch = now - self._touched > TOUCH
        for agent in list(self._agents):
            if agent.deadline and now > agent.deadline:
                self._drop(agent, "killed, since it did not save and end")
                self._ray.kill(agent.actor)
            elif not agent.alive:
                if self._answered(agent.ready) and self._answer(agent, agent.ready) is not None:
                    agent.alive = True
            elif agent.job and self._answered(agent.ended):
                answer = self._answer(agent, agent.ended)
                if answer is not None:
                    self._end(agent, *answer)
            elif touch and not agent.job:
                agent.ready, agent.alive = agent.actor.ready.remote(), False
        self._touched = now if touch else self._touched

    def _end(self, agent: _Agent, state: str, cause: str) -> None:
        """An agent has answered."""
        order = self._orders.get(agent.job)
        if state in ("unseen", "busy") and order is not None:
            order.carried = order.carried or state == "unseen"
            agent.job = ""
            self._waiting.insert(0, order)
            if state == "busy":  # with the job of another driver; it is that driver's
                self._agents.remove(agent)
            return
        if agent.carried:
            found = self._answer(agent, agent.actor.changes.remote(agent.job, agent.known))
            if found is None:  # it died with what it had
                return
            self._take(agent, found)
            agent.actor.forget.remote(agent.job)
        self._ended[agent.job] = cause
        self._orders.pop(agent.job, None)
        agent.job, agent.deadline, agent.carried = "", 0.0, False
        agent.known, agent.collecting = {}, None

    def _answered(self, answer: Any) -> bool:
        return bool(self._ray.wait([answer], timeout=0)[0])

    def _answer(self, agent: _Agent, answer: Any) -> Any:
        """An answer that is there; None: the agent has died, or could not be made."""
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return self._ray.get(answer, timeout=START)
        except GetTimeoutError:
            return None
        except (RayError, ImportError, AttributeError) as e:
            self._drop(agent, _line(e))
            return None

    def _drop(self, agent: _Agent, why: str) -> None:
        """Forget an agent that is dead; its job has ended."""
        self._agents.remove(agent)
        if agent.job:
            self._ended[agent.job] = why
            self._orders.pop(agent.job, None)
        elif not agent.alive and self._waiting:
            # It never began, and the next job in turn would not either: it ends for that reason.
            order = self._waiting.pop(0)
            self._ended[order.handle.job] = why
            self._orders.pop(order.handle.job, None)

    def _find(self, handle: Handle) -> None:
        """Look for the agent that has a job of a former driver."""
        session = handle.job.partition(":")[0]
        known = handle.job in self._orders or handle.job in self._ended
        if known or session == self._session or handle.job in self._unknown:
            return
        self._folders[handle.job] = Path(handle.log).parent
        if any(agent.job == handle.job for agent in self._agents):
            return
        if not re.fullmatch(r"headwise-[0-9a-f]{8}", session):
            self._unknown.add(handle.job)
            return
        names = self._ray.util.list_named_actors(all_namespaces=True)
        there = {agent.name for agent in self._agents}
        for about in names:
            if about["namespace"] == session and about["name"] not in there:
                with contextlib.suppress(Exception):
                    actor = self._ray.get_actor(about["name"], namespace=session)
                    job = self._ray.get(actor.ready.remote(), timeout=ANSWER)
                    agent = _Agent(actor, about["name"], None, alive=True)
                    self._agents.append(agent)
                    if job:
                        agent.job, agent.carried = job, True
                        agent.ended = actor.wait.remote(job)
        if not any(agent.job == handle.job for agent in self._agents):
            self._unknown.add(handle.job)

    # ---- files of agents that do not see the store

    def _collect(self) -> None:
        now = time.monotonic()
        for agent in list(self._agents):
            if not agent.job or not agent.carried:
                continue
            if agent.collecting is not None and self._answered(agent.collecting):
                answer, agent.collecting = agent.collecting, None
                found = self._answer(agent, answer)
                if found is not None:
                    self._take(agent, found)
            if agent.collecting is None and agent.job and now - agent.collected > COLLECT:
                agent.collected = now
                agent.collecting = agent.actor.changes.remote(agent.job, agent.known)

    def _take(self, agent: _Agent, found: dict[str, tuple[Mark, bytes]]) -> None:
        folder = self._folders.get(agent.job)
        if folder is not None:
            take_files(folder, {name: data for name, (_, data) in found.items()})
            agent.known |= {name: mark for name, (mark, _) in found.items()}

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """A cluster that does not answer any more, in one line."""
        from ray.exceptions import RayError

        try:
            yield
        except (RayError, ConnectionError) as e:
            raise RuntimeError(
                f"the Ray at {self.address} does not answer any more: {_line(e)}; run the same "
                "command to resume"
            ) from None


# ---- reaching Ray


def ray_module() -> Any:
    """Ray, quiet: no usage statistics, no messages of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own modules while they are imported
            import ray
    except ModuleNotFoundError:
        raise UsageError("--on ray needs Ray: pip install 'headwise[ray]'") from None
    return ray


def check_answers(host: str, port: int) -> None:
    """Refuse a host where nothing listens, before Ray waits for it."""
    try:
        socket.create_connection((host, port), ANSWER).close()
    except OSError as e:
        raise UsageError(
            f"no Ray answers at ray://{host}:{port} ({e.strerror or e}); on its head: ray start "
            f"--head --ray-client-server-port {port}"
        ) from None


def _keep_private() -> dict[str, str]:
    """A Ray that is started here takes orders from this process alone: it has a token that nobody
    else knows, unless the user has said how it is to be. Returns what was put into the
    environment."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    added = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= added
    _read_environment()
    return added


def _read_environment() -> None:
    """Have a Ray that is imported already look at the environment again."""
    if "ray" in sys.modules:
        inner: Any = importlib.import_module("ray._raylet")
        with contextlib.suppress(AttributeError):
            inner.Config.initialize("")
            inner.AuthenticationTokenLoader.instance().reset_cache()


def _pickled(job: Job) -> tuple[bytes, tuple[tuple[str, str, str], ...]]:
    """Runs of a user's own classes and the probe, as bytes, with the text of the user's files that
    they come from. Others are made from their specifications."""
    own = own_classes(job.runs)
    if not own and job.probe is None:
        return b"", ()
    from ray import cloudpickle

    names = {kind.__module__ for kind in own}
    if job.probe is not None:
        names.add(job.probe.__module__)
    modules = []
    for name in sorted(names):
        if name.startswith(USER_FILE):
            file = str(sys.modules[name].__file__)
            modules.append((name, file, Path(file).read_text(encoding="utf-8")))
    return cloudpickle.dumps((job.runs, job.probe)), tuple(modules)


def _line(error: BaseException) -> str:
    """What Ray says in a page, in a line: its last one that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return bounded(lines[-1] if lines else type(error).__name__)
