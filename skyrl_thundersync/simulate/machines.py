"""Simulated machines: rollout replicas, teachers and learner ranks as service times, no tokens and no model.

A replica batches continuously: one decode step costs `a + b · running` seconds and gives every running request one token;
prefill stalls it. A teacher scores in arrival order. A learner rank pays what DESIGN.md §3 lists, by the rules of
learner/sweep.py: turns wait for each other until a block is worth a forward, close sweeps, graphs are kept within a budget,
and what finds no room there waits for its sweep.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_thundersync.simulate.virtual_time import Timers
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId, Work

BACKWARD = 2.0
"""A backward costs twice its forward (DESIGN.md §3)."""
WHOLE = math.inf


def described(default: Any, meaning: str) -> Any:
    """A dataclass field with its meaning, unit included, as `skyrl simulate --help` prints it."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Machine:
    """Processes and their speeds. Rates are tokens a second of one process; a process may span several devices."""

    ranks: int = described(4, "learner ranks")
    replicas: int = described(2, "rollout replicas")
    teachers: int = described(2, "teacher replicas; 0: no teacher, GRPO")
    slots: int | None = described(
        None, "trajectories a replica runs at once; the rest wait for a free slot, in waves. none: any number"
    )
    decode_rate: float = described(60.0, "tokens a second of a request that decodes alone")
    decode_peak: float = described(3000.0, "tokens a second of a replica that decodes very many")
    prefill_rate: float = described(
        20_000.0, "context tokens a second that a replica prefills; its decoding stands still meanwhile"
    )
    teacher_rate: float = described(10_000.0, "tokens a second that a teacher scores, in order")
    teacher_latency_s: float = described(0.05, "seconds that a request to the teacher takes beside that")
    learner_rate: float = described(
        1000.0, "tokens a second that a rank forwards and backwards once, at the start of a context"
    )
    past_tokens: float | None = described(
        None, "context length in tokens at which attention doubles the cost of a token; none: it costs nothing"
    )
    item_s: float = described(0.002, "seconds, fixed, of one work item on a rank")
    block_tokens: int = described(640, "tokens, as thundersync.learner.block_tokens")
    retain_tokens: int = described(0, "tokens of kept graph a rank, as thundersync.learner.retain_gib")
    sweep_at_close: bool = described(
        True, "sweep a trajectory at its close; false: with its group, as GRPO with the exact accumulator does"
    )
    statistics_s: float = described(0.0, "GRPO: seconds to combine a group's statistics at its close")
    suffix_s: float = described(10.0, "seconds of the suffix P: reduction, step and publication")

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "decode_rate", "decode_peak", "prefill_rate", "teacher_rate", "learner_rate"):
            _require(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in (
            "teachers",
            "teacher_latency_s",
            "item_s",
            "block_tokens",
            "retain_tokens",
            "statistics_s",
            "suffix_s",
        ):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("slots", "past_tokens"):
            value = getattr(self, name)
            _require(name, value, value is None or value > 0, "above 0, or none")
        _require("decode_peak", self.decode_peak, self.decode_peak >= self.decode_rate, "at least decode_rate")

    def under(self, schedule: str) -> Machine:
        """With the block size the schedule uses: those that run after the rollouts forward a trajectory whole."""
        return self if schedule == "thundersync" else replace(self, block_tokens=WHOLE)


def _require(name: str, value, holds: bool, what: str) -> None:
    if not holds or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"machine: {name}={value!r} must be {what}")


class SimulatedReplica:
    """Processor sharing: all running requests progress at the same rate, so they finish in order of progress + length.

    Args:
        done: called with the request's key when its last token is sampled.
    """

    def __init__(self, timers: Timers, machine: Machine, done: Callable[[int], None]) -> None:
        self._timers, self._done = timers, done
        self._per_request = 1 / machine.decode_peak
        self._step = 1 / machine.decode_rate - self._per_request
        self._prefill_s = 1 / machine.prefill_rate
        self._running: list[tuple[float, int, int]] = []  # progress at which it ends, arrival, key
        self._progress = self._stall = self._at = 0.0
        self._arrivals, self._timer = 0, math.inf

    def submit(self, key: int, tokens: int, prefill: int) -> None:
        """Sample `tokens` after prefilling `prefill` new context tokens."""
        self._advance()
        self._stall += prefill * self._prefill_s
        self._arrivals += 1
        heapq.heappush(self._running, (self._progress + tokens, self._arrivals, key))
        self._schedule()

    def _advance(self) -> None:
        now = self._timers.time()
        passed = now - self._at
        if self._stall:
            stalled = min(self._stall, passed)
            self._stall -= stalled
            passed -= stalled
        if self._running:
            self._progress += passed / (self._step + self._per_request * len(self._running))
        self._at = now

    def _schedule(self) -> None:
        """One timer, never later than the next end; arrivals mostly move that end back, so it is looked at when due."""
        token_s = self._step + self._per_request * len(self._running)
        due = self._at + self._stall + max(0.0, self._running[0][0] - self._progress) * token_s
        if due < self._timer:
            self._timer = due
            self._timers.call_at(due, self._fire, due)

    def _fire(self, due: float) -> None:
        if due != self._timer:
            return  # an earlier timer took its place
        self._timer = math.inf
        self._advance()
        ended = []
        while self._running and self._running[0][0] <= self._progress + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        if self._running:
            self._schedule()
        for key in ended:
            self._done(key)


class SimulatedTeacher:
    """Scores in arrival order."""

    def __init__(self, timers: Timers, machine: Machine) -> None:
        self._timers, self._token_s, self._latency_s = timers, 1 / machine.teacher_rate, machine.teacher_latency_s
        self._free = 0.0

    def score(self, tokens: int, done: Callable[..., None], *args) -> None:
        """Call `done(*args)` when `tokens` new tokens are scored."""
        self._free = max(self._free, self._timers.time()) + tokens * self._token_s
        self._timers.call_at(self._free + self._latency_s, done, *args)


@dataclass(eq=False, slots=True)
class _Path:
    """A trajectory's (or prompt's) tokens on a rank: pending ones, and those run, with their forwards' cost in seconds."""

    past: int = 0
    pending: int = 0
    run: int = 0
    run_s: float = 0.0
    kept: int = 0
    kept_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Group:
    prompt: _Path | None = None
    open: dict[int, _Path] = field(default_factory=dict)
    closed: list[_Path] = field(default_factory=list)


class SimulatedRank:
    """One learner rank's clock and memory.

    Attributes:
        state_tokens, state_tokens_peak: tokens whose cut states it holds, now and at most.
        groups_peak: groups that held state at once, at most; statistics_peak: statistics, where `group_objective`.
    """

    def __init__(self, machine: Machine, group_objective: bool = False) -> None:
        self._machine, self._group_objective = machine, group_objective
        self._block = max(1, machine.block_tokens)
        self._forward_s = 1 / machine.learner_rate / (1 + BACKWARD)
        self._past_s = 0.0 if machine.past_tokens is None else self._forward_s / machine.past_tokens
        self._groups: dict[str, _Group] = {}
        self._piece = max(self._block, machine.retain_tokens // 2)
        self._kept_tokens = 0
        self.state_tokens = self.state_tokens_peak = self.groups_peak = self.statistics_peak = 0
        self._statistics: set[str] = set()

    def run(self, works: list[Work]) -> list[float]:
        """Do work items in order; busy seconds of each."""
        # One item alone closes nothing that it also appends to.
        closing = {w.trajectory for w in works if isinstance(w, CloseTrajectory)} if len(works) > 1 else ()
        return [self._machine.item_s + self._run(work, closing) for work in works]

    def _run(self, work: Work, closing: Container[TrajectoryId]) -> float:
        if isinstance(work, Append):
            return self._append(work, work.source.trajectory in closing)
        if isinstance(work, CloseGroup):
            group = self._groups.pop(work.group, None) or _Group()
            seconds = sum(map(self._sweep, group.closed))
            if work.group in self._statistics:
                self._statistics.remove(work.group)
                seconds += self._machine.statistics_s
            return seconds + (self._sweep(group.prompt) if group.prompt else 0.0)
        group = self._group(work.trajectory.group)
        path = group.open.pop(work.trajectory.sample, None) or _Path()
        if not self._machine.sweep_at_close:
            group.closed.append(path)
            return 0.0
        if self._group_objective and work.group_rewards is None:
            self._statistics.add(work.trajectory.group)
            self.statistics_peak = max(self.statistics_peak, len(self._statistics))
        return self._sweep(path)

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group()
            self.groups_peak = max(self.groups_peak, len(self._groups))
        return group

    def _append(self, work: Append, closing: bool) -> float:
        source, seconds = work.source, 0.0
        group = self._group(source.trajectory.group)
        path = group.open.get(source.trajectory.sample)
        if path is None:
            if group.prompt is None:
                group.prompt = _Path(pending=len(source.context_ids))
                seconds += self._forward(group.prompt, group.prompt.pending)
            path = group.open[source.trajectory.sample] = _Path(past=group.prompt.run)
        else:
            path.pending += len(source.context_ids)
        path.pending += len(source.action_ids)
        if not closing and path.pending >= self._block:
            whole = not self._machine.block_tokens or self._kept_tokens + path.pending <= self._machine.retain_tokens
            seconds += self._forward(path, path.pending if whole else self._before_last_piece(path))
        return seconds

    def _before_last_piece(self, path: _Path) -> int:
        """Pending tokens that a close forwards for their state, before the piece that it sweeps at once."""
        count = max(1, path.pending // self._piece)
        return path.pending * (int(count) - 1) // int(count)

    def _cost(self, path: _Path, tokens: int) -> float:
        """Seconds of one forward over the first pending `tokens`: each token, and its attention over what is before it."""
        return tokens * (self._forward_s + self._past_s * (path.past + tokens / 2))

    def _forward(self, path: _Path, tokens: int) -> float:
        if not tokens:
            return 0.0
        seconds = self._cost(path, tokens)
        path.past += tokens
        path.run += tokens
        path.run_s += seconds
        path.pending -= tokens
        self._hold(tokens)
        if self._kept_tokens + tokens <= self._machine.retain_tokens:
            path.kept += tokens
            path.kept_s += seconds
            self._kept_tokens += tokens
        return seconds

    def _sweep(self, path: _Path) -> float:
        """Backward of everything; before it the forward of what is pending, and again of what was run but not kept."""
        seconds = self._forward(path, self._before_last_piece(path))
        last = self._cost(path, path.pending)
        self._hold(path.pending)
        self.state_tokens -= path.run + path.pending
        self._kept_tokens -= path.kept
        return seconds + (last + path.run_s) * BACKWARD + last + max(0.0, path.run_s - path.kept_s)

    def _hold(self, tokens: int) -> None:
        self.state_tokens += tokens
        self.state_tokens_peak = max(self.state_tokens_peak, self.state_tokens)
