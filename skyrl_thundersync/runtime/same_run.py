"""Whether a run can go on from a checkpoint: what the two must share, and what else has changed.

What the optimizer has gathered means something for one objective only, on one course through the data. So what makes these
is written down with a checkpoint and compared; all else may change, and is said. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.objectives import registry as objectives
from skyrl_thundersync.preflight.models import model_folder
from skyrl_thundersync.process.durable import sha256
from skyrl_thundersync.runtime.checkpoint import CheckpointError, choose, read

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

OWN = (
    "thundersync.run_dir",
    "thundersync.replace_run",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.log_path",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.run_name",
)
"""Options that say where a run is, not what it does."""
WEIGHTS = (".safetensors", ".bin", ".gguf")
WINDOWS, WINDOW = 256, 1 << 12
"""How many places of a file of weights are read, and how many bytes at each: training changes nearly every one."""


def run_facts(cfg: TrainConfig) -> dict[str, Any]:
    """Options that a resumed run must share: without them the data order, the objective or the adapter would change."""
    ts, policy = cfg.thundersync, cfg.trainer.policy
    lora, objective = policy.model.lora, objectives.of(ts)
    values = vars(objective)
    targets = lora.target_modules
    return {
        "thundersync.objective": ts.objective,
        "thundersync.objective_options": {name: values[name] for name in values if name not in objectives.OF_THE_GROUP},
        "thundersync.teacher.model": identity(ts.teacher.model) if objective.needs_teacher else None,
        "thundersync.grpo.law": values.get("law"),
        "thundersync.grpo.epsilon": values.get("epsilon"),
        "trainer.policy.optimizer_config.adam_betas": list(policy.optimizer_config.adam_betas),
        "trainer.seed": cfg.trainer.seed,
        "trainer.train_batch_size": cfg.trainer.train_batch_size,
        "trainer.max_prompt_length": cfg.trainer.max_prompt_length,
        "trainer.policy.model.lora": [lora.rank, lora.alpha, targets if isinstance(targets, str) else list(targets)]
        if lora.rank
        else None,
        "data.train_data": [_fingerprint(name) for name in cfg.data.train_data],
    }


def identity(model: str) -> dict[str, str | None]:
    """A model by its name and, where it is on this machine, its content: the same weights elsewhere are the same model.

    content: hex digest of config.json and, of every file of weights, its size and bytes from its begin to its end, at
    `WINDOWS` places. Some milliseconds a file, however large.
    """
    folder = model_folder(model)
    if folder is None:
        return {"model": model, "content": None}
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in WEIGHTS:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            for window in _windows(file):
                digest.update(window)
    return {"model": model, "content": digest.hexdigest()[:16]}


def check_run(path: Path, manifest: dict[str, Any], now: dict[str, Any]) -> None:
    """Whether a run can go on from a checkpoint: `now` holds its facts (`run_facts`, or a rank's own description).

    Raises CheckpointError naming every difference.
    """
    different = []
    for name, value in now.items():
        if name not in manifest["run"]:
            different.append(f"{name} is not recorded there")
            continue
        saved = manifest["run"][name]
        if name == "parameters":
            different += _shape_differences(saved, value)
        elif not _same(saved, value):
            different.append(f"{name} was {_short(saved)} and is {_short(value)}")
    if different:
        raise CheckpointError(
            f"checkpoint {path} is of another run: {'; '.join(different)}. Resume it with the options it was trained with, "
            f"or start a new run from its weights: trainer.resume_mode=none and trainer.policy.model.path={path}/student"
        )


def resume_problems(cfg: TrainConfig) -> list[str]:
    """Why the resume that a configuration asks for cannot work; empty when it can. Reads no file's hash."""
    try:
        path = choose(Path(cfg.trainer.ckpt_path), cfg.trainer.resume_mode, cfg.trainer.resume_path)
        if path is not None:
            check_run(path, read(path, hashes=False), run_facts(cfg))
    except CheckpointError as error:
        return [str(error)]
    return []


def changes(path: Path, cfg: TrainConfig) -> list[str]:
    """What a run does otherwise than the one that wrote a checkpoint: `option: was → is`, of every option that differs."""
    import yaml

    from skyrl_thundersync.options.schema import as_yaml

    was = dict(_leaves(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))))
    now = dict(_leaves(yaml.safe_load(as_yaml(cfg))))
    differing = [key for key in was | now if key not in OWN and was.get(key) != now.get(key)]
    return [f"{key}: {_short(was.get(key))} → {_short(now.get(key))}" for key in differing]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _windows(file: Path) -> Iterator[bytes]:
    """Bytes at places spread evenly over a file, the first and the last ones among them; all of a small file."""
    last = max(0, file.stat().st_size - WINDOW)
    with file.open("rb") as handle:
        for index in range(WINDOWS):
            handle.seek(last * index // (WINDOWS - 1))
            yield handle.read(WINDOW)


def _is_model(value: Any) -> bool:
    """Whether it is what `identity` says of a model."""
    return isinstance(value, Mapping) and value.keys() == {"model", "content"}


def _same(saved: Any, now: Any) -> bool:
    if _is_model(saved) and _is_model(now):
        whole = saved["content"] and now["content"]  # else one of them is not on its machine yet
        return saved["content"] == now["content"] if whole else saved["model"] == now["model"]
    return saved == now


def _shape_differences(saved: list, now: list) -> list[str]:
    was, has = ({name: tuple(shape) for name, shape in entries} for entries in (saved, now))
    different = [name for name in was.keys() | has.keys() if was.get(name) != has.get(name)]
    shown = [f"parameter {k} was {was.get(k, 'absent')} and is {has.get(k, 'absent')}" for k in sorted(different)[:3]]
    return shown + ([f"{len(different) - 3} more parameters differ"] if len(different) > 3 else [])


def _short(value: Any) -> str:
    if _is_model(value):
        content = value["content"] and value["content"][:12]
        return f"{value['model']} (of content {content or 'unknown'})"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _fingerprint(name: str) -> list[str]:
    """A task file by its name and content; a hub dataset by its name alone."""
    file = Path(name).expanduser()
    return [file.name, sha256(file)[:16]] if file.is_file() else [name]
