"""A rank's part of a checkpoint: going on from it is the same as never having stopped."""

import json
import os
import signal
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from ranks import OPTIMIZER, in_processes, parameters, spec, works_of

from skyrl_thundersync.learner.answers import Shards
from skyrl_thundersync.learner.checkpoint import bytes_needed, content, load_rank, save_rank
from skyrl_thundersync.learner.rank import LearnerRank
from skyrl_thundersync.options.schema import LoraSettings
from skyrl_thundersync.stream.sources import group_of

CASES = [  # stage, offload, dtype, LoRA: every pair of values together at least once
    (1, False, "float32", False),
    (1, True, "bfloat16", False),
    (2, False, "bfloat16", False),
    (2, True, "float32", False),
    (1, False, "float32", True),
    (2, True, "bfloat16", True),
]
pytestmark = pytest.mark.timeout(600)


def learner_of(folder, rank, world, port, case, accumulator="exact"):
    stage, offload, dtype, lora = case
    return LearnerRank(
        spec(
            folder,
            rank,
            world,
            port,
            LoraSettings(4, 8) if lora else None,
            zero_stage=stage,
            offload_optimizer=offload,
            dtype=dtype,
            accumulator=accumulator,
        )
    )


def train(learner, rank, world, steps):
    """Updates `steps`; groups go round the ranks."""
    for step in steps:
        for work in works_of(step):
            if int(group_of(work)[1:]) % world == rank:
                learner.run(work)
        learner.finish()


def state(learner):
    return {
        **parameters(learner),
        **{f"shard{i}": t.clone() for i, t in enumerate(learner.optimizer.shard_state())},
        "schedule": torch.tensor([learner.optimizer.steps, learner.optimizer.lr], dtype=torch.float64),
    }


def save_all(learner, folder, rank, world):
    part = save_rank(learner, folder)
    parts = [None] * world
    dist.all_gather_object(parts, part)
    if rank == 0:
        with open(f"{folder}/saved.json", "w") as file:
            json.dump(asdict(part.shards), file)
    dist.barrier()
    return parts


def saved_in(folder):
    with open(f"{folder}/saved.json") as file:
        return Shards(**json.load(file))


def straight_and_resumed(student, out, rank, world, port):
    """Per case: the state after two more updates, straight on, and from the checkpoint."""
    found = {}
    for index, case in enumerate(CASES):
        folder = f"{out}/{index}"
        learner = learner_of(student, rank, world, port, case)
        train(learner, rank, world, (0, 1))
        for work in works_of(2)[:1] if rank == 0 else []:
            learner.run(work)  # a batch that had begun is no part of it
        parts = save_all(learner, folder, rank, world)
        learner.abort_batch()
        at_save = state(learner)
        train(learner, rank, world, (2, 3))
        straight = state(learner)
        learner = learner_of(student, rank, world, port, case)
        load_rank(learner, folder, saved_in(folder))
        at_load = state(learner)
        train(learner, rank, world, (2, 3))
        written = sum(size for part in parts for size, _ in part.files.values())
        found[case] = (at_save, at_load), (straight, state(learner)), (bytes_needed(learner), written)
    return found


@pytest.fixture(scope="module")
def runs(student, tmp_path_factory):
    return in_processes(straight_and_resumed, student, str(tmp_path_factory.mktemp("ranks")), world=2, timeout=500)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(runs, case):
    for rank in runs:
        for was, is_now in rank[case][:2]:
            assert was.keys() == is_now.keys()
            assert [name for name in was if not torch.equal(was[name], is_now[name])] == []
        assert not torch.equal(rank[case][0][0]["shard0"], rank[case][1][0]["shard0"])  # and it went on learning


def test_the_space_asked_for_is_the_space_taken(runs):
    for case in (c for c in CASES if not c[3]):
        needed, written = runs[0][case][2]
        assert needed <= written <= needed + 40_000  # names, configuration and tokenizer


def resharded(student, out, source, case, rank, world, port):
    """State after resuming from `source`, and after two more updates; the first call trains and saves it."""
    learner = learner_of(student, rank, world, port, case)
    if source is None:
        train(learner, rank, world, (0, 1))
        save_all(learner, out, rank, world)
    else:
        load_rank(learner, source, saved_in(source))
    before = parameters(learner)
    train(learner, rank, world, range(2, 20))
    return before, parameters(learner), learner.optimizer.lr


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 3)], ids=str)
def test_a_checkpoint_of_some_ranks_resumes_on_others_to_the_bit(student, tmp_path, ranks):
    was, is_now = ranks
    out = str(tmp_path / "saved")
    straight = in_processes(resharded, student, out, None, (1, False, "float32", False), world=was)
    # another stage, and offloaded: neither is part of the checkpoint
    resumed = in_processes(resharded, student, "", out, (2, True, "float32", False), world=is_now)
    for before, after, lr in resumed:
        assert all(torch.equal(before[k], straight[0][0][k]) for k in before)
        assert lr == straight[0][2]
        assert all(torch.equal(after[k], straight[0][1][k]) for k in after)
    assert OPTIMIZER.num_warmup_steps == 2  # the schedule was on its way when it was saved


def descriptions(student, wider, rank, world, port):
    found = [content(learner_of(folder, rank, world, port, CASES[0])) for folder in (student, wider)]
    lora = [content(learner_of(folder, rank, world, port, CASES[-2])) for folder in (student, student, wider)]
    changed = learner_of(student, rank, world, port, CASES[0])
    with torch.no_grad():
        next(changed.model.parameters()).view(-1)[3] += 1e-3
    try:
        save_rank(changed, "/nonexistent")
    except RuntimeError as error:
        return found, lora, str(error)
    return found, lora, "saved"


def test_a_description_tells_models_apart_and_changed_parameters_are_not_saved(student, wider):
    ((full, other), (lora, same, base), error), *_ = in_processes(descriptions, student, wider, world=1)
    assert full.frozen is None and full.parameters != other.parameters
    assert lora == same and lora.frozen != base.frozen
    assert "parameters changed" in error


def killed_between_sources(student, out, rank, world, port):
    learner = learner_of(student, rank, world, port, CASES[0])
    train(learner, rank, world, (0,))
    save_all(learner, out, rank, world)
    torch.save(state(learner), f"{out}/state.pt")
    for work in works_of(1)[:3]:
        learner.run(work)
    os.kill(os.getpid(), signal.SIGKILL)


def after_the_kill(student, out, rank, world, port):
    learner = learner_of(student, rank, world, port, CASES[0])
    load_rank(learner, out, saved_in(out))
    return state(learner)


def test_a_rank_killed_between_sources_left_nothing_of_the_update(student, tmp_path):
    with pytest.raises(AssertionError, match=f"exit code -{signal.SIGKILL}"):
        in_processes(killed_between_sources, student, str(tmp_path), world=1)
    (found,) = in_processes(after_the_kill, student, str(tmp_path), world=1)
    saved = torch.load(tmp_path / "state.pt")
    assert [name for name in saved if not torch.equal(saved[name], found[name])] == []
