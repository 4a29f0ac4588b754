"""SkyRL's way in: `trainer.override_entrypoint=skyrl_thundersync.hosts.skyrl.entrypoint` makes it call `main()` here.

The train loop runs in this process, so Ctrl-C reaches it, and everything it started is taken down in one place. While it
runs, this process's own stdout and stderr go to a log file; what a person should see goes through `Display`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from skyrl_thundersync.errors import USAGE_ERROR, ConfigError, MachineFullError, first_cause, own_error, tell
from skyrl_thundersync.hosts.skyrl.checks import checked_config
from skyrl_thundersync.hosts.skyrl.loggers import into_run_folder
from skyrl_thundersync.process import logs
from skyrl_thundersync.process.heartbeat import named
from skyrl_thundersync.process.interrupts import KeptInterrupts, Preempted
from skyrl_thundersync.process.limits import raise_own_limits
from skyrl_thundersync.runtime import run_folder
from skyrl_thundersync.telemetry import timeline
from skyrl_thundersync.telemetry.display import Display

INTERRUPTED = 128 + signal.SIGINT
EXPERIMENT = "skyrl_thundersync.hosts.skyrl.experiment:ThunderSyncExperiment"


def main(experiment: str = EXPERIMENT) -> None:
    """Train with the configuration on the command line. `experiment`: "module:class" of what is run.

    Exits 0 when done, 2 for a configuration or machine that cannot run, 130 on Ctrl-C, 1 on any other error.
    """
    try:
        cfg = checked_config(*(a for a in sys.argv[1:] if not a.startswith("trainer.override_entrypoint=")))
    except ConfigError as error:
        raise SystemExit(tell(error)) from error
    raise SystemExit(train(cfg, experiment))


def train(cfg, experiment: str = EXPERIMENT) -> int:
    """Run the whole job; returns the exit status. Nothing is left running afterwards.

    130 on Ctrl-C. 128 + n on signal n of `interrupts.PREEMPTING` (SIGTERM: 143): the update that runs is dropped and, where
    checkpoints are kept at all, the last finished one saved.
    """
    raise_own_limits()
    try:
        with run_folder.owned(cfg) as remarks:
            return _run(cfg, experiment, remarks)
    except ConfigError as error:  # another run holds the folder, or has used it since it was checked
        return tell(error)


def _run(cfg, experiment: str, remarks: list[str]) -> int:
    run_dir, display = Path(cfg.thundersync.run_dir), Display(sys.__stdout__.fileno())
    for remark in remarks:
        display.say(remark)
    driver_log = run_dir / "logs" / "driver.log"
    logs.redirect(driver_log, heartbeat=False)
    try:
        _train(cfg, run_dir, display, experiment)
    except BaseException as error:  # noqa: B902 - reported, then turned into the exit status
        cause, whole = first_cause(error), _logged(error, driver_log)
        if isinstance(cause, Preempted):
            display.error(f"Stopped by {signal.Signals(cause.number).name}. {cause}. Log: {driver_log}")
            return cause.status
        if isinstance(cause, KeyboardInterrupt | asyncio.CancelledError):
            display.error(f"Stopped. Parameters and files are as the last finished update left them. Log: {driver_log}")
            return INTERRUPTED
        if isinstance(cause, ConfigError):  # of the cluster, before anything loaded
            display.error(str(cause))
            return USAGE_ERROR
        display.error(_in_words(cause, run_dir / "logs", (str(run_dir), cfg.trainer.ckpt_path, "/dev/shm", "/tmp")))
        display.error(f"The run ended; nothing of the unfinished update was applied. {whole}")
        return 1
    return 0


def _logged(error: BaseException, driver_log: Path) -> str:
    """Write the traceback to the log; where to find it. A disk that is full takes none: the screen still gets the cause."""
    try:
        traceback.print_exception(error)
    except OSError as full:
        return f"Its traceback could not be written to {driver_log}: {full.strerror}"
    return f"Whole traceback: {driver_log}"


def _in_words(error: BaseException, log_dir: Path, folders: Iterable[str]) -> str:
    """What went wrong; in an actor: its own error, without Ray's wrapping and traceback, and which process it was.

    folders: whose free space is said when a disk was full.
    """
    cause = own_error(error)
    lines = [f"{type(cause).__name__}: {cause}"]
    found = re.search(r"\(pid=(\d+)", str(error)) if cause is not error else None
    if found and (where := named(log_dir, pid=int(found[1]))):
        lines.append(f"In {where}")
    if "No space left on device" in str(cause):
        free = {folder: shutil.disk_usage(folder).free for folder in folders if Path(folder).is_dir()}
        lines.append(f"Free now: {', '.join(f'{size / 2**20:.0f} MiB in {folder}' for folder, size in free.items())}")
    return "\n".join(lines)


def _train(cfg, run_dir: Path, display: Display, experiment_class: str) -> None:
    into_run_folder(run_dir)
    from skyrl_thundersync.hosts.skyrl.experiment import ProgressCallback
    from skyrl_thundersync.hosts.skyrl.parts import SkyRLParts
    from skyrl_thundersync.options.registry import load
    from skyrl_thundersync.options.schema import as_yaml
    from skyrl_thundersync.process.heartbeat import Watch, at
    from skyrl_thundersync.rollout.outcomes import Outcomes
    from skyrl_thundersync.runtime.cluster import Cluster
    from skyrl_thundersync.runtime.resume import NothingLeftError
    from skyrl_thundersync.sandbox.pool import SandboxPool
    from skyrl_thundersync.tasks.terminal_env import register_terminal_env
    from skyrl_thundersync.telemetry.metrics import MetricsFile

    (run_dir / "config.yaml").write_text(as_yaml(cfg), encoding="utf-8")
    ts = cfg.thundersync
    display.say(f"[bold]thundersync[/bold] {ts.objective}, schedule {ts.schedule}; run folder {run_dir}")
    display.say(f"[dim]outcomes: {Outcomes(ts.outcomes)}[/dim]")
    metrics = MetricsFile(run_dir / run_folder.METRICS)
    timeline.open_log(run_dir)
    with (
        KeptInterrupts() as interrupts,
        Watch(run_dir / "logs", ts.hang_timeout_s),
        SandboxPool(ts.sandbox, run_id=run_dir.name) as pool,
        Cluster(cfg, run_dir, display, SkyRLParts()) as cluster,
    ):
        display.say(
            f"[dim]agents' commands run in {pool.backend} (thundersync.sandbox.backend={ts.sandbox.backend})[/dim]"
        )
        interrupts.again()  # Ray set a handler of its own
        register_terminal_env(pool)
        experiment = load(experiment_class)(cfg, cluster, display, run_dir, pool)
        cluster.start(experiment.tokenizer)
        trainer = experiment._setup_trainer()
        progress = ProgressCallback(display, metrics)
        trainer.add_callback(progress)
        try:
            at("training")
            interrupts.end()
            asyncio.run(_until_preempted(trainer, interrupts))
        except NothingLeftError as done:
            display.say(f"nothing left to train: {done}")
            return
        finally:
            display.end()
    metrics.close()
    timeline.close_log()
    rows = [("updates", str(trainer.global_step))]
    if progress.evaluations:
        (_, before), (_, after) = progress.evaluations[0], progress.evaluations[-1]
        rows.append(("held-out success", f"{before:.0%} before, {after:.0%} after"))
    if cluster.saved is not None:
        rows.append(("model", str(cluster.saved)))
    rows.append(("metrics", str(run_dir / "metrics.jsonl")))
    display.summary("done", rows)


async def _until_preempted(trainer, interrupts: KeptInterrupts) -> None:
    """SkyRL's loop. A scheduler's signal cancels it where it waits: a step, or a checkpoint being written, ends first."""
    loop, task, told = asyncio.get_running_loop(), asyncio.current_task(), []

    def preempt(number: int) -> None:
        if not told:
            told.append(number)
            interrupts.told = number
            task.cancel()

    for number in interrupts.heard:
        loop.add_signal_handler(number, preempt, number)
    try:
        await trainer.train()
    except MachineFullError as error:
        raise MachineFullError(f"{error}\n{_saved_or_why(trainer)}") from error
    except (asyncio.CancelledError, Exception) as error:
        if not told:
            raise  # Ctrl-C, or what went wrong
        raise Preempted(told[0], f"The running update was dropped. {_saved_last(trainer)}") from error
    finally:
        for number in interrupts.heard:
            loop.remove_signal_handler(number)
        interrupts.again()


def _saved_last(trainer) -> str:
    checkpoints = trainer.checkpoints
    if trainer.cfg.trainer.ckpt_interval > 0 and checkpoints.unsaved:
        return f"All finished updates are in {checkpoints.save(last=True)}"
    if checkpoints.saved_step:
        return f"The checkpoint of update {checkpoints.saved_step} is the newest"
    return "No checkpoint was taken (trainer.ckpt_interval)"


def _saved_or_why(trainer) -> str:
    from skyrl_thundersync.runtime.checkpoint import CheckpointError

    try:
        return _saved_last(trainer)
    except (CheckpointError, OSError) as error:  # a rank's OSError is both that and Ray's
        return f"The last finished update could not be saved: {own_error(error)}"


if __name__ == "__main__":
    main()
