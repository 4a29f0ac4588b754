"""The student as a whole model: loading, its own log-probs with stock attention, its bits' checksum, saving.

Everything that runs segment by segment is elsewhere; here is what the cut path is compared with, and what is published.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_thundersync.engines.weight_bits import Bits, adapter_bits, weight_bits
from skyrl_thundersync.learner.accumulate import trainable
from skyrl_thundersync.learner.attention import implementation
from skyrl_thundersync.learner.kernel_choice import Choice, choose
from skyrl_thundersync.learner.segments import SegmentModel

if TYPE_CHECKING:
    from skyrl_thundersync.learner.rank import RankSpec
    from skyrl_thundersync.options.schema import LoraSettings

STOCK_ATTENTION = "sdpa"
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What of a model on the hub is fetched: weights, configurations, tokenizer."""


def student_folder(name: str) -> Path:
    """The folder of a student's files: `name` itself, or the snapshot of that name on the hub, fetched where it is missing.

    Raises FileNotFoundError where neither is there.
    """
    folder = Path(name)
    if not folder.is_dir() and not name.startswith(("/", ".")):
        try:
            folder = Path(snapshot_download(name, allow_patterns=FILES))
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
            raise FileNotFoundError(
                f"student model {name}: there is no such folder, and the hub gave no such model: {error}"
            ) from error
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"student model folder {folder} has no config.json")
    return folder


def load_student(spec: RankSpec) -> tuple[torch.nn.Module, Choice]:
    """The student in eval mode with cut attention, and by which kernel; with LoRA the adapter alone is trainable."""
    dtype = getattr(torch, spec.learner.dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(
            f"thundersync.learner.dtype={spec.learner.dtype!r}; known are bfloat16, float32 (float64 in tests)"
        )
    kernel = choose(AutoConfig.from_pretrained(spec.model_path), spec.device, dtype)
    # grouped expert kernels take no FP64
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(
        spec.model_path, dtype=dtype, attn_implementation=implementation(kernel.name), local_files_only=True, **experts
    )
    return prepared(model.to(spec.device), spec.lora), kernel


def prepared(model: torch.nn.Module, lora: LoraSettings | None) -> torch.nn.Module:
    """The model in eval mode, all of it trainable, or wrapped with an adapter that alone is."""
    model = model.eval()
    if lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model  # slow to import, and only adapters need it

    torch.manual_seed(0)  # every rank starts from the same adapter
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()


def stock_logps(
    causal_lm: torch.nn.Module, precision: Callable[[], AbstractContextManager], ids: list[int]
) -> list[float]:
    """log π of ids[1:], each given all before it, by one plain forward with stock attention within `precision`."""
    with torch.no_grad(), _stock_attention(causal_lm), precision():
        ids_1n = torch.tensor([ids], device=causal_lm.device)
        logits_nV = causal_lm(input_ids=ids_1n, use_cache=False).logits[0, :-1]
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    return torch.log_softmax(logits_nV, -1).gather(-1, ids_1n[0, 1:, None])[:, 0].tolist()


@contextmanager
def _stock_attention(causal_lm: torch.nn.Module) -> Iterator[None]:
    """Within it the model attends as Transformers ships it."""
    own = causal_lm.config._attn_implementation
    causal_lm.set_attn_implementation(STOCK_ATTENTION)
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(own)


def checksum(model: torch.nn.Module) -> tuple[int, ...]:
    """One integer per trainable parameter, of its bits: any single changed element changes it."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    sums = [p.detach().view(words[p.element_size()]).sum(dtype=torch.int64) for _, p in trainable(model)]
    return tuple(torch.stack(sums).tolist())


def published_bits(model: torch.nn.Module, spec: RankSpec) -> Bits:
    """The bits (engines/weight_bits.py) of what `save_student` writes, from the parameters themselves: not from the files."""
    dtype = getattr(torch, spec.learner.dtype)
    if spec.lora is None:
        return weight_bits(model.state_dict().items(), dtype)
    from peft import get_peft_model_state_dict

    return adapter_bits(get_peft_model_state_dict(model).items(), spec.lora.alpha / spec.lora.rank, dtype)


def cut_gap(segments: SegmentModel, causal_lm: torch.nn.Module, spec: RankSpec) -> float:
    """Largest log-prob difference (nats) between the cut path and stock attention on fixed tokens.

    Raises NotImplementedError when it is beyond rounding: this model does something in between that the cut misses.
    """
    n, rows = 48, segments.rows
    ids = [(7 + 31 * i * i) % rows for i in range(n)]
    parent, cut = None, []
    for a, b in ((0, 17), (17, 18), (18, n - 1)):
        parent = segments.segment(parent, ids[a:b], None)
        hidden = segments.forward(parent, grad=False).hidden
        with torch.no_grad():
            logits = causal_lm.get_output_embeddings()(hidden[0]).double()
        own = torch.tensor(ids[a + 1 : b + 1], device=logits.device)
        cut += torch.log_softmax(logits, -1).gather(-1, own[:, None])[:, 0].tolist()
    gap = max(abs(a - b) for a, b in zip(cut, stock_logps(causal_lm, segments.precision, ids), strict=True))
    limit = {"float64": 1e-9, "float32": 1e-2}.get(spec.learner.dtype, 1.0)
    if not gap <= limit:
        raise NotImplementedError(
            f"student {spec.model_path}: log-probs through cut states differ from the model's own by {gap:.3g} "
            f"(limit {limit}); this model cannot be cut into segments exactly"
        )
    return gap


def save_student(model: torch.nn.Module, spec: RankSpec, target: Path) -> None:
    """Write the model (or, with LoRA, the PEFT adapter) as safetensors with the tokenizer's files in place of `target`."""
    part, old = target.with_name(target.name + ".part"), target.with_name(target.name + ".old")
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    for file in sorted(Path(spec.model_path).iterdir()):
        # An adapter is no model: config.json beside it would say that it is.
        beside = _of_tokenizer(file.name) if spec.lora else not _of_weights(file.name)
        if file.is_file() and beside and not (part / file.name).exists():
            shutil.copy2(file, part / file.name)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _of_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", ".index.json"))


def _of_tokenizer(name: str) -> bool:
    """Whatever tokenizers of the Hugging Face format are made of, the chat template included."""
    beginnings = (
        "tokenizer",
        "special_tokens_map",
        "added_tokens",
        "vocab",
        "merges",
        "chat_template",
        "sentencepiece",
    )
    return name.startswith(beginnings) or name.endswith((".model", ".jinja", ".tiktoken"))
