"""The teacher's k most probable tokens: the gradient is the textbook's, and at k = vocabulary that of the KL itself."""

import dataclasses
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from plain import FAMILIES, VOCAB, batch, contexts, distance, interleave, make_rank, plain_model

from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.objectives.check import problems
from skyrl_thundersync.objectives.top_k import TopK
from skyrl_thundersync.stream.sources import Append, Support

K = 5


def teacher_logps(seed: int, n: int) -> torch.Tensor:
    """A random teacher's log-probs at n positions, float32 [n, VOCAB]."""
    return torch.log_softmax(3 * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)), -1)


def with_support(works: list, k: int) -> list:
    """The same batch, scored by a teacher that answers its k best tokens too. Every third action token is among them."""
    made = []
    for index, work in enumerate(works):
        if isinstance(work, Append) and work.source.action_ids:
            n, rng = len(work.source.action_ids), random.Random(index)
            logps_nV = teacher_logps(index, n)
            best = logps_nV.topk(k, -1)
            action = tuple(
                int(best.indices[i, rng.randrange(k)]) if rng.random() < 1 / 3 else id
                for i, id in enumerate(work.source.action_ids)
            )
            scores = tuple(float(logps_nV[i, id]) for i, id in enumerate(action))
            support = Support(best.indices.int().numpy(), best.values.numpy())
            work = Append(dataclasses.replace(work.source, action_ids=action), scores, support)
        made.append(work)
    return made


def textbook(folder: str, works: list, dtype=torch.float64, full: bool = False) -> dict[str, torch.Tensor]:
    """Whole contexts; token by token by the definition. full: Σ_v π_θ log(π_θ/π_T), differentiated as it stands."""
    model = plain_model(folder, dtype)
    for work, context in contexts(works):
        ids = torch.tensor([context + list(work.source.action_ids)])
        if not any(work.source.mask):
            continue
        with all_double() if dtype == torch.float64 else nullcontext():
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
        loss = 0.0
        for i, on in enumerate(work.source.mask):
            if not on:
                continue
            row, sampled = logp[len(context) + i - 1], work.source.action_ids[i]
            best = torch.from_numpy(work.support.ids_nk[i]).long()
            teacher = torch.from_numpy(work.support.logps_nk[i]).to(dtype)
            if full:
                loss = loss + (row[best].exp() * (row[best] - teacher)).sum()
                continue
            loss = loss + (row[best].exp() * (row[best] - teacher).detach()).sum()
            if sampled not in best.tolist():
                loss = loss + (row[sampled].detach() - work.scores[i]) * row[sampled]
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def streamed(folder: str, works: list, k: int = K, **changes):
    rank = make_rank(folder, "top_k", options={"k": k}, **changes)
    for work in works:
        rank.run(work)
    return rank.gradient()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory", [{}, {"retain_gib": 1.0}, {"graph_gib": 0.0}])
def test_the_gradient_is_the_textbooks(folder_of, family, memory):
    works = with_support(batch(seed=31, groups=2, samples=2), K)
    ours = streamed(folder_of(family), interleave(works, 0), block_tokens=6, **memory)
    assert distance(ours, textbook(folder_of(family), works)) <= 1e-12


def test_over_the_whole_vocabulary_it_is_the_reverse_kls_own(folder_of):
    works = with_support(batch(seed=32), VOCAB)
    ours = streamed(folder_of("qwen3"), works, VOCAB, block_tokens=6)
    assert distance(ours, textbook(folder_of("qwen3"), works, full=True)) <= 1e-12


def test_in_fp32_and_with_exact_sums_in_any_order(folder_of):
    works = with_support(batch(seed=33), K)
    plain = textbook(folder_of("qwen3"), works, torch.float32)
    assert distance(streamed(folder_of("qwen3"), works, dtype="float32", block_tokens=6), plain) <= 3e-6
    changes = {"dtype": "float32", "block_tokens": 4, "accumulator": "exact"}
    found = [streamed(folder_of("qwen3"), interleave(works, seed), **changes) for seed in range(3)]
    assert all(torch.equal(found[0][name], again[name]) for again in found[1:] for name in again)
    assert distance(found[0], plain) <= 3e-6


def test_where_logits_are_formed_in_parts(folder_of, monkeypatch):
    works = with_support(batch(seed=34), K)
    monkeypatch.setattr("skyrl_thundersync.learner.segments.LOGITS_BYTES", 4 * 2 * VOCAB)
    assert distance(streamed(folder_of("qwen3"), works), textbook(folder_of("qwen3"), works)) <= 1e-12


@pytest.mark.parametrize("k", [1, 16])
def test_it_keeps_the_contract(k):
    assert problems(TopK(k)) == []


def test_a_support_that_says_another_thing_by_hand_is_found_out():
    class Wrong(TopK):
        def plain_weights(self, token):
            return {id: weight / 2 for id, weight in super().plain_weights(token).items()}

    (problem,) = problems(Wrong(3))
    assert "says two things" in problem


def test_the_verifiers_reference_agrees(folder_of, tmp_path):
    from skyrl_thundersync.telemetry.record import Recorder, load_batch
    from skyrl_thundersync.verify import reference

    works = with_support(batch(seed=35), K)
    recorder = Recorder(tmp_path)
    record = recorder.begin(0, {"g0": 2, "g1": 2})
    for work in works:
        record(0, work)
    recorder.end()
    read = load_batch(tmp_path / "batch_000000.jsonl.gz")
    kept = [
        (a.support, b.support) for a, b in zip(works, read.work, strict=True) if isinstance(a, Append) and a.support
    ]
    assert kept and all(np.array_equal(getattr(a, x), getattr(b, x)) for a, b in kept for x in ("ids_nk", "logps_nk"))
    model = reference.load_model(folder_of("qwen3"), torch.float64, None, "cpu")
    with all_double():
        gradient, _ = reference.gradient(model, read, TopK(K))
    assert distance(gradient, textbook(folder_of("qwen3"), works)) <= 1e-12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: None, "a support of"),
        (lambda s: Support(s.ids_nk[:-1], s.logps_nk[:-1]), "a support of"),
        (lambda s: Support(s.ids_nk + VOCAB, s.logps_nk), "outside the student's"),
        (lambda s: Support(s.ids_nk, s.logps_nk * np.nan), "is nan"),
    ],
)
def test_a_support_that_cannot_be_right_is_refused_by_name(folder_of, change, says):
    work = next(w for w in with_support(batch(seed=31), K) if isinstance(w, Append) and sum(w.source.mask) > 1)
    work = dataclasses.replace(work, source=dataclasses.replace(work.source, turn=0, prefix=0, context_ids=(1, 2)))
    rank = make_rank(folder_of("qwen3"), "top_k", options={"k": K})
    with pytest.raises((ValueError, FloatingPointError), match=says) as caught:
        rank.run(dataclasses.replace(work, support=change(work.support)))
    assert work.source.name in str(caught.value)
