"""Cut states: what a later segment needs of an earlier one, per layer, through Transformers' Cache seam.

| layer kind        | cut state                     | how a later segment reads it                                     |
|-------------------|-------------------------------|------------------------------------------------------------------|
| full_attention    | K, V of the segment's tokens  | piece by piece in `attention.SplitCausal`, adjoints deposited there |
| the same, MLA     | compressed latents, rope key  | concatenated leaves: the model expands them itself               |
| linear_attention  | conv and recurrent state      | leaves that replace the state (gated-delta only)                 |

Everything else is refused by name when the model loads: its cut would not be exact. No model code is touched.
"""

from __future__ import annotations

import sys

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from skyrl_thundersync.learner.attention import Past

ATTENTION, LATENT, GATED_DELTA = "attention", "latent attention", "gated-delta linear attention"


def layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """The cut-state kind of each layer of the text model `config` describes.

    Raises NotImplementedError naming the model type and the feature whose segments cannot be cut exactly.
    """
    config = config.get_text_config()
    name = config.model_type

    def refuse(what: str):
        raise NotImplementedError(
            f"student model type {name!r}: {what} cannot be cut into segments exactly; supported are full attention "
            f"(grouped queries and MLA included) and gated-delta linear attention"
        )

    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "linear_attention"):
            refuse(f"layer {index} of kind {kind!r}")
        if kind == "linear_attention" and not hasattr(config, "linear_key_head_dim"):
            refuse(f"layer {index}, a linear layer that is not gated-delta,")
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        refuse(f"sliding-window attention (window {config.sliding_window})")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("K/V shared between layers")
    if getattr(config, "index_topk", None):
        refuse("indexed sparse attention")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        refuse(f"rope type {rope['rope_type']!r}, which depends on the length of the call,")
    for attribute in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, attribute, None) not in (None, 1.0):
            refuse(f"an output head with {attribute} = {getattr(config, attribute)}")
    attention = LATENT if getattr(config, "kv_lora_rank", None) else ATTENTION
    return tuple(attention if kind == "full_attention" else GATED_DELTA for kind in kinds)


class CutAttention(DynamicLayer):
    """One attention layer during one segment's forward.

    `length`: tokens before this segment. `past`: None, or for MLA the concatenated earlier latents as leaves
    ([1, 1, length, ·] each). `pasts`: what attention meets besides (attention.py). `own`: afterwards what this segment
    produced, [keys, values] or [latent, rope key].
    """

    def __init__(self, length: int, past: list[torch.Tensor] | None, pasts: tuple[Past, ...] = ()):
        super().__init__()
        self.length, self.past, self.pasts, self.own, self.is_initialized = length, past, pasts, None, True
        self.met = not pasts

    def meet(self) -> tuple[Past, ...]:
        """What attention asks for when it gets this layer's keys."""
        self.met = True
        return self.pasts

    def update(self, key_states, value_states, *args, **kwargs):
        if self.own is None:  # else a layer runs again in its backward
            self.own = [key_states, value_states]
        if self.pasts:
            key_states.cut = self  # taken off again where it is met: it would keep itself alive
        if self.past is None:
            return key_states, value_states
        return torch.cat([self.past[0], key_states], -2), torch.cat([self.past[1], value_states], -2)

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1


class CutGatedDelta(LinearAttentionLayer):
    """One gated-delta layer during one segment's forward.

    `past`: None or [conv state [1, C, width], recurrent state [1, Hv, Dk, Dv]] after the previous segment, as leaves.
    `own`: the same two after this segment.
    """

    def __init__(self, past: list[torch.Tensor] | None):
        super().__init__()
        self.past, self.own = past, [None, None]
        self.record_past = True  # keeps one-token segments off the in-place decode kernel, which has no backward
        if past is not None:
            self.conv_states[0], self.recurrent_states[0] = past
            self.has_previous_state[0] = True
            self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True

    def update_conv_state(self, conv_states, state_idx=0, conv_kernel_size=None, **kwargs):
        width = conv_kernel_size or conv_states.shape[-1]
        if self.past is not None:
            full = torch.cat([self.past[0], conv_states], -1)
        else:
            full = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        if self.own[0] is None:  # else a layer runs again in its backward
            self.own[0] = full[..., -width:].clone()  # a view would keep all of `full`
        return full

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        if self.own[1] is None:
            self.own[1] = recurrent_states
        return recurrent_states


def step_by_chunks(body: torch.nn.Module) -> None:
    """Let segments of one token take the chunked gated-delta rule too, as longer ones do, for all models of its module.

    Transformers sends a single token after a state to a recurrent rule meant for decoding. With fused kernels installed
    that one has no backward; the chunked rule has, for initial and final states.
    """
    for module in {sys.modules[type(part).__module__] for part in body.modules()}:
        if hasattr(module, "torch_recurrent_gated_delta_rule"):
            module.torch_recurrent_gated_delta_rule = module.torch_chunk_gated_delta_rule


def cut_cache(
    kinds: tuple[str, ...],
    length: int,
    leaves: list[list[torch.Tensor] | None],
    pasts: dict[int, tuple[Past, ...]],
) -> Cache:
    """The cache of one segment's forward after `length` tokens; `leaves[i]`, `pasts[i]`: what layer i's class asks for."""
    layers = [
        CutGatedDelta(past) if kind == GATED_DELTA else CutAttention(length, past, pasts.get(index, ()))
        for index, (kind, past) in enumerate(zip(kinds, leaves, strict=True))
    ]
    return Cache(layers=layers)


def require_met(cache: Cache) -> None:
    """After a forward. Raises RuntimeError when a layer with a past never asked for it: that model routes attention
    elsewhere, and its result would be wrong."""
    left = [index for index, layer in enumerate(cache.layers) if not getattr(layer, "met", True)]
    if left:
        raise RuntimeError(f"attention layers {left} did not go through the cut attention: this model is not supported")
