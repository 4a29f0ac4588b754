"""What a simulated update samples: drawn from a few figures, or as a recorded batch happened.

Drawn: a trajectory's turns follow U^skew, the law of theory.py, so that heterogeneity means the same in both; tokens and tool
times are log-normal. Recorded: a batch kept with thundersync.record=true, its sources ready when they were.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from skyrl_thundersync.simulate.machines import Machine, SimulatedReplica, described
from skyrl_thundersync.simulate.virtual_time import Timers
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId
from skyrl_thundersync.telemetry.record import Batch


class Sink(Protocol):
    """Where rollouts report: `trainer.Update`, or what stands for it without asyncio."""

    def on_turn(self, source: Source) -> None: ...

    def on_last_turn(self, trajectory: TrajectoryId) -> None: ...

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None: ...


@dataclass(frozen=True)
class Workload:
    """A batch to draw. Each field says what it means, its unit included (`described`)."""

    groups: int = described(32, "prompts of an update")
    samples: int = described(4, "trajectories of each prompt")
    turns: float = described(20.0, "mean turns of a trajectory, at least 1")
    skew: float = described(
        1.0, "turns follow turns·(skew+1)·U^skew, rounded up; 0: all alike, 1: uniform, more: a few long ones"
    )
    alike: float = described(0.0, "how much a group's trajectories share their length: 0 nothing, 1 all of it")
    prompt_tokens: int = described(1500, "tokens of a prompt")
    turn_tokens: int = described(300, "mean tokens of a sampled turn")
    observation_tokens: int = described(300, "mean tokens of a tool's answer")
    token_spread: float = described(0.6, "coefficient of variation of these two")
    tool_s: float = described(2.0, "mean seconds of a tool call (after the last turn: of the check)")
    tool_spread: float = described(1.0, "coefficient of variation of tool_s")

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("samples", 1), ("turns", 1), ("prompt_tokens", 1), ("turn_tokens", 1)):
            self._require(name, least)
        for name in ("skew", "observation_tokens", "token_spread", "tool_s", "tool_spread"):
            self._require(name, 0)
        self._require("alike", 0, 1)

    def _require(self, name: str, least: float, most: float = math.inf) -> None:
        value = getattr(self, name)
        if not least <= value <= most or value == math.inf:
            raise ValueError(
                f"workload: {name}={value!r} must be at least {least}" + (f", at most {most}" * (most == 1))
            )

    def rollouts(self, machine: Machine, seed: int) -> Rollouts:
        """The batch of `seed`, on `machine`'s replicas: the same trajectories whatever the machine."""
        return Rollouts(self, machine, seed)


class Rollouts:
    """Trajectories that sample, wait for their tool, and sample again; each stays with one replica."""

    version = 0

    def __init__(self, workload: Workload, machine: Machine, seed: int) -> None:
        self.groups = {f"g{index}": workload.samples for index in range(workload.groups)}
        self._ids = [TrajectoryId(group, i) for group, n in self.groups.items() for i in range(n)]
        self._machine, self._prompt_tokens = machine, workload.prompt_tokens
        rng = np.random.default_rng(seed)
        n = len(self._ids)
        shared = np.repeat(rng.standard_normal(workload.groups), workload.samples)
        normal = math.sqrt(workload.alike) * shared + math.sqrt(1 - workload.alike) * rng.standard_normal(n)
        u = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in normal])
        turns = np.maximum(1, np.ceil(workload.turns * (workload.skew + 1) * u**workload.skew - 1e-9)).astype(int)
        total = int(turns.sum())
        sampled = _log_normal(rng, workload.turn_tokens, workload.token_spread, total)
        self._first = np.concatenate([[0], np.cumsum(turns)]).tolist()
        self._sampled = array("q", np.maximum(1, np.rint(sampled)).astype(np.int64).tobytes())
        observed = _log_normal(rng, workload.observation_tokens, workload.token_spread, total)
        self._observed = array("q", np.rint(observed).astype(np.int64).tobytes())
        self._tool_s = array("d", _log_normal(rng, workload.tool_s, workload.tool_spread, total).tobytes())
        self._next = list(self._first[:-1])

    @property
    def sources(self) -> int:
        return len(self._sampled)

    def begin(self, timers: Timers, sink: Sink, ended: Callable[[], None]) -> None:
        """Start; `ended` is called when the last trajectory has closed."""
        self._timers, self._sink, self._ended = timers, sink, ended
        self._replicas = [
            SimulatedReplica(timers, self._machine, self._turn_sampled) for _ in range(self._machine.replicas)
        ]
        self._replica_of = [-1] * len(self._ids)
        self._prompted: set[tuple[int, str]] = set()
        self._waiting, self._open = deque(range(len(self._ids))), len(self._ids)
        replicas = self._machine.replicas
        for place in range(min(len(self._ids), replicas * (self._machine.slots or len(self._ids)))):
            self._start(place % replicas)

    def _start(self, replica: int) -> None:
        if not self._waiting:
            return
        index = self._waiting.popleft()
        self._replica_of[index] = replica
        prompt = (replica, self._ids[index].group)
        prefill = (
            0 if prompt in self._prompted else self._prompt_tokens
        )  # its other samples find it in the prefix cache
        self._prompted.add(prompt)
        self._replicas[replica].submit(index, self._sampled[self._next[index]], prefill)

    def _turn_sampled(self, index: int) -> None:
        at = self._next[index]
        turn, n = at - self._first[index], self._sampled[at]
        context = self._observed[at - 1] if turn else self._prompt_tokens
        prefix = 1 if turn else 0
        self._sink.on_turn(
            Source(self._ids[index], turn, prefix, zeros(context), zeros(n), ones(n), float_zeros(n), "stop", 0)
        )
        self._next[index] += 1
        if self._next[index] == self._first[index + 1]:
            self._sink.on_last_turn(self._ids[index])
        self._timers.call_at(self._timers.time() + self._tool_s[at], self._tool_done, index)

    def _tool_done(self, index: int) -> None:
        at, replica = self._next[index], self._replica_of[index]
        if at < self._first[index + 1]:
            self._replicas[replica].submit(index, self._sampled[at], self._observed[at - 1])
            return
        self._sink.on_trajectory_closed(self._ids[index], 1.0, None)
        self._open -= 1
        self._start(replica)
        if not self._open:
            self._ended()


class RecordedRollouts:
    """A recorded batch: every source is ready, and every trajectory closed, at the second at which it was released.

    Args:
        batch: recorded under the schedule thundersync; under the others the seconds are those of the barrier.
        rollout_s: R_k of that update; default: when its last trajectory was released.
        pace: seconds are multiplied by this; for example replicas then over replicas now, where decoding is the limit.
    """

    def __init__(self, batch: Batch, rollout_s: float | None = None, pace: float = 1.0) -> None:
        self.groups, self.version = batch.groups, batch.version
        work = zip(batch.seconds, batch.work, strict=True)
        self._events = [(second * pace, item) for second, item in work if not isinstance(item, CloseGroup)]
        last = self._events[-1][0]
        self._end = last if rollout_s is None else max(last, rollout_s * pace)

    @property
    def sources(self) -> int:
        return sum(isinstance(work, Append) for _, work in self._events)

    def begin(self, timers: Timers, sink: Sink, ended: Callable[[], None]) -> None:
        """Start; `ended` is called at the end of the rollouts."""
        self._timers, self._sink, self._ended, self._at = timers, sink, ended, 0
        timers.call_at(self._events[0][0], self._report)

    def _report(self) -> None:
        now = self._timers.time()
        while self._at < len(self._events) and self._events[self._at][0] <= now:
            work = self._events[self._at][1]
            if isinstance(work, CloseTrajectory):
                self._sink.on_trajectory_closed(work.trajectory, work.reward, None)
            else:
                self._sink.on_turn(work.source)
            self._at += 1
        if self._at < len(self._events):
            self._timers.call_at(self._events[self._at][0], self._report)
        elif self._end > now:
            self._timers.call_at(self._end, self._ended)
        else:
            self._ended()


@lru_cache(maxsize=8192)
def zeros(n: int) -> tuple[int, ...]:
    return (0,) * n


@lru_cache(maxsize=8192)
def ones(n: int) -> tuple[int, ...]:
    return (1,) * n


@lru_cache(maxsize=8192)
def float_zeros(n: int) -> tuple[float, ...]:
    return (0.0,) * n


def _log_normal(rng: np.random.Generator, mean: float, cv: float, n: int) -> np.ndarray:
    """`n` draws of the given mean and coefficient of variation."""
    sigma2 = math.log1p(cv**2)
    return mean * np.exp(math.sqrt(sigma2) * rng.standard_normal(n) - sigma2 / 2)
