"""What this plugin relies on in Transformers and PEFT and they do not promise (docs/seams.md)."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from models import byte_tokenizer, tiny_qwen3  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AttentionInterface, DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

IDS = torch.arange(20)[None]
GATED = Qwen3_5TextConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)


def test_an_attention_of_ones_own_gets_the_heads_and_no_mask():
    """q [1, H, n, D], k and v [1, G, n, D]; with a mask function that gives None the model asks for none."""
    seen = {}

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        seen.update(q=query.shape, k=key.shape, mask=attention_mask, scale=scaling, layer=module.layer_idx)
        value = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return value.transpose(1, 2).contiguous(), None

    AttentionInterface.register("seam", attend)
    AttentionMaskInterface.register("seam", lambda *args, **kwargs: None)
    model = tiny_qwen3()
    model.set_attn_implementation("seam")
    model(IDS)
    assert seen["q"] == (1, 4, 20, 32) and seen["k"] == (1, 2, 20, 32)
    assert seen["mask"] is None and seen["scale"] == pytest.approx(32**-0.5) and seen["layer"] == 2
    model.set_attn_implementation("sdpa")
    before = dict(seen)
    seen.clear()
    model(IDS)
    assert not seen and before


def test_a_layers_update_gives_the_keys_and_values_that_attention_meets():
    class Own(DynamicLayer):
        def __init__(self):
            super().__init__()
            self.is_initialized, self.asked = True, 0

        def update(self, key_states, value_states, *args, **kwargs):
            self.asked += 1
            return key_states, value_states

        def get_seq_length(self):
            return 0

    model = tiny_qwen3()
    layers = [Own() for _ in range(3)]
    with torch.no_grad():
        own = model(IDS, past_key_values=Cache(layers=layers), use_cache=True).logits
        assert torch.allclose(own, model(IDS).logits, atol=1e-5)
    assert [layer.asked for layer in layers] == [1, 1, 1]


def test_a_gated_delta_layer_takes_its_states_from_the_cache_and_gives_them_back():
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(GATED).eval()
    cache = DynamicCache(config=GATED)
    layer = cache.layers[0]
    assert isinstance(layer, LinearAttentionLayer)
    with torch.no_grad():
        first = model(IDS[:, :12], past_key_values=cache, use_cache=True).logits
        for name in ("conv_states", "recurrent_states", "has_previous_state"):
            assert len(getattr(layer, name)) == 1
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized"):
            assert getattr(layer, name)[0]
        assert layer.has_previous_state[0]
        rest = model(IDS[:, 12:], past_key_values=cache, use_cache=True).logits
        whole = model(IDS).logits
    assert torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-4)


def test_one_token_after_a_state_takes_the_recurrent_rule_of_this_name(monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    asked = []

    def rule(*args, **kwargs):
        asked.append(args[0].shape[1])
        return modeling.torch_chunk_gated_delta_rule(*args, **kwargs)

    monkeypatch.setattr(modeling, "torch_recurrent_gated_delta_rule", rule)
    torch.manual_seed(0)
    model, cache = Qwen3_5ForCausalLM(GATED).eval(), DynamicCache(config=GATED)
    with torch.no_grad():
        model(IDS[:, :19], past_key_values=cache, use_cache=True)
        last = model(IDS[:, 19:], past_key_values=cache, use_cache=True).logits
        assert asked == [1]
        assert torch.allclose(last[:, -1], model(IDS).logits[:, -1], atol=1e-4)


def test_a_models_parts_are_found_by_these_names():
    model = tiny_qwen3()
    assert getattr(model, model.base_model_prefix) is model.model
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_input_embeddings().num_embeddings == 320
    hidden = model.model(input_ids=IDS).last_hidden_state
    assert torch.allclose(model.lm_head(hidden), model(IDS).logits, atol=1e-6)


def test_a_scheduler_is_put_back_by_these_fields():
    from transformers import get_scheduler

    weights = [torch.nn.Parameter(torch.zeros(1))]

    def make():
        adam = torch.optim.AdamW(weights, lr=1.0)
        return adam, get_scheduler("cosine", adam, num_warmup_steps=2, num_training_steps=10)

    adam, schedule = make()
    rates = []
    for _ in range(6):
        adam.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    again, resumed = make()
    resumed.last_epoch, resumed._step_count = 3, 4
    resumed._last_lr = [b * f(3) for b, f in zip(resumed.base_lrs, resumed.lr_lambdas, strict=True)]
    again.param_groups[0]["lr"] = resumed._last_lr[0]
    found = []
    for _ in range(3):
        again.step()
        resumed.step()
        found.append(resumed.get_last_lr()[0])
    assert found == pytest.approx(rates[3:])


def test_a_template_renders_and_encodes_as_its_tokenizer_does_in_two_steps():
    tokenizer, talk = byte_tokenizer(), [{"role": "user", "content": "hé"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_adapter_is_trained_and_written_under_these_names(tmp_path):
    model = tiny_qwen3()
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    assert adapted.get_base_model() is model
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all(".lora_A.default." in name or ".lora_B.default." in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    plain = tiny_qwen3()(IDS).logits
    assert torch.equal(adapted(IDS).logits, plain)  # B starts at zero
    adapted.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == len(trained)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
