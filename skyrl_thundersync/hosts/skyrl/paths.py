"""Options that hold paths: `~` and the quickstart's parts are expanded, whichever file or argument they came from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.registry import nearest

if TYPE_CHECKING:
    from skyrl_thundersync.options.presets import Override

_QUICKSTART = "quickstart:"
_PATH_OPTIONS = (
    "trainer.policy.model.path",
    "thundersync.teacher.model",
    "thundersync.run_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.log_path",
    "data.train_data",
    "data.val_data",
)


def placed(merged: Mapping[str, Override]) -> dict[str, Any]:
    """Option -> value, `~` and `quickstart:NAME` expanded where an option holds paths.

    Raises:
        ConfigError: the quickstart has no part of that name. Nothing is written then.
    """
    from skyrl_thundersync.quickstart.files import QuickstartFiles, materialise

    parts = [field.name for field in dataclasses.fields(QuickstartFiles)]
    held = {key: leaf for key, leaf in merged.items() if key in _PATH_OPTIONS and leaf.value is not None}
    wanted = False
    for key, leaf in held.items():
        for value in leaf.value if isinstance(leaf.value, list) else [leaf.value]:
            if value.startswith(_QUICKSTART):
                wanted = True
                if (name := value.removeprefix(_QUICKSTART)) not in parts:
                    raise ConfigError(
                        f"{key}={value!r} ({leaf.origin}): the quickstart has no such part. {nearest(name, parts)}"
                    )
    files = materialise(quickstart_folder()) if wanted else None

    def place(value: str) -> str:
        if value.startswith(_QUICKSTART):
            return str(getattr(files, value.removeprefix(_QUICKSTART)))
        return str(Path(value).expanduser()) if value.startswith("~") else value

    values = {key: leaf.value for key, leaf in merged.items()}
    for key, leaf in held.items():
        values[key] = [place(item) for item in leaf.value] if isinstance(leaf.value, list) else place(leaf.value)
    return values


def quickstart_folder() -> Path:
    """Where the quickstart's models and tasks are written: under $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl_thundersync" / "quickstart"
