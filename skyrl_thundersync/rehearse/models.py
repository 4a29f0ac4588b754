"""Architectures of the models that presets name, for machines that do not have them: the fields of config.json that count.

`origin` says where the figures are from. A model folder or a hub name in the local cache comes before this table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.preflight.models import model_config


class Architecture(NamedTuple):
    """A model: its config.json (of the language model inside), bytes a parameter on disk, and where this is known from."""

    config: dict[str, Any]
    origin: str
    quantised: bool = False


QWEN_27B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
QWEN_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}

GLM_FLASH = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "mlp_layer_types": ["dense", *["sparse"] * 46],
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}

KNOWN = {
    "Qwen/Qwen3.8-27B": Architecture(QWEN_27B, "the published sizes of Qwen3.5-27B, whose class this model has"),
    "Qwen/Qwen3.8-Flash-Next-FP8": Architecture(
        QWEN_NEXT, "derived: Qwen3-Next-80B-A3B with the student's vocabulary, blocks of 128 in FP8", quantised=True
    ),
    "zai-org/GLM-4.7-Flash": Architecture(GLM_FLASH, "the defaults of Transformers' own class for this model"),
    "zai-org/GLM-5.3-Flash-FP8": Architecture(
        GLM_FLASH, "assumed: its sizes are not known here; those of GLM-4.7-Flash, in FP8", quantised=True
    ),
}


def architecture(option: str, path: str) -> Architecture:
    """The architecture of the model that `option` names.

    Raises:
        ConfigError: its config.json is neither on this machine nor in the table.
    """
    found = model_config(path)
    if found is not None:
        quantised = "quantization_config" in found
        text = found.get("text_config", found)
        return Architecture({**text, "model_type": text.get("model_type", found.get("model_type"))}, path, quantised)
    if path in KNOWN:
        return KNOWN[path]
    raise ConfigError(
        f"{option}={path!r}: a rehearsal needs its config.json, and it is not on this machine. Put config.json into a folder "
        f"and name that; known without one are {', '.join(KNOWN)}"
    )


def transformers_config(known: Architecture, layers: int | None = None):
    """Transformers' configuration of an architecture, of its first `layers` layers alone where given."""
    from transformers import AutoConfig

    fields = dict(known.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if layers is not None and layers < config.num_hidden_layers:
        cut = {
            name: list(kinds)[:layers]
            for name in ("layer_types", "mlp_layer_types")
            if (kinds := getattr(config, name, None))
        }
        fields |= {**cut, "num_hidden_layers": layers}
        config = AutoConfig.for_model(config.model_type, **fields)
    return config


def depths(config) -> tuple[int, int, int] | None:
    """(a, b, times): a model of N layers is one of `a` layers and `times` more of what those of `b` have beyond `a`.

    None where its layers do not repeat so, or are too few for it to be worth while.
    """
    layers = config.num_hidden_layers
    kinds = [getattr(config, name, None) or [None] * layers for name in ("layer_types", "mlp_layer_types")]
    pattern = list(zip(*kinds, strict=True))
    for period in range(1, layers // 3 + 1):
        prefix = next((start for start in range(layers) if pattern[start:-period] == pattern[start + period :]), layers)
        first = prefix + period
        first += (layers - first) % period
        if first + period < layers:
            return first, first + period, (layers - first) // period
    return None


def parameters(known: Architecture) -> tuple[int, int]:
    """How many parameters: of the layers, and of embeddings and head."""
    import torch
    from transformers import AutoModelForCausalLM

    def count(layers: int | None) -> tuple[int, int]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(transformers_config(known, layers))
        every = {id(p): p.numel() for p in model.parameters()}
        ends = {
            id(p): p.numel()
            for m in (model.get_input_embeddings(), model.get_output_embeddings())
            for p in m.parameters()
        }
        return sum(every.values()) - sum(ends.values()), sum(ends.values())

    found = depths(transformers_config(known))
    if found is None:
        return count(None)
    (one, ends), (two, _) = count(found[0]), count(found[1])
    return one + found[2] * (two - one), ends


def cache_bytes(known: Architecture) -> tuple[float, float]:
    """Bytes of K and V a token and of recurrent state a trajectory, BF16, as a serving engine keeps them."""
    config = transformers_config(known)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attention, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    if getattr(config, "kv_lora_rank", None):
        token = attention * 2.0 * (config.kv_lora_rank + config.qk_rope_head_dim)
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = attention * 4.0 * config.num_key_value_heads * width
    state = 0.0
    if linear:
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        heads = config.linear_num_value_heads
        channels = 2 * config.linear_num_key_heads * keys + heads * values
        state = linear * (4.0 * heads * keys * values + 2.0 * channels * (config.linear_conv_kernel_dim - 1))
    return token, state
