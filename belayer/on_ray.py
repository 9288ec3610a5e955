"""Belayer's services on the nodes of a Ray cluster that exists already, as Slime's and verl's do, with one call.

On each node a Ray actor, the keeper, starts the services as processes (`belayer actors`, `belayer memory` and so on)
and starts one again when it has ended. A node that joins gets its services; one that leaves loses nothing, because
services share nothing but the journal. When the driver ends, Ray ends the keepers, and each service ends with its
keeper (it watches BELAYER_OWNER_PID). Keepers take no CPU and no GPU from Ray's accounts: they stand beside the
engines that do.

"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from belayer.errors import BelayerError
from belayer.processes import host_name

READY_S = 120.0
"""How long a service may take until it is ready: a shadow loads and captures graphs in that time."""
LOOK_S = 1.0
LONGEST_PAUSE_S = 30.0
STOP_S = 15.0


class PlacementError(BelayerError):
    """A service did not come up on a node of the Ray cluster; the others have been ended again."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(f"{'; '.join(problems)}; what it wrote is in the logs of Ray's worker on that node")
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Service:
    """A verb of the command `belayer` with its arguments, to keep running on each node, or once for each GPU.

    In the arguments `{host}` stands for the node's name and `{gpu}` for the number of the GPU on its node.
    """

    arguments: tuple[str, ...]
    each: Literal["node", "gpu"] = "node"
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)  # a password may be in it


class Running(NamedTuple):
    """One process of a service. `starts` counts how often its keeper has started it."""

    node: str
    host: str
    arguments: tuple[str, ...]
    pid: int
    starts: int


def place(services: Sequence[Service], *, ready_s: float = READY_S) -> Placement:
    """Start the services on all nodes of the cluster that `ray.init` has connected to, and keep them running.

    Returns once all are ready, within `ready_s` for each; PlacementError when one is not. Use it in a `with`.
    """
    placement = Placement(services, ready_s)
    placement.start()
    return placement


class Placement:
    """The services of a Ray cluster, kept running until `close`."""

    def __init__(self, services: Sequence[Service], ready_s: float) -> None:
        self._services = tuple(services)
        self._ready_s = ready_s
        self._keepers: dict[str, Any] = {}
        self._running: list[Running] = []
        self._most_commands = 0
        """On one node: a keeper starts and stops them one after another."""
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="belayer-on-ray", daemon=True)

    def start(self) -> None:
        try:
            problems = self._fill()
            if problems:
                raise PlacementError(problems)
            self._look()
        except BaseException:
            self.close()
            raise
        self._watch.start()

    def running(self) -> list[Running]:
        """The services' processes when they were last looked at, at most a few seconds ago."""
        return list(self._running)

    def close(self) -> None:
        """End the services and their keepers."""
        self._closed.set()
        if self._watch.is_alive():
            self._watch.join()
        self._ask("stop", self._keepers, STOP_S * (self._most_commands + 1))
        for keeper in self._keepers.values():
            ray.kill(keeper)
        self._keepers.clear()

    def _keep(self) -> None:
        while not self._closed.wait(LOOK_S):
            for problem in self._fill():
                sys.stderr.write(f"belayer: {problem}; tried again later\n")
            self._look()

    def _fill(self) -> list[str]:
        """Give each living node that has no keeper one, with its services. What did not come up."""
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for gone in self._keepers.keys() - nodes.keys():
            del self._keepers[gone]
        new: dict[str, Any] = {}
        for name in nodes.keys() - self._keepers.keys():
            commands = [c for service in self._services for c in _commands(service, nodes[name])]
            self._most_commands = max(self._most_commands, len(commands))
            here = NodeAffinitySchedulingStrategy(name, soft=False)
            new[name] = ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy=here).remote(commands)
        self._keepers |= new
        started = self._ask("start", new, self._ready_s * (self._most_commands + 1), self._ready_s)
        silent = [nodes[name]["NodeManagerHostname"] for name in new.keys() - self._keepers.keys()]
        return [
            *(problem for problems in started for problem in problems),
            *(f"the keeper on {host} has ended or does not answer" for host in silent),
        ]

    def _look(self) -> None:
        self._running = [
            r for seen in self._ask("look", self._keepers, self._ready_s * (self._most_commands + 1)) for r in seen
        ]

    def _ask(self, method: str, keepers: Mapping[str, Any], timeout_s: float, *arguments: object) -> list[Any]:
        """The keepers' answers. One that is dead or does not answer is forgotten, so that its node gets another."""
        asked = {name: getattr(keeper, method).remote(*arguments) for name, keeper in keepers.items()}
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        for name, answer in asked.items():
            try:
                answers.append(ray.get(answer, timeout=max(0.0, deadline - time.monotonic())))
            except RayError:
                ray.kill(self._keepers.pop(name))
        return answers

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Command(NamedTuple):
    arguments: tuple[str, ...]
    environment: dict[str, str]


def _commands(service: Service, node: Mapping[str, Any]) -> list[_Command]:
    """The processes of a service on this node, as `ray.nodes()` describes it."""
    gpus = range(int(node["Resources"].get("GPU", 0))) if service.each == "gpu" else ("",)
    host = node["NodeManagerHostname"]
    return [
        _Command(tuple(a.replace("{host}", host).replace("{gpu}", str(gpu)) for a in service.arguments),
                 dict(service.environment))
        for gpu in gpus
    ]  # fmt: skip


class _Keeper:
    """The Ray actor of a node."""

    def __init__(self, commands: Sequence[_Command]) -> None:
        self._processes = [_Process(command) for command in commands]
        self._ready_s = READY_S

    def start(self, ready_s: float) -> list[str]:
        """Start the processes; a sentence for each that did not come up."""
        self._ready_s = ready_s
        return [problem for process in self._processes if (problem := process.start(ready_s))]

    def look(self) -> list[Running]:
        """Start again what has ended; then say what there is."""
        node = ray.get_runtime_context().get_node_id()
        for process in self._processes:
            if problem := process.heal(self._ready_s):
                sys.stderr.write(f"belayer: {problem}\n")
        return [Running(node, host_name(), p.command.arguments, p.pid, p.starts) for p in self._processes]

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()


class _Process:
    """A service's process, which a keeper owns."""

    def __init__(self, command: _Command) -> None:
        self.command = command
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._not_before_s = 0.0

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self, ready_s: float) -> str | None:
        """Start it and return once it has written `ready`. What went wrong, else None."""
        self.starts += 1
        self._not_before_s = time.monotonic() + min(LONGEST_PAUSE_S, 0.25 * 2.0 ** min(self.starts, 10))
        process = subprocess.Popen(
            [sys.executable, "-m", "belayer.cli", *self.command.arguments],
            env={**os.environ, **self.command.environment, "BELAYER_OWNER_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = process
        said = threading.Event()
        first: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:  # to its end, or the pipe fills and the service stops in a write
                if not said.is_set():
                    first.append(line.strip())
                    said.set()
            said.set()

        threading.Thread(target=read, name=f"stdout of {process.pid}", daemon=True).start()
        in_time = said.wait(ready_s)
        if first == ["ready"]:
            return None
        self.stop()
        why = f"ended with status {process.returncode}" if in_time else f"not ready within {ready_s:.0f} s"
        return f"belayer {' '.join(self.command.arguments)} on {host_name()}: {why}"

    def heal(self, ready_s: float) -> str | None:
        """Start it again when it has ended, after a pause that doubles with each start."""
        if self._process is None or self._process.poll() is None or time.monotonic() < self._not_before_s:
            return None
        return self.start(ready_s)

    def stop(self) -> None:
        """Ask the process to end; kill it when it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
