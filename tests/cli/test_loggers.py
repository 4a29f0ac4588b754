"""Several loggers get the same numbers, and write into the run folder."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.loggers import into_run_folder, trackers


def test_a_list_of_loggers_and_wandb_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_DIR", "TENSORBOARD_DIR", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.chdir(tmp_path)
    cfg = build_config(["trainer.logger=[console,tensorboard,wandb]", "trainer.run_name=several"])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    into_run_folder(run_dir)
    logger = trackers(cfg)
    logger.log({"reward": 0.5}, step=1, commit=True)
    logger.finish()
    (events,) = (run_dir / "tensorboard").iterdir()
    read = EventAccumulator(str(events)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward")] == [(1, 0.5)]
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]
