"""FLOPs by formula against torch's own counter on real models, and against counting by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from skyrl_thundersync.telemetry.flops import cost
from tests.learner.plain import save_model

N = 24


def counted(folder: str, n: int) -> float:
    """Forward FLOPs of one sequence of n tokens as torch counts them: attention over all n² pairs, head on every token."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(n)[None] % 96, use_cache=False)
    # Rotary angles are a matrix product here and no model FLOPs: n positions times half the rotated size.
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "glm4_moe_lite"])
def test_the_formula_is_what_torch_counts(tmp_path, family):
    folder = save_model(tmp_path / family, family)
    own = cost(json.loads(Path(folder, "config.json").read_text()))
    # The difference of two lengths leaves token and pair terms apart from anything constant.
    for n in (N, 2 * N):
        formula = n * (own.token + own.head) + n * n * own.pair
        assert formula == pytest.approx(counted(folder, n), rel=0.01)


def test_a_batch_counts_a_shared_prompt_once_and_every_causal_pair_once(tmp_path):
    folder = save_model(tmp_path / "qwen3", "qwen3")
    own = cost(json.loads(Path(folder, "config.json").read_text()))
    prompt, lengths = 5, [9, 5, 12]
    tokens, pairs = 0, 0
    for start, length in [(0, prompt), *((prompt, n) for n in lengths)]:
        for position in range(start, length):
            tokens += 1
            pairs += position + 1
    expected = 3 * (own.token * tokens + own.pair * pairs + own.head * 7)
    assert own.train_flops([(prompt, lengths)], 7) == pytest.approx(expected)


def test_an_adapters_backward_is_smaller(tmp_path):
    """Frozen weights need their input's gradient only; the adapter's own weights are few."""
    folder = save_model(tmp_path / "qwen3", "qwen3")
    config = json.loads(Path(folder, "config.json").read_text())
    full, lora = cost(config), cost(config, 1, ["q_proj", "v_proj"])
    d, heads, kv, size, layers = 32, 4, 2, 8, 2
    assert lora.adapter == layers * 2 * ((d + heads * size) + (d + kv * size))
    batch = ([(4, [10])], 6)
    frozen = full.token * 10 + full.head * 6
    assert lora.train_flops(*batch) == pytest.approx(full.train_flops(*batch) - frozen + 3 * lora.adapter * 10)


def test_a_family_without_a_formula_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="'bert'"):
        cost({"model_type": "bert"})
