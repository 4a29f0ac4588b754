"""A rehearsal against a real rank: what tensors took by PyTorch's own profiler, FLOPs by its own counter."""

from dataclasses import replace

import pytest
import torch

from benchmarks.rehearsal import CASES, LEARNER, compare
from benchmarks.rehearsal import SMALL as DENSE
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.rehearse.accounting import DEVICE, HOST
from skyrl_thundersync.rehearse.devices import GPUS
from skyrl_thundersync.rehearse.learner import FINISH, Rank, rehearse_rank
from skyrl_thundersync.rehearse.models import KNOWN, Architecture, architecture, depths, parameters, transformers_config
from skyrl_thundersync.rehearse.workload import Workload
from skyrl_thundersync.telemetry.flops import cost

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def in_a_rank_of_another_group():
    """Where a rehearsal runs there may be a process group; it is neither used nor missed."""
    if torch.distributed.is_initialized():  # that of a learner that another test left
        yield
        return
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_memory_and_flops_are_those_of_a_real_rank(case):
    for row in compare(case):
        assert row.holds, row


def test_two_depths_give_all_others_and_three_lengths_too(monkeypatch):
    """A GPU's rank of 5 layers and 25 blocks, whole, against the same from 1 and 2 layers and 10, 15 and 20 blocks."""
    known, workload = Architecture(DENSE | {"num_hidden_layers": 5}, "a test"), Workload(256 + 25 * 768, 256)
    rank = Rank(known, replace(LEARNER, dtype="bfloat16", block_tokens=700), "opd", 2, GPUS["h200"])
    assert depths(transformers_config(known)) == (1, 2, 4)
    short = rehearse_rank(rank, workload)
    monkeypatch.setattr("skyrl_thundersync.rehearse.learner.depths", lambda config: None)
    monkeypatch.setattr("skyrl_thundersync.rehearse.learner._at_length", _whole)
    for name, whole in rehearse_rank(rank, workload).items():
        for place in (DEVICE, HOST):
            # states lie in chunks of 3,840 tokens here, and the extrapolation may be one off
            assert short[name].peak[place] == pytest.approx(whole.peak[place], rel=0.1), name
        for figure in ("flops", "to_host", "host_traffic"):
            assert getattr(short[name], figure) == pytest.approx(getattr(whole, figure), rel=0.02), name


def _whole(rank, workload, layers, settled):
    from skyrl_thundersync.rehearse.learner import _run

    return _run(rank, workload, layers)


def test_the_table_has_the_sizes_that_are_known():
    body, ends = parameters(KNOWN["Qwen/Qwen3.8-27B"])
    assert body + ends == pytest.approx(26.9e9, rel=0.01)
    body, ends = parameters(KNOWN["zai-org/GLM-4.7-Flash"])
    assert body + ends == pytest.approx(30e9, rel=0.05)
    assert depths(transformers_config(KNOWN["Qwen/Qwen3.8-27B"])) == (4, 8, 15)
    assert depths(transformers_config(KNOWN["zai-org/GLM-4.7-Flash"])) == (2, 3, 45)


def test_the_finish_takes_no_copy_of_a_shard(monkeypatch):
    bucket = 4096
    monkeypatch.setattr("skyrl_thundersync.learner.zero.BUCKET", bucket)
    learner = replace(LEARNER, dtype="bfloat16", offload_optimizer=True)
    rank = Rank(Architecture(DENSE, "a test"), learner, "opd", 2, GPUS["h200"])
    finish = rehearse_rank(rank, Workload(900, 200))[FINISH]
    assert finish.peak[HOST] - sum(finish.kept[HOST].values()) < 8 * 8 * bucket


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_table_says_of_a_model_is_enough_to_count_its_flops(name):
    assert cost(KNOWN[name].config) == cost(transformers_config(KNOWN[name]).to_dict())


def test_a_model_that_is_nowhere_is_refused_by_option():
    with pytest.raises(ConfigError, match="trainer.policy.model.path='org/none': a rehearsal needs its config.json"):
        architecture("trainer.policy.model.path", "org/none")
