"""What is wrong with an update, from what can be seen of it: the released work, the counts and the gradient.

Nothing here knows of a planted fault. A record is checked against the rules of release (DESIGN: every source once, one
version). A gradient that is not the textbook's is told apart by linear algebra: a source that counts twice adds its own
textbook gradient once more; a wrong N_k leaves the unnormalised sum right; a lost adjoint changes only parameters on which
the cut states depend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId, group_of
from skyrl_thundersync.telemetry.record import Batch
from skyrl_thundersync.verify.reference import (
    Gradient,
    difference,
    dot,
    feeds_cut_states,
    sequences,
    source_gradients,
)
from skyrl_thundersync.verify.rerun import Replayed

UNEXPLAINED = 1e-2
"""Share of a gradient's error that an explanation may leave unexplained."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be. `kind`: source-twice, source-missing, stale-version, wrong-n, dropped-adjoint,
    open, placement or unknown; `version`: of the batch."""

    kind: str
    version: int
    detail: str

    def __str__(self) -> str:
        return f"batch {self.version}: {self.kind}: {self.detail}"


def check_release(batch: Batch) -> list[Finding]:
    """The rules of release over the work of one batch: every turn once and in order, one version, all closed, one rank."""
    found: list[Finding] = []
    turns: dict[TrajectoryId, int] = {TrajectoryId(g, i): 0 for g, n in batch.groups.items() for i in range(n)}
    closed: set[TrajectoryId] = set()
    swept: set[str] = set()
    home: dict[str, int] = {}

    def say(kind: str, detail: str) -> None:
        found.append(Finding(kind, batch.version, detail))

    for work, rank in zip(batch.work, batch.ranks, strict=True):
        if home.setdefault(group_of(work), rank) != rank:
            say("placement", f"group {group_of(work)} is on ranks {home[group_of(work)]} and {rank}")
        if isinstance(work, Append):
            source = work.source
            expected = turns.get(source.trajectory)
            if expected is None:
                say("unknown", f"source {source.name} is of no trajectory of this batch")
                continue
            if source.turn < expected:
                say("source-twice", f"source {source.name} was released again")
            elif source.turn > expected:
                say("source-missing", f"turn {expected} of trajectory {source.trajectory} was never released")
            turns[source.trajectory] = max(expected, source.turn + 1)
            if source.policy_version != batch.version:
                say("stale-version", f"source {source.name} was sampled by version {source.policy_version}")
            if source.trajectory in closed:
                say("open", f"source {source.name} was released after its trajectory had closed")
        elif isinstance(work, CloseTrajectory):
            if work.trajectory in closed:
                say("source-twice", f"trajectory {work.trajectory} closed twice")
            closed.add(work.trajectory)
        elif isinstance(work, CloseGroup):
            if work.group in swept:
                say("source-twice", f"group {work.group} closed twice")
            swept.add(work.group)
    for trajectory in turns.keys() - closed:
        say("open", f"trajectory {trajectory} never closed")
    for group in batch.groups.keys() - swept:
        say("open", f"group {group} was never swept")
    return found


def diagnose(
    model: torch.nn.Module, batch: Batch, objective: Objective, book: Gradient, n_scored: int, ours: Replayed
) -> Finding:
    """Which fault explains a gradient or count that is not the textbook's; kind "unknown" when none does.

    Args:
        model: the textbook's, at the weights of the replay. Use FP64: an explanation leaves less than UNEXPLAINED.
        book, n_scored: the textbook's unnormalised gradient and N_k.
    """
    d = difference(ours.gradient, book)
    size = dot(d, d)
    right = size <= 1e-20 * dot(book, book) * (1 if next(model.parameters()).dtype == torch.float64 else 1e10)
    if right and ours.n_scored != n_scored:
        return Finding(
            "wrong-n", batch.version, f"the sum is right, but it is divided by {ours.n_scored} and N_k is {n_scored}"
        )
    if found := _counted_wrongly(model, batch, objective, d, size):
        return found
    if found := _lost_adjoint(model, batch, d):
        return found
    worst = max(d, key=lambda name: float(d[name].norm()))
    return Finding("unknown", batch.version, f"the gradient differs, most of all in {worst}")


def _counted_wrongly(model, batch: Batch, objective: Objective, d: Gradient, size: float) -> Finding | None:
    """d = c·g_j for a source j or, under GRPO, where its trajectory's |M_i| changes too, d = c·g_j + e·g_i."""
    best: tuple[float, str, float] = (UNEXPLAINED**2, "", 0.0)
    for trajectory, whole, parts in source_gradients(model, batch, objective):
        whole = {name: g.cpu().double() for name, g in whole.items()}
        for turn, part in parts.items():
            part = {name: g.cpu().double() for name, g in part.items()}
            basis = [part] if objective.divides_by_tokens or len(parts) == 1 else [part, whole]
            gram = torch.tensor([[dot(a, b) for b in basis] for a in basis], dtype=torch.float64)
            along = torch.tensor([dot(a, d) for a in basis], dtype=torch.float64)
            if float(gram.diagonal().min()) == 0.0:
                continue
            c = torch.linalg.lstsq(gram, along[:, None]).solution[:, 0]
            left = max(0.0, 1.0 - float(c @ along) / size) if size else 1.0
            if left < best[0]:
                best = (left, f"source {trajectory}/turn{turn}", float(c[0]))
    left, name, share = best
    if not name:
        return None
    kind = "source-twice" if share > 0 else "source-missing"
    count = f"counts {1 + share:.2f} times" if objective.divides_by_tokens else "counts with a wrong number of tokens"
    return Finding(kind, batch.version, f"{name} {count}; that explains all but {left**0.5:.0e} of the error")


def _lost_adjoint(model, batch: Batch, d: Gradient) -> Finding | None:
    """Whether the error lies in parameters that cut states depend on, and in nothing else."""
    through = feeds_cut_states(model, max((s.ids for s in sequences(batch)), key=len)[:64])
    inside = sum(float(d[name].square().sum()) for name in through)
    outside = sum(float(g.square().sum()) for name, g in d.items() if name not in through)
    if not inside or outside > 1e-12 * inside * len(d):
        return None
    worst = max(through, key=lambda name: float(d[name].norm()))
    return Finding(
        "dropped-adjoint",
        batch.version,
        f"only parameters below a cut state are wrong, most of all {worst}; the {len(d) - len(through)} others agree",
    )
