"""Loggers of a run (`trainer.logger`): SkyRL's, one or several, checked before anything starts, writing to the run folder."""

from __future__ import annotations

import netrc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from skyrl.train.utils.tracking import Tracking

    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab", "tensorboard": "tensorboard"}
_NEEDS_NO_KEY = ("offline", "disabled", "dryrun")


def names(cfg: TrainConfig) -> list[str]:
    """The loggers that a configuration names."""
    logger = cfg.trainer.logger
    return logger if isinstance(logger, list) else [logger]


def logger_problems(cfg: TrainConfig) -> list[str]:
    """Why a logger could not work: its package is not installed, or its account is not known."""
    problems = [
        f"trainer.logger: {name} needs the package {PACKAGES[name]}, which is not installed. Install it, or take another "
        "logger."
        for name in names(cfg)
        if name in PACKAGES and find_spec(PACKAGES[name]) is None
    ]
    if "wandb" in names(cfg) and os.environ.get("WANDB_MODE") not in _NEEDS_NO_KEY and not _knows_wandb():
        problems.append(
            "trainer.logger: wandb needs a key. Set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline to keep the "
            "run's files for `wandb sync`."
        )
    return problems


def _knows_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return file.is_file() and netrc.netrc(file).authenticators(host or "") is not None


def into_run_folder(run_dir: Path) -> None:
    """Where loggers write that are not told otherwise."""
    os.environ.setdefault("TENSORBOARD_DIR", str(run_dir / "tensorboard"))
    os.environ.setdefault("WANDB_DIR", str(run_dir))
    os.environ.setdefault("SWANLAB_LOG_DIR", str(run_dir / "swanlab"))


class Trackers:
    """Several of SkyRL's trackers as one; what SkyRL's trainer calls of it."""

    def __init__(self, trackers: list[Tracking]) -> None:
        self._trackers = trackers

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        for tracker in self._trackers:
            tracker.log(data, step, commit)

    def log_exception(self, error: BaseException, step: int = 0) -> None:
        for tracker in self._trackers:
            tracker.log_exception(error, step)

    def log_samples_to_table(self, *args: Any, **kwargs: Any) -> None:
        for tracker in self._trackers:
            tracker.log_samples_to_table(*args, **kwargs)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def trackers(cfg: TrainConfig) -> Trackers:
    """The loggers that a configuration names, started."""
    from skyrl.train.utils.tracking import Tracking

    trainer = cfg.trainer
    return Trackers([Tracking(trainer.project_name, trainer.run_name, name, cfg, trainer.tags) for name in names(cfg)])
