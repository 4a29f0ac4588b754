"""Tiny random checkpoints of the classes that the presets' models have."""

import torch
from models import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
GATED = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,  # vLLM's CPU kernel takes no other
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
PLAIN = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}


def save_family(family: str, folder, dtype=torch.bfloat16) -> str:
    """A checkpoint with a tokenizer. "qwen3_5" is of a vision-language class; its language model alone is trained."""
    torch.manual_seed(0)
    if family == "qwen3_5":
        special = {
            "image_token_id": 316,
            "video_token_id": 317,
            "vision_start_token_id": 318,
            "vision_end_token_id": 319,
        }
        config = AutoConfig.for_model(family, text_config={**SHAPE, **GATED}, vision_config=VISION, **special)
        model = Qwen3_5ForConditionalGeneration(config)
    else:
        config = AutoConfig.for_model(family, **SHAPE, **{"glm4_moe_lite": LATENT, "qwen3": PLAIN}[family])
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0 if p.dim() > 1 else 1.0)
    model.generation_config.eos_token_id = model.config.eos_token_id = byte_tokenizer().eos_token_id
    model.to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
