"""The advantage laws by the book, for what checks objectives: sums over a finished group, no statistics, no affine form."""

from __future__ import annotations

from collections.abc import Sequence


def textbook_advantages(law: str | None, epsilon: float, rewards: Sequence[float | None]) -> list[float]:
    """A_i of each sample of a group; 0 without a reward, without variance, or without a law."""
    known = [r for r in rewards if r is not None]
    if law is None or len(known) < 2 or max(known) == min(known):
        return [0.0] * len(rewards)
    m, first = len(known), known[0]
    moved = [r - first for r in known]  # no law depends on where 0 is
    mean = sum(moved) / m
    squares = sum((r - mean) ** 2 for r in moved)

    def advantage(reward: float) -> float:
        r = reward - first
        if law == "rloo":
            return r - (sum(moved) - r) / (m - 1)
        if law == "dr_grpo":
            return r - mean
        return (r - mean) / ((squares / (m - (law == "sample"))) ** 0.5 + epsilon)

    return [0.0 if r is None else advantage(r) for r in rewards]
