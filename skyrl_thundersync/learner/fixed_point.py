"""Fixed-point sums: round(x · 2^40) in int64. Integer addition is associative, so order and placement cannot matter.

One unit is 2^-40, about 9.1e-13. A single value must stay below 2^14 and a rank's sum below 2^16; up to 64 such sums add
up across ranks without wrapping.
"""

from __future__ import annotations

import math

import torch

BITS = 40
LARGEST = 2.0**14
SUM_LIMIT = 2 ** (BITS + 16)
MOST_RANKS = 64

SQUARE_BITS = 46
SQUARES_AT_ONCE = 2 ** (62 - SQUARE_BITS)


def to_fixed(x: torch.Tensor) -> torch.Tensor:
    """int64 of the same shape. Raises OverflowError for |x| ≥ 2^14 or a non-finite x."""
    if x.numel() and not bool((x.abs() < LARGEST).all()):
        raise OverflowError(
            f"a gradient of magnitude {float(x.abs().max()):.3g} does not fit the exact accumulator (limit {LARGEST:.3g}); "
            f"use thundersync.learner.accumulator=fp32"
        )
    return (x.double() * 2.0**BITS).round().to(torch.int64)


def check_sum(total: torch.Tensor) -> None:
    """Raises OverflowError when a running sum has left its range, long before it could wrap."""
    if total.numel() and bool((total.abs() >= SUM_LIMIT).any()):
        raise OverflowError("the exact accumulator overflowed; use thundersync.learner.accumulator=fp32")


def from_fixed(total: torch.Tensor) -> torch.Tensor:
    """float64 of the same shape."""
    return total.double() * 2.0**-BITS


def square_sum(x: torch.Tensor, largest: float) -> int:
    """Σ round((x/largest)² · 2^46) as an unbounded integer: of any partition of `x`, the parts add up to the same.

    x: one-dimensional, |x| ≤ largest. What it loses is below 2^-47 of the largest square per element.
    """
    whole = x.numel() - x.numel() % SQUARES_AT_ONCE
    fixed = ((x.double() / largest).square() * 2.0**SQUARE_BITS).round().to(torch.int64)
    return sum(fixed[:whole].view(-1, SQUARES_AT_ONCE).sum(1).tolist()) + int(fixed[whole:].sum())


def root_of_squares(total: int, largest: float) -> float:
    """√Σ x² from the sum of all parts' `square_sum`s."""
    return largest * math.sqrt(total / 2**SQUARE_BITS)
