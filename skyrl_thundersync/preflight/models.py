"""Models and limits that a configuration names, checked on disk before anything starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.objectives.registry import of

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def models(cfg: TrainConfig) -> dict[str, str]:
    """Option -> folder or hub name, for every model of the run."""
    named = {"trainer.policy.model.path": cfg.trainer.policy.model.path}
    if of(cfg.thundersync).needs_teacher:
        named["thundersync.teacher.model"] = cfg.thundersync.teacher.model
    return named


def model_problems(option: str, path: str | None) -> list[str]:
    """What a model lacks: its folder, config.json, tokenizer or weights. Hub names are taken on trust."""
    if not path:
        return [f"{option} is not set: name a model folder or hub name."]
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if _HUB_NAME.match(path) and not folder.exists():
            return []
        return [f"{option}={path!r}: there is no such model folder (looked at {folder.absolute()}). Correct the path."]
    if (base := adapter_base(folder)) is not None:
        return [
            f"{option}={path!r} holds a LoRA adapter over {base or 'a model that it does not name'}, not a model. Name that "
            f"model here; to evaluate the adapter, `skyrl eval --adapter {path}`."
        ]
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(
            f"{option}={path!r}: the folder holds no config.json. Save the model there with save_pretrained."
        )
    problems += [f"{option}: {problem}" for problem in broken_files(folder)]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        problems.append(f"{option}={path!r}: the folder holds no tokenizer. Save it there with save_pretrained.")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        problems.append(f"{option}={path!r}: the folder holds no weights ({', '.join(_WEIGHTS)}).")
    return problems


def broken_files(folder: Path) -> Iterator[str]:
    """What of a model folder's configuration, tokenizer and weights is there and cannot be read, each with its path."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", _INDEX):
        if (file := folder / name).is_file():
            try:
                held = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                yield f"{file} is not JSON ({error}). Save or copy it again."
            else:
                named = set(held.get("weight_map", {}).values()) if isinstance(held, dict) else set()
                for missing in sorted(named - {found.name for found in folder.iterdir()}):
                    yield f"{file} names {missing}, which is not there. Copy it, too."
                if not isinstance(held, dict):
                    yield f"{file} holds no mapping. Save or copy it again."
    if (file := folder / "tokenizer.json").is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            yield f"{file} is no tokenizer ({error}). Save or copy it again."
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):
                pass
        except SafetensorError as error:
            size = file.stat().st_size
            yield f"{file} is not whole ({error}; {size:,} bytes are there). Save or copy it again."


def model_folder(path: str) -> Path | None:
    """Where a model's files are: its folder, or its snapshot in the local hub cache; None when it is not here yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json") if _HUB_NAME.match(path) else None
    return Path(cached).parent if isinstance(cached, str) else None


def served_bytes(path: str, width: int) -> int | None:
    """Bytes of a model's weights as they are served at `width` bytes a parameter, or as stored where they are quantised."""
    parameters, config = model_parameters(path), model_config(path)
    if parameters is None or "quantization_config" not in (config or {}):
        return parameters and parameters * width
    return sum(file.stat().st_size for file in model_folder(path).glob("*.safetensors"))


def model_parameters(path: str | None) -> int | None:
    """Parameters of a model, from the headers of its safetensors files; None where it is not here or in another format."""
    folder = model_folder(path) if path else None
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if not files:
        return None
    total = 0
    for file in files:
        with safe_open(file, "np") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def adapter_base(folder: Path) -> str | None:
    """The model that the PEFT adapter in `folder` is over, "" where it does not say; None where `folder` holds none.

    Raises ConfigError when its adapter_config.json cannot be read.
    """
    file = folder / "adapter_config.json"
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}. Export the adapter again.") from error


def model_config(path: str) -> dict[str, Any] | None:
    """A model's config.json: from its folder, or from the local hub cache; None when it is not on this machine yet."""
    folder = model_folder(path)
    file = folder and folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else None


def longest_context(config: Mapping[str, Any]) -> int | None:
    """`max_position_embeddings`, of the language model inside where the model is multimodal; None if unstated."""
    return config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")


def turn_limits(cfg: TrainConfig) -> dict[str, int]:
    """Tokens that one turn may take, by the block that says so: of training and, where the run evaluates, of evaluation."""
    limits = {"sampling_params": cfg.generator.sampling_params.max_generate_length}
    if cfg.trainer.eval_interval > 0:
        limits["eval_sampling_params"] = cfg.generator.eval_sampling_params.max_generate_length
    return limits


def longest_sampled(cfg: TrainConfig) -> int:
    """Tokens of the longest context that a rollout replica may have to hold: input, and one turn of either kind."""
    return cfg.generator.max_input_length + max(turn_limits(cfg).values())


def context_problems(cfg: TrainConfig, option: str, path: str, turns: Mapping[str, int] | None = None) -> list[str]:
    """Whether a turn at the longest allowed input still fits the model: input + one turn ≤ its positions.

    turns: tokens of a turn by the block that says so; default `turn_limits`.
    """
    turns = turns or turn_limits(cfg)
    block = max(turns, key=turns.__getitem__)
    context, turn = cfg.generator.max_input_length, turns[block]
    longest = context + turn
    sum_text = (
        f"generator.max_input_length + generator.{block}.max_generate_length = {context} + {turn} = {longest} tokens"
    )
    problems = []
    config = model_config(path)
    limit = longest_context(config) if config else None
    if limit is not None and longest > limit:
        problems.append(f"{sum_text}, but {option}={path!r} has positions for {limit}. Lower one of the two.")
    engine_limit = cfg.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    if option == "trainer.policy.model.path" and engine_limit is not None and longest > engine_limit:
        problems.append(
            f"{sum_text}, but generator.inference_engine.engine_init_kwargs.max_model_len is {engine_limit}. "
            "Raise it, or lower one of the two."
        )
    return problems
