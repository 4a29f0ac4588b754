"""Faults that can be planted into a replay, to see that `verify` finds and names them.

Each one is what a defect of that kind would really do: nothing is told to the checks. A plant applies to one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from skyrl_thundersync.learner.rank import LearnerRank
from skyrl_thundersync.learner.states import Adjoint
from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId, Work
from skyrl_thundersync.telemetry.record import Batch
from skyrl_thundersync.verify.reference import silent

PLANTS = {
    "source-twice": "one source is released twice, the second time as a further turn, so that no guard refuses it",
    "dropped-adjoint": "one adjoint that a trajectory leaves on a cut state is lost",
    "wrong-n": "N_k is one too large when the batch is divided",
    "stale-version": "one source comes from a replica that still serves the version before",
}


@dataclass(frozen=True)
class Plant:
    """One fault of PLANTS, in one trajectory of one batch."""

    kind: str
    victim: TrajectoryId
    fired: list[str] = field(default_factory=list)

    def record(self, batch: Batch) -> Batch:
        """The batch as the learner will get it."""
        if self.kind == "source-twice":
            return _twice(batch, self.victim)
        if self.kind == "stale-version":
            return _stale(batch, self.victim)
        return batch

    @contextmanager
    def during(self, work: Work) -> Iterator[None]:
        """Around one work item's run on its rank."""
        mine = isinstance(work, CloseTrajectory) and work.trajectory == self.victim
        mine = mine or (isinstance(work, CloseGroup) and work.group == self.victim.group)
        if self.kind != "dropped-adjoint" or not mine:
            yield
            return
        deposit, dropped = Adjoint.deposit, []

        def losing(adjoint: Adjoint, layer: int, part: int, gradient) -> None:
            if part == 1 and not dropped:  # values: every softmax weight reaches them
                dropped.append(layer)
                self.fired.append(f"layer {layer}")
                return
            deposit(adjoint, layer, part, gradient)

        Adjoint.deposit = losing
        try:
            yield
        finally:
            Adjoint.deposit = deposit

    def finish(self, rank: LearnerRank) -> None:
        """After the batch's last work item on the last rank.

        Raises:
            ValueError: no adjoint was there to drop.
        """
        if self.kind == "dropped-adjoint" and not self.fired:
            raise ValueError(
                f"trajectory {self.victim} leaves no adjoint on any cut state: nothing to drop in this batch"
            )
        if self.kind == "wrong-n":
            rank.n_scored += 1


def plant(kind: str, batch: Batch, objective: Objective) -> Plant:
    """A plant of `kind` in the first trajectory of `batch` where it can matter.

    Raises:
        ValueError: an unknown kind, or a batch in which it would change nothing.
    """
    if kind not in PLANTS:
        raise ValueError(f"unknown fault {kind!r}; known are {', '.join(PLANTS)}")
    without = silent(batch, objective)
    scored: dict[TrajectoryId, int] = {}
    for work in batch.work:
        if isinstance(work, Append) and work.source.n_scored and work.source.trajectory not in without:
            scored[work.source.trajectory] = scored.get(work.source.trajectory, 0) + 1
    victims = [trajectory for trajectory, sources in scored.items() if sources > 1]
    if not victims:
        raise ValueError(
            f"batch {batch.version} has no trajectory with two scored sources and a gradient, to plant {kind} in"
        )
    return Plant(kind, victims[0])


def _twice(batch: Batch, victim: TrajectoryId) -> Batch:
    """The victim's last scored source again, right behind itself, as a turn that repeats the same context."""
    at = max(i for i, w in enumerate(batch.work) if _is_scored(w, victim))
    source = batch.work[at].source
    again = replace(
        source,
        turn=source.turn + 1,
        prefix=source.prefix if source.turn else len(source.context_ids),
        context_ids=source.context_ids if source.turn else (),
    )
    work, ranks, seconds = list(batch.work), list(batch.ranks), list(batch.seconds)
    work[at + 1 :] = [
        replace(w, source=replace(w.source, turn=w.source.turn + 1)) if _of(w, victim) else w for w in work[at + 1 :]
    ]
    work.insert(at + 1, replace(batch.work[at], source=again))
    ranks.insert(at + 1, ranks[at])
    seconds.insert(at + 1, seconds[at])
    return replace(batch, work=tuple(work), ranks=tuple(ranks), seconds=tuple(seconds))


def _stale(batch: Batch, victim: TrajectoryId) -> Batch:
    at = max(i for i, w in enumerate(batch.work) if _is_scored(w, victim))
    work = list(batch.work)
    work[at] = replace(work[at], source=replace(work[at].source, policy_version=batch.version - 1))
    return replace(batch, work=tuple(work))


def _of(work: Work, trajectory: TrajectoryId) -> bool:
    return isinstance(work, Append) and work.source.trajectory == trajectory


def _is_scored(work: Work, trajectory: TrajectoryId) -> bool:
    return _of(work, trajectory) and work.source.n_scored > 0
