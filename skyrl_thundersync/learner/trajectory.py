"""Open groups and trajectories on a rank: their tokens so far, and the segments made of them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_thundersync.learner.segments import Scored, Segment
from skyrl_thundersync.learner.statistics import GroupStatistics
from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.stream.sources import Append, Source, Support


@dataclass
class Tally:
    """What one work item added to the gradient; fields as in `WorkDone`."""

    n_scored: int = 0
    sum_kl: float = 0.0
    sum_logp_gap: float = 0.0
    max_logp_gap: float = 0.0
    gap_counts: Counter[int] = field(default_factory=Counter)
    prompt_seconds: float = 0.0

    @contextmanager
    def on_prompt(self) -> Iterator[None]:
        """What runs inside is work on the group's shared prompt."""
        start = time.perf_counter()
        yield
        self.prompt_seconds += time.perf_counter() - start


@dataclass
class Branch:
    """A finished or current line of segments: sweep from `tip` up to, not including, `stop` (or the group's prompt)."""

    tip: Segment | None
    stop: Segment | None


@dataclass
class Trajectory:
    """One open trajectory. `tokens`: its current path; the lists beside it have one entry per token.

    `leaf`: deepest segment made of it; inputs from `leaf.end` on are pending.
    """

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    sampler: list[float] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    support: list[tuple[np.ndarray, np.ndarray] | None] = field(default_factory=list)
    leaf: Segment | None = None
    finished: list[Branch] = field(default_factory=list)
    turns: int = 0
    n_scored: int = 0

    @property
    def run(self) -> int:
        """Inputs that already belong to a segment."""
        return self.leaf.end if self.leaf else 0

    def extend(self, ids, mask, score, sampler, name: str, support: Support | None = None) -> None:
        self.tokens += ids
        self.mask += mask
        self.score += score
        self.sampler += sampler
        self.source += [name] * len(ids)
        self.support += [None] * len(ids) if support is None else zip(support.ids_nk, support.logps_nk, strict=True)

    def last_scored(self) -> int:
        """How many inputs the last pending scored token needs."""
        return next((i for i in range(len(self.tokens) - 1, self.run, -1) if self.mask[i]), self.run)

    def scored(self, a: int, b: int, teacher: bool, device: torch.device) -> Scored | None:
        """The scored tokens whose predictors are inputs a … b - 1; None when there is none."""
        at = [i for i in range(a + 1, b + 1) if self.mask[i]]
        if not at:
            return None
        scores = torch.tensor([self.score[i] for i in at], dtype=torch.float64, device=device) if teacher else None
        support = None
        if self.support[at[0]] is not None:
            ids, logps = (torch.from_numpy(np.stack(rows)) for rows in zip(*(self.support[i] for i in at), strict=True))
            support = ids.to(device, torch.long), logps.to(device, torch.float64)
        return Scored(
            torch.tensor([i - 1 - a for i in at], device=device),
            torch.tensor([self.tokens[i] for i in at], device=device),
            scores,
            torch.tensor([self.sampler[i] for i in at], dtype=torch.float64, device=device),
            [self.source[i] for i in at],
            support,
        )

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, unscored: in the branch where they were scored they stay so."""
        for values in (self.tokens, self.score, self.sampler, self.source, self.support):
            del values[length:]
        self.mask = [0] * length


@dataclass
class Group:
    """One open group: its prompt's tokens and segments (root first), and its samples.

    rewards: of the closed samples, in order of closing. waiting: closed samples whose sweep waits for the group to close.
    statistics: of the samples that were swept before the group's rewards were known.
    """

    prompt: tuple[int, ...] | None = None
    nodes: list[Segment] = field(default_factory=list)
    open: dict[int, Trajectory] = field(default_factory=dict)
    rewards: dict[int, float | None] = field(default_factory=dict)
    waiting: dict[int, Trajectory] = field(default_factory=dict)
    statistics: GroupStatistics | None = None


def check_source(work: Append, rows: int, objective: Objective) -> None:
    """Raises ValueError or FloatingPointError naming the source, for ids beyond the student's `rows` or scores not fit."""
    source = work.source
    for ids in (source.context_ids, source.action_ids):
        if ids and not 0 <= min(ids) <= max(ids) < rows:
            bad = next(i for i in ids if not 0 <= i < rows)
            raise ValueError(
                f"source {source.name}: token id {bad} is outside the student's {rows} embedding rows; "
                f"rollouts must use the student's own tokenizer"
            )
    if objective.needs_teacher:
        if work.scores is None or len(work.scores) != len(source.action_ids):
            got = "none" if work.scores is None else len(work.scores)
            raise ValueError(f"source {source.name}: {len(source.action_ids)} teacher scores wanted, got {got}")
        _finite(source, work.scores, "teacher score")
    if objective.support_size and source.action_ids:
        _check_support(source, work.support, rows, objective.support_size)
    _finite(source, source.sampler_logps, "sampler log-prob")


def _check_support(source: Source, support: Support | None, rows: int, size: int) -> None:
    n, got = len(source.action_ids), None if support is None else support.ids_nk.shape
    if got is None or got != support.logps_nk.shape or got[0] != n or not 1 <= got[1] <= size:
        raise ValueError(f"source {source.name}: a support of [{n}, {size}] tokens wanted, got {got and list(got)}")
    on = np.array(source.mask, dtype=bool)
    ids, logps = support.ids_nk[on], support.logps_nk[on]
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        raise ValueError(
            f"source {source.name}: its support has token {ids.max() if ids.max() >= rows else ids.min()}, outside the "
            f"student's {rows} embedding rows; the teacher must use the student's own tokenizer"
        )
    if not np.isfinite(logps).all():
        raise FloatingPointError(f"source {source.name}: a log-prob of its support is {logps[~np.isfinite(logps)][0]}")


def _finite(source: Source, values, what: str) -> None:
    for index, (value, scored) in enumerate(zip(values, source.mask, strict=True)):
        if scored and not math.isfinite(value):
            raise FloatingPointError(f"source {source.name}: {what} of action token {index} is {value}")
