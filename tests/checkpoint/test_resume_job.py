"""The whole job, pre-empted and resumed on another number of ranks, against one that was never stopped."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from ranks import in_processes
from safetensors import safe_open
from torchdata.stateful_dataloader import StatefulDataLoader

from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.options.schema import LearnerConfig, OptimizerSettings
from skyrl_thundersync.stream.sources import Append
from skyrl_thundersync.telemetry.record import load_batches
from tests import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OPTIONS = (
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.hf_save_interval=-1",
    "trainer.ckpt_interval=2",
    "trainer.resume_mode=latest",
    "thundersync.record=true",
    "thundersync.learner.accumulator=exact",
    "thundersync.sandbox.latency_s=0.2",
)


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run on two ranks that SIGTERM ended in its fourth update, of which no checkpoint was due; what it left."""
    run = job.start(tmp_path_factory.mktemp("job") / "a", "trainer.max_training_steps=50", *OPTIONS)
    try:
        run.wait_for("3/50", 700)
        os.kill(run.process.pid, signal.SIGTERM)
        return run, run.wait(60), run.output(), run.left()
    finally:
        run.process.kill()


@pytest.fixture(scope="module")
def resumed(stopped):
    """The same command again, for two more updates, on one rank."""
    run = stopped[0]
    done = int((run.run_dir / "checkpoints" / "latest_ckpt_global_step.txt").read_text())
    again = job.start(
        run.run_dir.parent, f"trainer.max_training_steps={done + 2}", *OPTIONS, "thundersync.learner.ranks=1"
    )
    assert again.wait(700) == 0, again.output()
    return again, done


def test_sigterm_saves_the_last_finished_update_and_leaves_nothing_running(stopped):
    run, status, screen, left = stopped
    checkpoints = run.run_dir / "checkpoints"
    newest = int((checkpoints / "latest_ckpt_global_step.txt").read_text())
    assert status == 128 + signal.SIGTERM, screen
    assert newest >= 3
    saved = (
        f"are in {checkpoints}/global_step_{newest}" if newest % 2 else f"checkpoint of update {newest} is the newest"
    )
    assert "Stopped by SIGTERM. The running update was dropped" in screen and saved in screen
    assert left == set()
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(
        {f"global_step_{k}" for k in (*range(2, newest, 2), newest)} | {"latest_ckpt_global_step.txt"}
    )
    assert manifest(checkpoints / f"global_step_{newest}")["policy_version"] == newest


def test_the_resumed_run_says_so_and_counts_on(resumed):
    run, done = resumed
    assert f"resumed after update {done} from" in run.output()
    assert f"{done + 1}/{done + 2}" in run.output() and f" {done}/{done + 2}" not in run.output()
    last = manifest(run.run_dir / "checkpoints" / f"global_step_{done + 2}")
    assert (last["policy_version"], last["optimizer"]["steps"], last["optimizer"]["ranks"]) == (done + 2, done + 2, 1)


def test_every_batch_holds_the_tasks_of_an_undisturbed_run_sampled_by_its_own_version(resumed):
    """The order is that of a fresh loader with the run's seed; each source's version is what its replica served."""
    run, done = resumed
    cfg = OmegaConf.load(run.run_dir / "config.yaml")
    tasks = range(len(Path(cfg.data.train_data[0]).read_text().splitlines()))
    loader = StatefulDataLoader(
        tasks,
        batch_size=cfg.trainer.train_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=list,
        generator=torch.Generator().manual_seed(cfg.trainer.seed),
    )
    order = [sorted(map(str, rows)) for _ in range(9) for rows in loader]
    batches = load_batches(run.run_dir / "record")
    assert [batch.version for batch in batches] == list(range(done + 2))
    for batch, rows in zip(batches, order, strict=False):
        assert sorted(batch.groups) == rows
        assert {w.source.policy_version for w in batch.work if isinstance(w, Append)} == {batch.version}


def undisturbed(run_dir, rank, world, port):
    """Masters by name after all recorded updates in one process that never stopped."""
    cfg = OmegaConf.load(f"{run_dir}/config.yaml")
    optimizer = cfg.trainer.policy.optimizer_config
    learner = LearnerRank(
        RankSpec(
            cfg.trainer.policy.model.path,
            rank,
            world,
            "127.0.0.1",
            port,
            LearnerConfig(**cfg.thundersync.learner),
            cfg.thundersync.objective,
            OptimizerSettings(
                lr=optimizer.lr,
                adam_betas=tuple(optimizer.adam_betas),
                weight_decay=optimizer.weight_decay,
                max_grad_norm=optimizer.max_grad_norm,
                num_warmup_steps=optimizer.num_warmup_steps,
                scheduler=optimizer.scheduler,
            ),
        )
    )
    for batch in load_batches(Path(run_dir) / "record"):
        learner.run_many(list(batch.work))
        assert learner.finish().n_scored == batch.n_scored
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def test_parameters_are_bit_identical_to_the_undisturbed_run_on_the_same_samples(resumed):
    run, done = resumed
    (plain,) = in_processes(undisturbed, str(run.run_dir), world=1)
    folder = run.run_dir / "checkpoints" / f"global_step_{done + 2}"
    with safe_open(folder / "student" / "model.safetensors", "pt") as saved:
        different = [name for name in saved.keys() if not torch.equal(saved.get_tensor(name), plain[name])]  # noqa: SIM118
        gap = max(float((saved.get_tensor(name) - plain[name]).abs().max()) for name in saved.keys())  # noqa: SIM118
    assert different == [], f"largest difference {gap}"
