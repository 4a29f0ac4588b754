"""The streamed gradient equals the textbook one: whole contexts, stock attention, plain autograd."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from plain import (
    FAMILIES,
    VOCAB,
    batch,
    contexts,
    distance,
    interleave,
    make_rank,
    plain_gradient,
    plain_model,
    trajectory,
)

from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.learner.states import Adjoint
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId

T0 = TrajectoryId("g", 0)


def one_rank(folder, cache={}, **changes):  # noqa: B006
    """The same rank again where a test only asks for another batch."""
    key = (folder, *changes.items())
    if key not in cache:
        cache[key] = make_rank(folder, **changes)
    return cache[key]


def run(rank, works):
    """Run one by one; returns (gradient, scored tokens) and leaves the rank clean."""
    done = [rank.run(work) for work in works]
    gradient = rank.gradient()
    assert rank.forest.open_names() == []
    rank.abort_batch()
    return gradient, sum(d.n_scored for d in done)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block", "retain"), [(0, 0.0), (6, 1.0), (10_000, 0.0)])
def test_fp64_gradient_of_random_trees(folder_of, family, block, retain):
    works = batch(seed=3)
    plain, n = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family), block_tokens=block, retain_gib=retain)
    ours, n_ours = run(rank, works)
    assert n_ours == n
    assert distance(ours, plain) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gradient_of_random_trees(folder_of, family):
    works = batch(seed=5)
    plain, _ = plain_gradient(folder_of(family), works, torch.float32)
    ours, _ = run(make_rank(folder_of(family), dtype="float32", block_tokens=4, retain_gib=0.5), works)
    assert distance(ours, plain) <= 3e-6


def test_a_segment_of_one_token_needs_no_backward_of_a_decoding_kernel(monkeypatch, folder_of):
    """The fused recurrent rule that a GPU's packages bring has a forward alone, as this stand-in has."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    rule = modeling.torch_chunk_gated_delta_rule

    def forward_alone(*args, **kwargs):
        out, state = rule(*args, **kwargs)
        return out.detach(), state.detach()

    monkeypatch.setattr(modeling, "torch_recurrent_gated_delta_rule", forward_alone)
    turns = [{"context": 5, "action": 4}, {"context": 1, "action": 1}, {"context": 0, "action": 1}]
    appends = trajectory(random.Random(0), "g", 0, tuple(range(9)), turns)
    works = [*appends, CloseTrajectory(T0, 1.0), CloseGroup("g")]
    plain, _ = plain_gradient(folder_of("qwen3_5_text"), works)
    ours, _ = run(make_rank(folder_of("qwen3_5_text"), block_tokens=1), works)
    assert distance(ours, plain) <= 1e-12


def test_bf16_student_accumulates_in_fp32(folder_of):
    """BF16 passes are as far from the FP64 gradient as the textbook's own BF16 pass is."""
    folder, works = folder_of("qwen3"), batch(seed=5)
    true, _ = plain_gradient(folder, works, torch.float64)
    plain, _ = plain_gradient(folder, works, torch.bfloat16)
    rank = make_rank(folder, dtype="bfloat16")
    ours, _ = run(rank, works)
    assert all(g.dtype == torch.float32 for g in ours.values())
    assert distance(ours, true) <= 2 * distance(plain, true)


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), block=st.sampled_from((0, 3, 8)), retain=st.sampled_from((0.0, 1e-5, 1.0)))
def test_any_tree_any_mask_any_policy(folder_of, seed, block, retain):
    works = batch(seed)
    plain, n = plain_gradient(folder_of("qwen3"), works)
    ours, n_ours = run(one_rank(folder_of("qwen3"), block_tokens=block, retain_gib=retain), works)
    assert n_ours == n
    assert distance(ours, plain) <= 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_arrival_order_changes_only_rounding(folder_of, seed):
    works = batch(seed=11, groups=2, samples=3)
    rank = make_rank(folder_of("qwen3"), dtype="float32", block_tokens=4)
    first, n = run(rank, works)
    second, n_second = run(rank, interleave(works, seed))
    assert n == n_second
    assert distance(second, first) <= 1e-6


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite", "qwen3_5_text"])
def test_exact_accumulator_gives_the_same_bits_in_any_order(folder_of, family):
    works = batch(seed=11, groups=2, samples=4)
    rank = make_rank(folder_of(family), dtype="float32", block_tokens=4, accumulator="exact")
    first, _ = run(rank, works)
    for seed in range(3):
        again, _ = run(rank, interleave(works, seed))
        assert all(torch.equal(first[k], again[k]) for k in first)
    plain, _ = plain_gradient(folder_of(family), works, torch.float32)
    assert distance(first, plain) <= 3e-6


def test_works_handed_over_together_give_the_same_gradient(folder_of):
    """Under a late schedule whole trajectories come at once: forwarded once, same gradient."""
    works = batch(seed=8)
    plain, n = plain_gradient(folder_of("qwen3"), works)
    for retain in (0.0, 1.0):
        rank = make_rank(folder_of("qwen3"), block_tokens=4, retain_gib=retain)
        assert sum(d.n_scored for d in rank.run_many(works)) == n
        assert distance(rank.gradient(), plain) <= 1e-12


def one_trajectory(seed, turns, prompt_length=6):
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(VOCAB) for _ in range(prompt_length))
    return [*trajectory(rng, "g", 0, prompt, turns), CloseTrajectory(T0, 1.0), CloseGroup("g")]


@pytest.mark.parametrize(
    "turns",
    [
        [{"action": 0}],
        [{"action": 1}],
        [{"action": 4}, {"context": 0, "action": 0}, {"context": 3, "action": 2}],
        [{"action": 3, "scored": 0}, {"context": 2, "action": 3}],
        [{"action": 3}, {"context": 9, "action": 5, "scored": 0}],
        [{"action": 1}, {"context": 0, "action": 1}, {"context": 0, "action": 1}],
        [{"action": 6}, {"context": 0, "action": 4, "keep": 8}],
        [{"action": 6}, {"context": 3, "action": 4, "keep": 3}],
        [{"action": 6}, {"context": 3, "action": 4, "keep": 9}, {"context": 2, "action": 4, "keep": 4}],
    ],
    ids=["empty", "one token", "empty turn", "unscored head", "unscored tail", "one-token turns", "cut, no context",
         "cut inside the prompt", "two cuts"],
)  # fmt: skip
@pytest.mark.parametrize("block", [0, 5])
def test_turn_shapes(folder_of, turns, block):
    works = one_trajectory(1, turns)
    plain, n = plain_gradient(folder_of("llama"), works)
    ours, n_ours = run(make_rank(folder_of("llama"), block_tokens=block), works)
    assert n_ours == n
    assert distance(ours, plain) <= 1e-12


def test_identical_samples_count_twice(folder_of):
    works = one_trajectory(2, [{"action": 5}, {"context": 3, "action": 4}])[:-1]
    twin = [
        dataclasses.replace(w, source=dataclasses.replace(w.source, trajectory=TrajectoryId("g", 1)))
        if isinstance(w, Append)
        else CloseTrajectory(TrajectoryId("g", 1), 1.0)
        for w in works
    ]
    rank = make_rank(folder_of("qwen3"))
    single, _ = run(rank, [*works, CloseGroup("g")])
    both, _ = run(rank, [*works, *twin, CloseGroup("g")])
    assert distance(both, {k: 2 * g for k, g in single.items()}) <= 1e-12


def test_only_the_weighted_token_acts(folder_of):
    """All scores but token t's equal the student's own: the gradient is that of log π(token t)."""
    folder = folder_of("qwen3")
    works = one_trajectory(4, [{"action": 5}, {"context": 3, "action": 4}])
    rank = make_rank(folder)
    for turn, token in ((0, 0), (0, 4), (1, 0), (1, 3)):
        sentinel = []
        for work, context in contexts(works):
            own = rank.logps(context + list(work.source.action_ids))[len(context) - 1 :]
            if work.source.turn == turn:
                own[token] += 1.0
            sentinel.append(Append(work.source, tuple(own)))
        ours, _ = run(rank, [*sentinel, CloseTrajectory(T0, 1.0), CloseGroup("g")])
        model = plain_model(folder, torch.float64)
        work, context = contexts(works)[turn]
        ids = torch.tensor([context + list(work.source.action_ids)])
        at = len(context) + token
        with all_double():
            (-torch.log_softmax(model(input_ids=ids).logits[0, at - 1], -1)[ids[0, at]]).backward()
        assert distance(ours, {k: p.grad for k, p in model.named_parameters()}) <= 1e-9


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite", "qwen3_5_text"])
def test_a_severed_adjoint_would_be_seen(folder_of, family, monkeypatch):
    """The bounds above are no formality: without the adjoints the gradient is off by far more."""
    works = batch(seed=3)
    plain, _ = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family))
    monkeypatch.setattr(Adjoint, "deposit", lambda self, layer, part, gradient: None)
    ours, _ = run(rank, works)
    assert distance(ours, plain) > 1e-2


def with_values(work: Append, value: float, at_masked: bool, field: str) -> Append:
    """`value` at every (un)masked position of the scores or of the sampler's log-probs."""
    old = work.scores if field == "scores" else work.source.sampler_logps
    new = tuple(value if bool(on) != at_masked else x for x, on in zip(old, work.source.mask, strict=True))
    if field == "scores":
        return Append(work.source, new)
    return Append(dataclasses.replace(work.source, sampler_logps=new), work.scores)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["scores", "sampler"])
def test_non_finite_input_matters_only_where_scored(folder_of, value, field):
    works = one_trajectory(6, [{"action": 8, "scored": 0.5}, {"context": 2, "action": 8, "scored": 0.5}])
    rank = make_rank(folder_of("llama"))
    clean = [rank.run(w) for w in works]
    gradient = rank.gradient()
    rank.abort_batch()
    dirty = [with_values(w, value, True, field) if isinstance(w, Append) else w for w in works]
    done = [rank.run(w) for w in dirty]
    costs = {"seconds": 0, "prompt_seconds": 0, "started": 0, "page_faults": 0, "cpu_seconds": 0}
    assert [dataclasses.replace(d, **costs) for d in done] == [dataclasses.replace(d, **costs) for d in clean]
    assert all(torch.equal(gradient[k], g) for k, g in rank.gradient().items())
    rank.abort_batch()
    rank.run(works[0])
    with pytest.raises(FloatingPointError, match="source g_0/turn1"):
        rank.run(with_values(works[1], value, False, field))


def test_nothing_scored_leaves_exactly_zero(folder_of):
    works = one_trajectory(6, [{"action": 8, "scored": 0}, {"context": 2, "action": 8, "scored": 0}])
    ours, n = run(make_rank(folder_of("llama"), block_tokens=4, retain_gib=1.0), works)
    assert n == 0
    assert all(not g.any() for g in ours.values())


def test_metrics_are_those_of_the_scored_tokens(folder_of):
    folder, works = folder_of("qwen3"), batch(seed=3)
    rank = make_rank(folder)
    kl, gaps = 0.0, []
    for work, context in contexts(works):
        own = rank.logps(context + list(work.source.action_ids))[len(context) - 1 :]
        for i, on in enumerate(work.source.mask):
            if on:
                kl += own[i] - work.scores[i]
                gaps.append(abs(own[i] - work.source.sampler_logps[i]))
    done = [rank.run(w) for w in works]
    assert sum(d.n_scored for d in done) == len(gaps)
    assert sum(d.sum_kl for d in done) == pytest.approx(kl, abs=1e-6)
    assert sum(d.sum_logp_gap for d in done) == pytest.approx(sum(gaps), abs=1e-6)
    assert max(d.max_logp_gap for d in done) == pytest.approx(max(gaps), abs=1e-6)


def test_memory_of_a_closed_trajectory_is_freed(folder_of):
    import gc
    import weakref

    works = batch(seed=3)
    rank = make_rank(folder_of("qwen3"), retain_gib=1.0)
    seen = weakref.WeakSet()
    for work in works:
        rank.run(work)
        if isinstance(work, Append):
            group = rank.forest.groups[work.source.trajectory.group]
            leaf = group.open[work.source.trajectory.sample].leaf
            seen |= {s for s in (leaf.path() if leaf else []) if s not in group.nodes}
        elif isinstance(work, CloseTrajectory):
            del leaf
            gc.collect()
            assert len(seen) == 0
    assert rank.forest.groups == {} and rank.forest.budget.kept == {}
