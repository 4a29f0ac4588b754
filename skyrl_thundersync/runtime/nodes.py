"""The machines of a run: where its processes are placed, what each keeps on its own disk, and how files get between them.

Every machine has one folder of the run: on the driver's it is the run folder, elsewhere a temporary one. A process writes and
reads in its own machine's. Files cross the network at three places: a publication goes from the rank that wrote it to the
machines with replicas, along a chain, so that each takes it in once and hands it on once; a checkpoint's shards come to the
driver's folder; a resumed one goes to the machines with ranks. Logs and heartbeats come to the run folder once a second.

A machine that does not answer for `thundersync.hang_timeout_s` counts as gone: its actors are ended for the driver, and its
own agent, not asked for as long, ends the processes of the run there. So no two halves of a run go on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.learner.zero import free_port
from skyrl_thundersync.process.durable import NotWrittenError, sha256
from skyrl_thundersync.process.heartbeat import INTERVAL_S, Watch, status
from skyrl_thundersync.process.limits import cheap_checks

CHUNK = 32 * 2**20
"""Bytes of a file that travel at a time."""
AHEAD = 2
"""Chunks on their way at a time."""
MOST_NEWS = 2**20
"""Bytes of one log that are brought in one look."""
PATIENCE_S = 60.0
"""How long a placement is waited for in a cluster that others use too."""


class Store:
    """One machine's folder of a run, and what there is to do with it. Off the driver's machine it is the actor `Agent`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str, offset: int, data: bytes, chain: Sequence[Any]) -> None:
        """Write `data` at `offset` of a file, and hand it on to the next of `chain`; returns when all have it."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
        if chain:
            ray.get(chain[0].take.remote(name, offset, data, chain[1:]))

    def send(self, folder: str, chain: Sequence[Any]) -> dict[str, str]:
        """Send all files under `folder` along `chain`; their sha256, by name."""
        digests, waiting = {}, []
        for path in sorted(path for path in (self._folder / folder).rglob("*") if path.is_file()):
            name = path.relative_to(self._folder).as_posix()
            with path.open("rb") as file:
                offset = 0
                while (data := file.read(CHUNK)) or offset == 0:
                    waiting.append(chain[0].take.remote(name, offset, data, list(chain[1:])))
                    offset += max(1, len(data))
                    if len(waiting) > AHEAD:
                        ray.get(waiting.pop(0))
            digests[name] = sha256(path)
        ray.get(waiting)
        return digests

    def require(self, digests: Mapping[str, str]) -> None:
        """Raises NotWrittenError when a file does not have the bytes that were sent."""
        for name, digest in digests.items():
            if sha256(self._folder / name) != digest:
                raise NotWrittenError(f"{name} on {socket.gethostname()} holds other bytes than were sent")

    def names(self, folder: str) -> dict[str, int]:
        """Files under `folder` and their sizes."""
        found = (path for path in (self._folder / folder).rglob("*") if path.is_file())
        return {path.relative_to(self._folder / folder).as_posix(): path.stat().st_size for path in found}

    def read(self, name: str, offset: int) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._folder / folder, ignore_errors=True)

    def port(self) -> int:
        return free_port()


class Agent(Store):
    """Of a machine other than the driver's: also says what is new in the logs there, and ends with the run."""

    def __init__(self, folder: str, deadline_s: float) -> None:
        super().__init__(folder)
        self._logs = self._folder / "logs"
        self._logs.mkdir(exist_ok=True)
        self._asked, self._deadline_s = time.monotonic(), deadline_s
        self._hangs = Watch(self._logs, deadline_s)
        self._hangs.__enter__()  # for as long as this process lives
        threading.Thread(target=self._watch, name="driver", daemon=True).start()

    def problems(self, models: Sequence[str]) -> list[str]:
        """Why the run cannot be on this machine."""
        found = [problem for check in cheap_checks() for problem in check.problems]
        found += [
            f"there is no model folder {path}. Put it on every machine under the same path."
            for path in models
            if path.startswith(("/", ".")) and not (Path(path) / "config.json").is_file()
        ]
        return [f"{socket.gethostname()}: {problem}" for problem in found]

    def now(self) -> float:
        """Seconds of the clock that spans of work are measured with."""
        return time.perf_counter()

    def news(self, seen: Mapping[str, int]) -> tuple[dict[str, bytes], dict[str, str], str | None]:
        """What logs hold beyond `seen` bytes, what every process says that it is at, and the hang that was ended, if any."""
        self._asked = time.monotonic()
        logs, said = {}, {}
        for path in self._logs.glob("*.log"):
            with path.open("rb") as file:
                file.seek(seen.get(path.name, 0))
                if data := file.read(MOST_NEWS):
                    logs[path.name] = data
        for path in self._logs.glob("*.alive"):
            with suppress(FileNotFoundError):  # of a hang that was ended
                said[path.name] = path.read_text(encoding="utf-8")
        return logs, said, self._hangs.error and str(self._hangs.error)

    def end(self) -> None:
        """End the run's processes on this machine and take its folder away."""
        for path in self._logs.glob("*.alive"):
            with suppress(ProcessLookupError):
                os.kill(status(path).pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while time.monotonic() - self._asked < self._deadline_s:
            time.sleep(INTERVAL_S)
        self.end()
        os._exit(1)


@dataclass(frozen=True)
class Node:
    """A machine of the run. agent: None on the driver's. offset_s: its clock less the driver's."""

    id: str
    name: str
    ip: str
    folder: Path
    agent: Any = None
    offset_s: float = 0.0

    def __str__(self) -> str:
        return f"machine {self.name} ({self.ip})"


@dataclass(frozen=True)
class Place:
    """Where one actor goes: its machine, and Ray's options for it."""

    node: Node
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.node.folder / "logs"


class Nodes:
    """The machines of a run, the driver's first.

    Args:
        run_dir: the run folder, on the driver's machine.
        joined: the cluster is others' too: places are reserved in it. Else all is on this machine.
        device: "cpu" or "cuda": what a place is counted in.
        deadline_s: how long a machine may be silent.

    Attributes:
        lost: what is said of a machine that is gone, or of a process there that hung; None as long as there is none.
    """

    def __init__(self, run_dir: Path, joined: bool, device: str, deadline_s: float) -> None:
        self._run_dir, self._joined, self._deadline_s = run_dir, joined, deadline_s
        self._unit = "GPU" if device == "cuda" else "CPU"
        self.here = Node(ray.get_runtime_context().get_node_id(), socket.gethostname(), _own_ip(), run_dir)
        self._nodes = {self.here.id: self.here}
        self._actors: dict[str, list[Any]] = {}
        self._groups: list[Any] = []
        self._stop, self.lost = threading.Event(), None
        self._threads: list[threading.Thread] = []

    def learners(self, count: int, nodes: int) -> list[Place]:
        """Places of `count` ranks, packed on `nodes` machines. Raises ConfigError where the cluster has no room."""
        if count % nodes:
            raise ConfigError(
                f"{count} learner ranks on trainer.placement.policy_num_nodes={nodes} machines: make it the same number on "
                "each"
            )
        each = count // nodes
        places = self._reserve("learner", [each] * nodes, "STRICT_SPREAD")
        return [place for place in places for _ in range(each)]

    def replicas(self, what: str, count: int, each: int) -> list[Place]:
        """Places of `count` replicas of `each` devices, each on one machine, spread. Raises ConfigError as `learners`."""
        return self._reserve(what, [each] * count, "SPREAD")

    def _reserve(self, what: str, sizes: list[int], strategy: str) -> list[Place]:
        if not self._joined:
            return [Place(self.here)] * len(sizes)
        wanted = (
            f"{what}: {len(sizes)} x {sizes[0]} {self._unit}{' on machines of their own' * (strategy[0:6] == 'STRICT')}"
        )
        group = placement_group([{self._unit: size} for size in sizes], strategy=strategy)
        self._groups.append(group)
        if not group.wait(PATIENCE_S if self._could(sizes, strategy) else 0.1):
            there = "; ".join(
                f"{node['NodeManagerHostname']} has {node['Resources'].get(self._unit, 0):g} {self._unit}"
                for node in ray.nodes()
                if node["Alive"]
            )
            free = ray.available_resources().get(self._unit, 0)
            raise ConfigError(
                f"the Ray cluster has no room for {wanted}: {there}; {free:g} {self._unit} are free in all. Add machines, "
                "lower ranks or replicas, or end what else runs there."
            )
        held = placement_group_table(group)["bundles_to_node_id"]
        return [
            Place(self._node(held[i]), {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, i)})
            for i in range(len(sizes))
        ]

    def _could(self, sizes: list[int], strategy: str) -> bool:
        """Whether the whole cluster, with nobody else in it, had the room."""
        room = [node["Resources"].get(self._unit, 0) for node in ray.nodes() if node["Alive"]]
        fits = sum(r >= sizes[0] for r in room) if strategy == "STRICT_SPREAD" else sum(r // sizes[0] for r in room)
        return fits >= len(sizes)

    def _node(self, node_id: str) -> Node:
        if node_id not in self._nodes:
            found = next(node for node in ray.nodes() if node["NodeID"] == node_id)
            folder = (
                Path(tempfile.gettempdir()) / "skyrl_thundersync" / f"{self._run_dir.name}-{os.getpid()}-{node_id[:8]}"
            )
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = (
                ray.remote(Agent)
                .options(num_cpus=0, max_concurrency=8, scheduling_strategy=strategy)
                .remote(str(folder), self._deadline_s)
            )
            offset_s = _offset(agent)
            node = Node(node_id, found["NodeManagerHostname"], found["NodeManagerAddress"], folder, agent, offset_s)
            self._nodes[node_id] = node
            thread = threading.Thread(target=self._look, args=(node,), name=f"news of {node.name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._nodes[node_id]

    def require_fit(self, models: Sequence[str]) -> None:
        """Raises ConfigError with what keeps the run from a machine: its limits, models that it has not."""
        asked = [node.agent.problems.remote(list(models)) for node in self._others]
        if found := [problem for problems in ray.get(asked) for problem in problems]:
            raise ConfigError("\n".join(found))

    @property
    def _others(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.agent is not None]

    def holds(self, node: Node, actor: Any) -> Any:
        """`actor` is on `node`, and is ended with it."""
        self._actors.setdefault(node.id, []).append(actor)
        return actor

    def meeting_point(self, places: Sequence[Place], device: str) -> tuple[str, int]:
        """Address and free port at which ranks in `places` meet: on the first one's machine."""
        first = places[0].node
        port = free_port() if first.agent is None else ray.get(first.agent.port.remote())
        alone = len({place.node.id for place in places}) == 1
        return ("127.0.0.1" if alone and device == "cpu" else first.ip), port

    async def spread(self, folder: str, source: Node, targets: Sequence[Node]) -> None:
        """Copy `folder`, relative to each machine's, from `source` to the others of `targets`, each once, along a chain.

        Raises NotWrittenError where bytes got lost, RayActorError where a machine did.
        """
        there = {node.id: node for node in targets if node.id != source.id}
        far = [node for node in there.values() if node.agent is not None]
        if source.agent is None:
            await asyncio.to_thread(self.send, self._run_dir, folder, far)
        elif far:
            await asyncio.to_thread(self.clear, folder, far)
            agents = [node.agent for node in far]
            digests = await source.agent.send.remote(folder, agents)
            await asyncio.gather(*(_await(agent.require.remote(digests)) for agent in agents))
        if self.here.id in there:
            await asyncio.to_thread(self.fetch, folder, source, self._run_dir / folder)

    def send(self, root: Path, folder: str, targets: Sequence[Node]) -> None:
        """Copy `folder` below `root` on the driver's machine to `targets`, as `spread` does."""
        if targets:
            self.clear(folder, targets)
            agents = [node.agent for node in targets]
            digests = Store(str(root)).send(folder, agents)
            ray.get([agent.require.remote(digests) for agent in agents])

    def clear(self, folder: str, nodes: Sequence[Node]) -> None:
        """Take `folder` away on machines."""
        ray.get([node.agent.remove.remote(folder) for node in nodes if node.agent is not None])
        if self.here in nodes:
            shutil.rmtree(self._run_dir / folder, ignore_errors=True)

    def fetch(self, folder: str, source: Node, target: Path) -> None:
        """Bring the files under `folder` of a machine to `target` on the driver's; they leave `folder`."""
        for name, size in ray.get(source.agent.names.remote(folder)).items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while file.tell() < size:
                    file.write(ray.get(source.agent.read.remote(f"{folder}/{name}", file.tell())))
        ray.get(source.agent.remove.remote(folder))

    def _look(self, node: Node) -> None:
        """Bring what is new on a machine, until the run ends or the machine is gone."""
        logs, seen, answered = self._run_dir / "logs", {}, time.monotonic()
        while not self._stop.wait(INTERVAL_S):
            try:
                new, said, hang = ray.get(node.agent.news.remote(seen), timeout=max(1.0, self._deadline_s / 4))
            except GetTimeoutError:
                if time.monotonic() - answered > self._deadline_s and not self._stop.is_set():
                    self._lose(node, f"did not answer for {self._deadline_s:g} s (thundersync.hang_timeout_s)")
                    return
                continue
            except RayActorError:
                if not self._stop.is_set():
                    self._lose(node, "is gone")
                return
            answered = time.monotonic()
            if hang:
                self.lost = f"on {node}: {hang}"
            for name, data in new.items():
                seen[name] = seen.get(name, 0) + len(data)
                with (logs / name).open("ab") as file:
                    file.write(data)
            for name, text in said.items():
                part = logs / f".{name}"
                part.write_text(text, encoding="utf-8")
                part.replace(logs / name)

    def _lose(self, node: Node, how: str) -> None:
        paths = (path for path in (self._run_dir / "logs").glob("*.alive") if status(path).host == node.name)
        held = ", ".join(f"{path.stem} (at: {status(path).doing})" for path in sorted(paths))
        self.lost = f"{node} {how}; it held {held or 'no process of the run yet'}"
        for actor in self._actors.get(node.id, ()):
            ray.kill(actor)  # whoever waits for it fails now

    def why_lost(self, patience_s: float = 10.0) -> str | None:
        """`lost`, after a process died that may have gone with its machine: that is known a moment later."""
        end = time.monotonic() + patience_s
        while self.lost is None and self._others and time.monotonic() < end:
            time.sleep(0.1)
        return self.lost

    def close(self) -> None:
        """End the run's processes on other machines and take their folders away. What they said last is brought before."""
        time.sleep(INTERVAL_S if self._others else 0)
        self._stop.set()
        for thread in self._threads:
            thread.join(max(1.0, self._deadline_s / 4) + INTERVAL_S)
        ends = [node.agent.end.remote() for node in self._others]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=10)
        for group in self._groups:
            ray.util.remove_placement_group(group)


def _offset(agent: Any) -> float:
    """A machine's clock less this one's, seconds: of five readings the one that took least."""
    best: tuple[float, float] | None = None
    for _ in range(5):
        before = time.perf_counter()
        there = ray.get(agent.now.remote())
        after = time.perf_counter()
        best = min(best or (after - before, 0.0), (after - before, there - (before + after) / 2))
    return best[1]


def _own_ip() -> str:
    return ray.util.get_node_ip_address()


async def _await(reference: Any) -> Any:
    return await reference
