"""Fixed-point sums: the same bits in any order, and an error before anything could wrap."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from skyrl_thundersync.learner.accumulate import Accumulator, contiguous_layout
from skyrl_thundersync.learner.fixed_point import (
    LARGEST,
    MOST_RANKS,
    SUM_LIMIT,
    from_fixed,
    root_of_squares,
    square_sum,
    to_fixed,
)


def accumulate(gradients, exact):
    p = torch.nn.Parameter(torch.zeros(100))
    accumulator = Accumulator(contiguous_layout([("p", p)]), exact)
    for g in gradients:
        (p * g).sum().backward()
        accumulator.check("g")
    return accumulator.gradient()["p"]


def test_order_does_not_change_a_bit():
    torch.manual_seed(0)
    gradients = [torch.randn(100) * 10.0 ** -(i % 4) for i in range(6)]
    orders = list(itertools.permutations(gradients))[::90]
    sums = [accumulate(order, exact=True) for order in orders]
    assert all(torch.equal(s, sums[0]) for s in sums)
    assert len({tuple(accumulate(order, exact=False).tolist()) for order in orders}) > 1  # what it is good for
    true = sum(g.double() for g in gradients)
    assert float((sums[0] - true).norm() / true.norm()) <= 1e-6


def test_round_trip_error_is_half_a_unit():
    x = torch.randn(1000, dtype=torch.float64)
    assert float((from_fixed(to_fixed(x)) - x).abs().max()) <= 2.0**-41


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, float("nan"), float("inf")])
def test_what_does_not_fit_is_refused(value):
    with pytest.raises(OverflowError, match="accumulator=fp32"):
        accumulate([torch.full((100,), value)], exact=True)


def test_a_sum_that_outgrows_its_range_is_refused():
    with pytest.raises(OverflowError, match="overflowed"):
        accumulate([torch.full((100,), LARGEST * 0.99)] * 5, exact=True)


@given(seed=st.integers(0, 10**6), scale=st.integers(-30, 8), n=st.integers(1, 200_000))
@hypothesis_settings(max_examples=30, deadline=None)
def test_the_norm_is_the_same_for_any_partition(seed, scale, n):
    rng = random.Random(seed)
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**scale
    largest = float(x.abs().max())
    cuts = sorted(rng.randrange(n + 1) for _ in range(rng.randrange(5)))
    parts = [x[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    total = sum(square_sum(part, largest) for part in parts)
    assert total == square_sum(x, largest)
    assert root_of_squares(total, largest) == pytest.approx(float(x.norm()), rel=1e-11)


def test_sums_of_the_most_ranks_cannot_wrap():
    assert SUM_LIMIT * MOST_RANKS <= 2**62
