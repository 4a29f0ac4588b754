"""pass@k by both of the paper's formulas, in exact rational arithmetic.

First-k: 100/M Σ_i 1[Σ_{j≤k} y_ij > 0], over the first k attempts in order. Unbiased: 100/M Σ_i (1 - C(n-c_i, k)/C(n, k)), the
mean of first-k over all choices of k of the n attempts; c_i of them solved task i. No floating point before the end, so
neither the order of tasks nor their number changes a digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb

Outcomes = Sequence[Sequence[bool]]
"""Per task, whether each attempt solved it, in order of the attempts."""


def first_k(outcomes: Outcomes, k: int) -> Fraction:
    """pass@k of the first k attempts, in percent. Raises ValueError where a task has fewer, or there is no task."""
    _check(outcomes, k)
    return Fraction(100 * sum(any(task[:k]) for task in outcomes), len(outcomes))


def unbiased(outcomes: Outcomes, k: int) -> Fraction:
    """Unbiased pass@k over all attempts, in percent. Raises ValueError where a task has fewer, or there is no task."""
    _check(outcomes, k)
    failed = sum(
        (Fraction(comb(len(task) - sum(map(bool, task)), k), comb(len(task), k)) for task in outcomes), Fraction(0)
    )
    return 100 * (1 - failed / len(outcomes))


def _check(outcomes: Outcomes, k: int) -> None:
    if k < 1:
        raise ValueError(f"pass@{k}: k must be at least 1")
    if not outcomes:
        raise ValueError(f"pass@{k} of no task")
    if (fewest := min(len(task) for task in outcomes)) < k:
        raise ValueError(f"pass@{k} needs {k} attempts at every task; one has {fewest}")
