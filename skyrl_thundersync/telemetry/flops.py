"""Model FLOPs of learner updates, counted by formula, and active MFU (PAPER.md, "Set-up": F_train / (T_step · Σ_d P_d)).

A multiply-add is two FLOPs. Counted once, whatever the schedule runs again: every token of the batch, a group's prompt once;
attention over the causal pairs that exist; the language-model head on scored tokens only. A backward costs two forwards, or,
through weights that an adapter leaves frozen, one: only the input's gradient is needed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MOE = ("qwen3_moe",)
LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")

PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.4, "H100": 989.4, "H800": 989.4, "A100": 312.0}
"""Dense BF16 peak by a part of the CUDA device's name (SXM parts)."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix: its module's name, sizes, and how many layers (or experts) of it a token passes."""

    name: str
    rows: int
    columns: int
    times: float = 1.0

    @property
    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * self.rows * self.columns * self.times


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs of a model. `token`: weights of the layers, a token; `head`: a scored token; `pair`: attention, a
    (query, key) pair over all layers; `state`: recurrent states, a token; `adapter`: LoRA's own weights, a token."""

    token: float
    head: float
    pair: float
    state: float = 0.0
    adapter: float = 0.0

    def train_flops(self, groups: Iterable[tuple[int, Sequence[int]]], n_scored: int) -> float:
        """Forward and backward FLOPs of a batch.

        Args:
            groups: per group its prompt's tokens and the tokens of each of its trajectories, prompt included.
            n_scored: N_k.
        """
        tokens = pairs = 0
        for prompt, lengths in groups:
            tokens += prompt + sum(n - prompt for n in lengths)
            pairs += _pairs(prompt) + sum(_pairs(n) - _pairs(prompt) for n in lengths)
        through = 2.0 if self.adapter else 3.0
        own = 3.0 * (self.pair * pairs + (self.state + self.adapter) * tokens)
        return through * (self.token * tokens + self.head * n_scored) + own


def _pairs(n: int) -> int:
    return n * (n + 1) // 2


def cost(config: Mapping[str, Any], lora_rank: int = 0, targets: str | Sequence[str] = "all-linear") -> Cost:
    """FLOPs by formula, from a model's config.json (of its language part).

    Raises:
        NotImplementedError: a family whose formula is not here.
    """
    c = config.get("text_config", config)
    family = c.get("model_type", config.get("model_type"))
    if family not in (*DENSE, *MOE, *LATENT, *HYBRID):
        raise NotImplementedError(f"no FLOP formula for models of type {family!r}: MFU cannot be counted")
    d, layers = c["hidden_size"], c["num_hidden_layers"]
    linears, pair, state = [], 0.0, 0.0
    for index in range(layers):
        if family in LATENT:
            more, per_pair = _latent(c)
        elif family in HYBRID and _kind(c, index) == "linear_attention":
            more, per_pair = _gated_delta(c), 0.0
            state += 6.0 * c["linear_num_value_heads"] * c["linear_key_head_dim"] * c["linear_value_head_dim"]
        else:
            more, per_pair = _attention(c, gate=family in HYBRID)
        linears += more + _mlp(c, index)
        pair += per_pair
    adapter = 0.0
    if lora_rank:
        adapted = [w for w in linears if w.name != "gate" and (targets == "all-linear" or w.name in targets)]
        adapter = sum(2.0 * lora_rank * (w.rows + w.columns) * w.times for w in adapted)
    return Cost(sum(w.flops for w in linears), 2.0 * d * c["vocab_size"], pair, state, adapter)


def _kind(c: Mapping[str, Any], index: int) -> str:
    if kinds := c.get("layer_types"):
        return kinds[index]
    return "full_attention" if (index + 1) % c.get("full_attention_interval", 4) == 0 else "linear_attention"


def _attention(c: Mapping[str, Any], gate: bool) -> tuple[list[Linear], float]:
    d, heads = c["hidden_size"], c["num_attention_heads"]
    size = c.get("head_dim") or d // heads
    kv = c.get("num_key_value_heads") or heads
    linears = [
        Linear("q_proj", d, heads * size * (2 if gate else 1)),
        Linear("k_proj", d, kv * size),
        Linear("v_proj", d, kv * size),
        Linear("o_proj", heads * size, d),
    ]
    return linears, 4.0 * heads * size


def _latent(c: Mapping[str, Any]) -> tuple[list[Linear], float]:
    d, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value, latent = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    linears = [
        Linear("kv_a_proj_with_mqa", d, latent + rope),
        Linear("kv_b_proj", latent, heads * (nope + value)),
        Linear("o_proj", heads * value, d),
    ]
    if c.get("q_lora_rank"):
        linears += [
            Linear("q_a_proj", d, c["q_lora_rank"]),
            Linear("q_b_proj", c["q_lora_rank"], heads * (nope + rope)),
        ]
    else:
        linears.append(Linear("q_proj", d, heads * (nope + rope)))
    return linears, 2.0 * heads * (nope + rope + value)


def _gated_delta(c: Mapping[str, Any]) -> list[Linear]:
    d, values = c["hidden_size"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    return [
        Linear("in_proj_qkvz", d, 2 * keys + 2 * values),
        Linear("in_proj_ba", d, 2 * c["linear_num_value_heads"]),
        Linear("conv1d", 2 * keys + values, c["linear_conv_kernel_dim"]),
        Linear("out_proj", values, d),
    ]


def _mlp(c: Mapping[str, Any], index: int) -> list[Linear]:
    d = c["hidden_size"]
    experts = next((c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if c.get(k)), 0)
    if kinds := c.get("mlp_layer_types"):
        dense = kinds[index] == "dense"
    else:
        dense = index < (c.get("first_k_dense_replace") or 0) or index in (c.get("mlp_only_layers") or ())
    if dense or not experts:
        return _gated(d, c["intermediate_size"], 1)
    active = c["num_experts_per_tok"] + c.get("n_shared_experts", 0)
    linears = [Linear("gate", d, experts), *_gated(d, c["moe_intermediate_size"], active)]
    if c.get("shared_expert_intermediate_size"):
        linears += _gated(d, c["shared_expert_intermediate_size"], 1)
    return linears


def _gated(d: int, inner: int, times: int) -> list[Linear]:
    return [
        Linear("gate_proj", d, inner, times),
        Linear("up_proj", d, inner, times),
        Linear("down_proj", inner, d, times),
    ]


def peak_flops(device_name: str) -> float | None:
    """Dense BF16 peak of one CUDA device in FLOP/s; None when its name is not known here."""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in device_name), None)


def active_mfu(train_flops: float, step_s: float, peaks: Sequence[float]) -> float:
    """F_train / (T_step · Σ_d P_d): learner model FLOPs over the whole update's wall time, over all learner devices."""
    return train_flops / (step_s * sum(peaks))
