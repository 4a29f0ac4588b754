"""Large graphs and large logits: run again or in parts, which changes the memory and not the gradient."""

import pytest
import torch
from plain import FAMILIES, VOCAB, batch, distance, make_rank, plain_gradient
from sizes import Sizes

from skyrl_thundersync.learner import segments

NEVER_FITS = 1e-9  # GiB


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block", "retain"), [(0, 0.0), (6, 1.0)])
def test_layers_that_run_again_give_the_same_gradient(folder_of, family, block, retain):
    works = batch(seed=3)
    plain, n = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family), block_tokens=block, retain_gib=retain, graph_gib=NEVER_FITS)
    done = [rank.run(work) for work in works]
    assert sum(d.n_scored for d in done) == n
    assert distance(rank.gradient(), plain) <= 1e-12


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "glm4_moe_lite"])
def test_what_runs_again_is_kept_as_inputs_alone(folder_of, family):
    """And the prediction of what is kept, which the retain budget goes by, is right within a third."""
    kept = {}
    for limit in (None, NEVER_FITS):
        rank = make_rank(folder_of(family, num_hidden_layers=8, mlp_layer_types=None), dtype="float32", graph_gib=limit)
        model = rank.segments
        first = model.segment(None, list(range(64)), None)
        model.forward(first, grad=False)
        second = model.segment(first, [i % VOCAB for i in range(192)], None)
        predicted = model.graph_bytes(192, 64)
        with Sizes() as sizes:
            graph = model.forward(second, grad=True)
            state = sum(t.nbytes for held in (second.chunk.adjoint, second.adjoint) for p in held.state for t in p
                        if t is not None)  # fmt: skip
            kept[limit] = sizes.live - state
            graph.hidden.sum().backward()
    assert kept[NEVER_FITS] < kept[None] / 3
    assert predicted == pytest.approx(kept[NEVER_FITS], rel=0.34)


def test_a_limit_that_a_graph_keeps_changes_nothing(folder_of):
    works = batch(seed=5)
    with_limit = make_rank(folder_of("qwen3"), dtype="float32", graph_gib=1.0)
    without = make_rank(folder_of("qwen3"), dtype="float32")
    for work in works:
        with_limit.run(work)
        without.run(work)
    mine, theirs = with_limit.gradient(), without.gradient()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_logits_in_parts_give_the_same_gradient_and_never_exist_at_once(monkeypatch, folder_of, family):
    rows = 3
    monkeypatch.setattr(segments, "LOGITS_BYTES", 4 * VOCAB * rows)
    works = batch(seed=3)
    plain, _ = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family), block_tokens=10_000)
    with Sizes() as sizes:
        for work in works:
            rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12

    hidden = torch.randn(1, 40, 32, dtype=torch.float64, requires_grad=True)
    scored = segments.Scored(torch.arange(40), torch.arange(40), None, torch.zeros(40), ["a"] * 40)
    with Sizes() as sizes:
        rank.segments.logp(hidden, scored).sum().backward()
    weights = VOCAB * 32
    assert sizes.largest <= max(weights, 40 * 32)
    assert sizes.peak < 40 * VOCAB * 8 + 4 * weights * 8
