"""The paper's text's release policy gives the same gradient, by about twice the work."""

import pytest
from plain import FAMILIES, batch, distance, make_rank, plain_gradient

from benchmarks.eager import EagerForest


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [0, 5])
def test_eager_gives_the_same_gradient(folder_of, family, block):
    works = batch(seed=3)
    plain, n = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family), block_tokens=block)
    rank.forest = EagerForest.of(rank.forest)
    early = sum(rank.run(work).n_scored for work in works[:1])
    assert block > 0 or early == works[0].source.n_scored
    assert early + sum(rank.run(work).n_scored for work in works[1:]) == n
    assert distance(rank.gradient(), plain) <= 1e-12


def test_eager_is_refused_where_a_source_is_not_complete_on_arrival(folder_of):
    with pytest.raises(ValueError, match="complete on arrival"):
        EagerForest.of(make_rank(folder_of("qwen3"), "grpo").forest)
