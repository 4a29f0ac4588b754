"""What a vLLM worker does and says about the weights it holds; vLLM mixes `WeightWorker` into its own worker class.

Loading goes through vLLM's `reload_weights`. The answer to "what do you hold" is read off the tensors that its kernels read,
after everything that vLLM made of the checkpoint. On a CPU vLLM packs matrices into memory that cannot be read back; what
went into the packing is summed at that moment (`sum_what_is_packed`).

Of a tensor that every tensor-parallel worker holds whole, the first one answers; of one that is split, each for its part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from skyrl_thundersync.engines.weight_bits import MODULUS, added, group_of, read_weights, sums

EXTENSION = f"{__name__}.WeightWorker"


class WeightWorker:
    """Methods for `collective_rpc`, by name; answers are JSON."""

    def load_published(self, path: str) -> None:
        """Reload the weights from the checkpoint folder `path`.

        vLLM's CPU kernels keep packed copies of the matrices. `reload_weights` packs them again, except an output head tied
        to the embeddings: without the second step it would go on serving the old version.
        """
        self.model_runner.reload_weights(weights_iterator=read_weights(path))
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model = language_model(self.model_runner.get_model())
        if model.config.get_text_config().tie_word_embeddings:
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)

    def held_weights(self) -> dict[str, list[int]]:
        """The bits of the language model's weights that this worker answers for (weight_bits.Bits)."""
        model = language_model(self.model_runner.get_model())
        return _as_json(added(_held(model, self.model_config.dtype)))

    def held_adapter(self, adapter_id: int | None = None) -> dict[str, Any]:
        """The adapter that its kernels read: {"bits": weight_bits.Bits, "empty": modules that took nothing of it}.

        adapter_id: vLLM's number of it; None stands for the only one there is. Raises RuntimeError where it is in no slot.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        held = [number for number in manager.lora_index_to_id if number is not None]
        adapter_id = adapter_id if adapter_id is not None or len(held) != 1 else held[0]
        if adapter_id not in held:
            raise RuntimeError(f"the kernels hold the adapters {held} and not {adapter_id}")
        slot, bits, empty = manager.lora_index_to_id.index(adapter_id), [], []
        for name, module in manager.modules.items():
            parts = list(_held_adapter(module, slot))
            bits += [(group_of(f"{name}.lora"), part) for part in parts]
            if not any(map(any, parts)):
                empty.append(name)
        return {"bits": _as_json(added(bits)), "empty": empty}

    def take_text_names(self) -> None:
        """Let vLLM's class take adapters under the names that the language model alone gives its modules.

        Of a vision-language checkpoint the learner trains the language model, whose PEFT names begin with `model.layers`.
        vLLM would look for them outside of its language model, find none there, and serve without the adapter.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        model = self.model_runner.get_model()
        inner = language_model(model)
        if inner is model:
            return
        path = next(name for name, module in model.named_modules() if module is inner)
        own = WeightsMapper(orig_to_new_prefix={"model.layers.": f"{path}.model.layers."})
        model.hf_to_vllm_mapper = type(model).hf_to_vllm_mapper | own


def language_model(model: torch.nn.Module) -> torch.nn.Module:
    """vLLM's language model inside `model`, or itself."""
    from vllm.model_executor.models.interfaces import supports_multimodal

    return model.get_language_model() if supports_multimodal(model) else model


def sum_what_is_packed() -> None:
    """Make vLLM's packing of matrices for CPU kernels leave the sums of what it packed. Call it before a model is loaded."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if hasattr(pack, "__wrapped__"):
        return

    @functools.wraps(pack)
    def sum_and_pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        own = None if weight.is_meta else _own_part(layer, "weight", weight)
        pack(layer, remove_weight)
        layer.packed_bits = (0, 0) if own is None else sums(own, weight.dtype)

    utils.dispatch_cpu_unquantized_gemm = sum_and_pack


def _held(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, int]]]:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    seen = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MLAAttention):
            if id(module) not in seen:
                yield group_of(f"{path}.kv_b_proj"), _apart(module)
            seen.add(id(module))
            continue
        for name, parameter in module.named_parameters(recurse=False):
            group = group_of(f"{path}.{name}")
            if (group, id(parameter)) in seen or not parameter.is_floating_point():
                continue
            seen.add((group, id(parameter)))
            looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
            if name == "weight" and hasattr(module, "packed_bits") and not looked_up:
                yield group, module.packed_bits
            elif (own := _own_part(module, name, parameter)) is not None:
                yield group, sums(own, dtype)


def _apart(attention: torch.nn.Module) -> tuple[int, int]:
    """By how much the sums of latent attention's copies differ from those of the projection that they were made of.

    Decoding reads `kv_b_proj` as two matrices of its own, W_UK and W_UV, which vLLM makes after loading: (0, 0) when both are
    of the weights that the projection holds.
    """
    made = [getattr(attention, name, None) for name in ("W_UK_T", "W_UV")]
    if None in made:  # a kernel that reads the projection itself
        return 0, 0
    whole = sums(attention.kv_b_proj.weight, made[0].dtype)
    parts = [sums(part, part.dtype) for part in made]
    return tuple((sum(part[i] for part in parts) - whole[i]) % MODULUS for i in (0, 1))


def _own_part(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of a parameter that this worker answers for, or None."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    rank = get_tensor_model_parallel_rank()
    if rank == 0:
        return parameter
    if isinstance(module, LinearBase):
        whole = isinstance(module, ReplicatedLinear) or module.tp_size == 1
        if whole or (isinstance(module, RowParallelLinear) and name == "bias"):
            return None
        if isinstance(module, QKVParallelLinear) and rank % module.num_kv_head_replicas:
            return parameter[: module.num_heads * module.head_size]  # its K and V are those of the worker before
        return parameter
    if isinstance(module, VocabParallelEmbedding):
        return parameter
    split = getattr(parameter, "weight_loader", default_weight_loader) is not default_weight_loader
    return parameter if split else None


def _held_adapter(module: torch.nn.Module, slot: int) -> Iterator[tuple[int, int]]:
    """The sums of each matrix of a LoRA layer that this worker answers for."""
    from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear

    layer = getattr(module, "base_layer", None)
    if not isinstance(layer, LinearBase):
        return  # adapters are for linear layers
    first, alone = module.tp_rank == 0, isinstance(layer, ReplicatedLinear) or module.tp_size == 1
    sharded = module.lora_config.fully_sharded_loras
    rows = isinstance(layer, RowParallelLinear)
    split = {"a": not alone and (rows or sharded), "b": not alone and (not rows or sharded)}
    for index, (a, b) in enumerate(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)):
        repeated = isinstance(layer, QKVParallelLinear) and index > 0 and module.tp_rank % layer.num_kv_head_replicas
        if first or split["a"]:
            yield sums(a[slot], a.dtype)
        if first or (split["b"] and not repeated):
            yield sums(b[slot], b.dtype)


def _as_json(bits: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {group: list(pair) for group, pair in bits.items()}


sum_what_is_packed()
