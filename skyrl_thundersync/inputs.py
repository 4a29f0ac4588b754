"""Models, tasks and limits that a configuration names, checked on disk before anything starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from skyrl_thundersync.rollout.engine_thread import EngineSpec

if TYPE_CHECKING:
    from skyrl_thundersync.config import TrainConfig

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def batch_problems(cfg: TrainConfig) -> list[str]:
    """Whether the (readable) task files hold at least one batch."""
    rows, wanted = _row_count(cfg.data.train_data), cfg.trainer.train_batch_size
    if rows is None or rows >= wanted:
        return []
    return [
        f"data.train_data has {rows} tasks and trainer.train_batch_size={wanted}: an update needs that many. Add tasks, or "
        "lower the batch size."
    ]


def _row_count(paths: list[str]) -> int | None:
    """Rows of all files together; None when one of them is a hub dataset."""
    files = [Path(path).expanduser() for path in paths]
    if not all(file.is_file() for file in files):
        return None
    return sum(1 for file in files for _ in read_rows(file))


def models(cfg: TrainConfig) -> dict[str, str]:
    """Option -> folder or hub name, for every model of the run."""
    named = {"trainer.policy.model.path": cfg.trainer.policy.model.path}
    if cfg.thundersync.objective == "opd":
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


def model_parameters(path: str | None) -> int | None:
    """Parameters of a model folder, from the headers of its safetensors files; None for a hub name or other formats."""
    folder = Path(path or "").expanduser()
    files = sorted(folder.glob("*.safetensors")) if path and folder.is_dir() else []
    if not files:
        return None
    total = 0
    for file in files:
        with safe_open(file, "np") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def model_config(path: str) -> dict[str, Any] | None:
    """A model's config.json: from its folder, or from the local hub cache; None when it is not on this machine yet."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json") if _HUB_NAME.match(path) else None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    return json.loads(file.read_text(encoding="utf-8"))


def longest_context(config: Mapping[str, Any]) -> int | None:
    """`max_position_embeddings`, of the language model inside where the model is multimodal; None if unstated."""
    return config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")


def context_problems(cfg: TrainConfig, option: str, path: str) -> list[str]:
    """Whether a turn at the longest allowed input still fits the model: input + one turn ≤ its positions."""
    turns = {"sampling_params": cfg.generator.sampling_params.max_generate_length}
    if cfg.trainer.eval_interval > 0:
        turns["eval_sampling_params"] = cfg.generator.eval_sampling_params.max_generate_length
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


def kv_cache_gib(cfg: TrainConfig) -> float:
    """K/V cache of a rollout replica without GPUs: `kv_cache_memory_bytes`, the name that vLLM gives it, or the default."""
    given = cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes")
    return EngineSpec.kv_cache_gib if given is None else given / 2**30


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of a JSON-lines or parquet file.

    Raises:
        ValueError: a line that is not a JSON object, with its number.
    """
    if path.suffix == ".parquet":
        import polars

        for index, row in enumerate(polars.read_parquet(path).iter_rows(named=True)):
            yield f"{path}, row {index}", row
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not a JSON object")
            yield where, row


def task_problems(option: str, path: str, env_class: str) -> list[str]:
    """What is wrong with a file of tasks; the first three bad rows are named. Hub datasets are taken on trust."""
    file = Path(path).expanduser()
    if file.suffix not in (".json", ".jsonl", ".parquet"):
        if _HUB_NAME.match(path.partition(":")[0]) and not file.exists():
            return []
        return [f"{option}: {path!r} is neither a .jsonl, .json or .parquet file nor a hub dataset. Correct the path."]
    if not file.is_file():
        return [f"{option}: there is no file {file.absolute()}. Correct the path."]
    problems, rows, bad = [], 0, 0
    try:
        for where, row in read_rows(file):
            rows += 1
            if wrong := row_problems(row, env_class, trained=option == "data.train_data"):
                bad += 1
                if bad <= 3:
                    problems.append(
                        f"{option}: {where} (task {row.get('task_id', 'without task_id')}): {'; '.join(wrong)}."
                    )
    except ValueError as error:
        return [*problems, f"{option}: {error}."]
    if rows == 0:
        return [f"{option}: {file} holds no tasks. Generate it again, or name another file."]
    if bad > 3:
        problems.append(f"{option}: {file}: {bad - 3} more of {rows} rows are wrong in the same way or another.")
    return problems


def row_problems(row: Mapping[str, Any], env_class: str, trained: bool) -> list[str]:
    """What one task lacks. Tasks of environments other than "terminal" need a prompt only."""
    problems = []
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, Mapping) and "content" in m for m in prompt):
        problems.append("`prompt` must be a non-empty list of chat messages with `role` and `content`")
    if row.get("env_class", env_class) != "terminal":
        return problems
    if not row.get("task_id"):
        problems.append("`task_id` is missing")
    if not str(row.get("checker") or "").strip():
        problems.append("`checker` is missing: a task without a checker has no reward")
    if trained and row.get("collect"):
        problems.append("`collect` is for evaluation: what is graded elsewhere has no reward here")
    files = row.get("files", "{}")
    try:
        files = json.loads(files) if isinstance(files, str) else files
    except json.JSONDecodeError as error:
        problems.append(f"`files` is not JSON: {error}")
        return problems
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        problems.append("`files` must map relative paths to text")
    elif any(name.startswith("/") or ".." in Path(name).parts for name in files):
        problems.append("`files` names a path outside the working folder")
    return problems
