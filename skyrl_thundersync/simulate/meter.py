"""What a simulated update is asked for, and what it took: the policy, the ranks' books, and the figures made of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from skyrl_thundersync.simulate.machines import Machine, SimulatedRank
from skyrl_thundersync.simulate.virtual_time import Timers
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Append, Work


@dataclass(frozen=True)
class Figures:
    """One simulated update; seconds unless named otherwise. R, L, P, ρ, κ, λ as in theory.py, L a rank's mean.

    Attributes:
        busy_share: share of T_k that the ranks worked.
        early_share: share of their work done before the last rollout ended.
        deferred_share: share of their work that waited for a trajectory's or a group's close, δ of theory.py.
        queue_wait_*: from a work item's release to its start.
        state_tokens_peak: tokens whose cut states a rank held, at most; groups_peak: groups that held state on a rank;
            statistics_peak: groups that held GRPO's statistics on a rank (0 for OPD).
    """

    rollout_s: float
    tail_s: float
    suffix_s: float
    step_s: float
    busy_share: float
    early_share: float
    deferred_share: float
    rho: float
    kappa: float
    tail: float
    queue_wait_mean_s: float
    queue_wait_p50_s: float
    queue_wait_p99_s: float
    queue_wait_max_s: float
    state_tokens_peak: int
    groups_peak: int
    statistics_peak: int
    sources: int
    work_items: int


@dataclass(frozen=True)
class SimulatedUpdate:
    """A simulated update: its figures, and by work item in order of completion the rank, release, start and service."""

    figures: Figures
    rank: np.ndarray
    released_s: np.ndarray
    started_s: np.ndarray
    service_s: np.ndarray


class Meter:
    """Simulated ranks with their books: when each work item was released, when it started and how long it took."""

    def __init__(self, timers: Timers, machine: Machine, policy: WorkPolicy) -> None:
        self._timers = timers
        self.learners = [SimulatedRank(machine, policy.statistics_cap is not None) for _ in range(machine.ranks)]
        self._released_at: dict[int, float] = {}
        self._deferred_s = 0.0
        self.rank, self.released, self.started, self.service = array("l"), array("d"), array("d"), array("d")

    def released_to(self, rank: int, work: Work) -> None:
        self._released_at[id(work)] = self._timers.time()

    def run(self, rank: int, works: list[Work]) -> list[float]:
        """Start `works` now; busy seconds of each."""
        at, seconds = self._timers.time(), self.learners[rank].run(works)
        for work, service in zip(works, seconds, strict=True):
            self.rank.append(rank)
            self.released.append(self._released_at.pop(id(work)))
            self.started.append(at)
            self.service.append(service)
            if not isinstance(work, Append):
                self._deferred_s += service
            at += service
        return seconds

    def close(self, rollout_s: float, tail_s: float, suffix_s: float, sources: int) -> SimulatedUpdate:
        rank, released = np.array(self.rank), np.array(self.released)
        started, service = np.array(self.started), np.array(self.service)
        wait, step = started - released, rollout_s + tail_s + suffix_s
        early = np.clip(rollout_s - started, 0.0, service).sum()
        busy, ranks = float(service.sum()), len(self.learners)
        figures = Figures(
            rollout_s=rollout_s,
            tail_s=tail_s,
            suffix_s=suffix_s,
            step_s=step,
            busy_share=busy / (step * ranks),
            early_share=float(early) / busy,
            deferred_share=self._deferred_s / busy,
            rho=busy / ranks / rollout_s,
            kappa=suffix_s / rollout_s,
            tail=tail_s / rollout_s,
            queue_wait_mean_s=float(wait.mean()),
            queue_wait_p50_s=float(np.percentile(wait, 50)),
            queue_wait_p99_s=float(np.percentile(wait, 99)),
            queue_wait_max_s=float(wait.max()),
            state_tokens_peak=max(learner.state_tokens_peak for learner in self.learners),
            groups_peak=max(learner.groups_peak for learner in self.learners),
            statistics_peak=max(learner.statistics_peak for learner in self.learners),
            sources=sources,
            work_items=len(service),
        )
        return SimulatedUpdate(figures, rank, released, started, service)
