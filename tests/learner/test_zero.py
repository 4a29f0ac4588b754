"""Two gloo ranks with uneven work against torch AdamW in one process; and what a rank refuses."""

from dataclasses import replace

import pytest
import torch
from plain import plain_gradient, plain_model, settings
from ranks import CASES, OPTIMIZER, STEPS, all_cases, hashes, in_processes, long_runs, works_of

from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.zero import route
from skyrl_thundersync.options.schema import OptimizerSettings

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def both_ranks(folder_of):
    return in_processes(all_cases, folder_of("qwen3"), world=2)


def adamw(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / OPTIMIZER.num_warmup_steps))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_torch_adamw(both_ranks, folder_of, case):
    """Sum over ranks, ÷ N_k, then clip (active), then one step; FP32 masters under a BF16 student."""
    (first, _, _), (second, _, _) = both_ranks[0][case], both_ranks[1][case]
    dtype = getattr(torch, case[2])
    start = {
        k: p.detach().to(dtype).float() for k, p in plain_model(folder_of("qwen3"), torch.float32).named_parameters()
    }
    masters = {k: torch.nn.Parameter(p.clone()) for k, p in start.items()}
    optimizer, schedule = adamw(masters.values())
    clipped = 0
    for step in range(STEPS):
        (g0, result, params), (g1, other, params1) = first[step], second[step]
        assert result.n_scored == sum(w.source.n_scored for w in works_of(step) if hasattr(w, "source"))
        own = {"reduce_seconds": 0.0, "step_seconds": 0.0, "host_peak_bytes": 0}  # of each rank
        assert replace(result, **own) == replace(other, **own)
        assert result.stepped and result.lr == optimizer.param_groups[0]["lr"]
        for k, p in masters.items():
            p.grad = (g0[k] + g1[k]) / result.n_scored
        norm = float(torch.nn.utils.clip_grad_norm_(masters.values(), OPTIMIZER.max_grad_norm))
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        clipped += result.clipped
        optimizer.step()
        schedule.step()
        assert all(torch.equal(params[k], params1[k]) for k in params)
        moved = sum(float((masters[k].detach() - start[k]).square().sum()) for k in masters) ** 0.5
        gap = sum(float((masters[k].to(dtype).float() - params[k]).square().sum()) for k in masters) ** 0.5
        if step:  # the first warm-up step has learning rate 0
            assert gap <= (3e-6 if dtype == torch.float32 else 1e-2) * moved
        else:
            assert gap == 0.0
    assert clipped == STEPS


@pytest.mark.parametrize("case", [c for c in CASES if c[2] == "float32"], ids=str)
def test_three_steps_equal_a_plain_training_loop(both_ranks, folder_of, case):
    """The same against gradients that a textbook loop computes by itself, at its own parameters."""
    steps, _, _ = both_ranks[0][case]
    model = plain_model(folder_of("qwen3"), torch.float32)
    start = {k: p.detach().clone() for k, p in model.named_parameters()}
    optimizer, schedule = adamw(model.parameters())
    for step in range(STEPS):
        gradient, n = plain_gradient("", works_of(step), torch.float32, model=model)
        for k, p in model.named_parameters():
            p.grad = gradient[k] / n
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    moved = sum(float((p - start[k]).square().sum()) for k, p in model.named_parameters()) ** 0.5
    gap = sum(float((p - steps[-1][2][k]).square().sum()) for k, p in model.named_parameters()) ** 0.5
    assert gap <= 1e-4 * moved


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_with_nothing_scored_takes_no_step(both_ranks, case):
    for rank in both_ranks:
        steps, result, params = rank[case]
        assert (result.stepped, result.n_scored, result.grad_norm) == (False, 0, 0.0)
        assert result.lr == OPTIMIZER.lr  # third step used the full rate; an empty batch does not advance the schedule
        assert all(torch.equal(params[k], steps[-1][2][k]) for k in params)


@pytest.mark.parametrize("objective", ["opd", "grpo"])
def test_exact_accumulator_gives_the_same_bits_in_any_order_on_any_number_of_ranks(folder_of, objective):
    """Three clipped updates, every one with another arrival order and another placement of the groups on the ranks."""
    found = set()
    for world in (1, 2, 3):
        for ours in in_processes(hashes, folder_of("qwen3"), objective, 3, world=world):
            found |= set(ours)
    assert len(found) == 1


@pytest.mark.timeout(600)
def test_forty_updates_give_the_same_bits_on_one_to_eight_ranks():
    """The step too: no element's update depends on where in a shard it lies, though the parameters fill no shard evenly."""
    runs = {world: in_processes(long_runs, 40, world=world, timeout=500) for world in (1, 2, 3, 5, 8)}
    for world, ranks in runs.items():
        for ours in ranks:
            for case, (a, b) in enumerate(zip(ours, runs[1][0], strict=True)):
                assert int((a != b).sum()) == 0, f"{world} ranks, case {case}"


def test_routes_are_a_closed_table():
    for stage in (1, 2):
        for dtype in ("float32", "bfloat16"):
            assert route(stage, True, dtype) == "host shard"
            assert route(stage, False, dtype) == "averaged gradients"
    with pytest.raises(NotImplementedError, match="zero_stage=3"):
        route(3, False, "bfloat16")
    with pytest.raises(NotImplementedError, match="zero_stage=0"):
        route(0, False, "float32")
    with pytest.raises(NotImplementedError, match="dtype=float16"):
        route(1, False, "float16")


@pytest.mark.parametrize("change", [{"zero_stage": 3}, {"zero_stage": 1, "dtype": "float64"}])
def test_what_has_no_route_is_refused_before_the_model_is_looked_at(change):
    spec = RankSpec("/nonexistent", 0, 1, "127.0.0.1", 0, settings(**change), "opd", OptimizerSettings())
    with pytest.raises(NotImplementedError):
        LearnerRank(spec)
