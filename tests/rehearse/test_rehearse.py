"""A rehearsal against a real rank: what tensors took by PyTorch's own profiler, FLOPs by its own counter."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.real_rank import measure
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.schema import LearnerConfig
from skyrl_thundersync.rehearse.accounting import DEVICE, HOST
from skyrl_thundersync.rehearse.devices import GPUS
from skyrl_thundersync.rehearse.learner import Rank, rehearse_rank
from skyrl_thundersync.rehearse.models import KNOWN, Architecture, architecture, depths, parameters, transformers_config
from skyrl_thundersync.rehearse.workload import Workload

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
HYBRID = DENSE | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LEARNER = LearnerConfig(dtype="float32", block_tokens=256, retain_gib=0.001)
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


@pytest.mark.parametrize(
    ("fields", "retain_gib", "graph_gib", "objective"),
    [
        (DENSE, 0.001, None, "opd"),
        (DENSE, 1.0, None, "grpo"),
        (DENSE, 0.0, 0.0001, "opd"),
        (HYBRID, 0.001, None, "opd"),
    ],
)
def test_memory_and_flops_are_those_of_a_real_rank(tmp_path, fields, retain_gib, graph_gib, objective):
    known, workload = Architecture(fields, "a test"), Workload(900, 200)
    learner = replace(LEARNER, retain_gib=retain_gib, graph_gib=graph_gib)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(transformers_config(known)).float().save_pretrained(tmp_path)
    real = measure(tmp_path, learner, objective, workload)
    for name, phase in rehearse_rank(Rank(known, learner, objective, 1, None), workload).items():
        assert phase.peak[DEVICE] == pytest.approx(real[name].peak, rel=0.1), name
        assert phase.flops == pytest.approx(real[name].flops, rel=0.02), name


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


def test_a_model_that_is_nowhere_is_refused_by_option():
    with pytest.raises(ConfigError, match="trainer.policy.model.path='org/none': a rehearsal needs its config.json"):
        architecture("trainer.policy.model.path", "org/none")
