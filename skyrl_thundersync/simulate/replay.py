"""Recorded updates again in virtual time: what another schedule, cap or number of ranks would have made of them.

The rollouts happen as recorded. What a learner costs per token is fitted to the busy time of the run's other updates, so that
no update is predicted from itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from skyrl_thundersync.objectives.contract import GROUP
from skyrl_thundersync.objectives.registry import find
from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import RecordedRollouts
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.telemetry.record import Batch, load_batches
from skyrl_thundersync.telemetry.rundata import read_metrics
from skyrl_thundersync.theory import measured_error

FIT_ROUNDS = 6


@dataclass(frozen=True)
class Recording:
    """One recorded update and what was measured of it, seconds. `busy_s`: of all ranks together."""

    batch: Batch
    machine: Machine
    policy: WorkPolicy
    rollout_s: float
    step_s: float
    busy_s: float

    def rollouts(self) -> RecordedRollouts:
        return RecordedRollouts(self.batch, self.rollout_s)


def load_recordings(run_dir: Path, machine: Machine) -> list[Recording]:
    """A run folder's recorded batches with their metrics, on as many ranks as they ran on.

    Args:
        machine: what the run folder does not say: item_s, past_tokens, retain_tokens. Its speeds are fitted later.

    Raises:
        FileNotFoundError: no recorded batch, no metrics or no configuration.
        ValueError: the run had another schedule than thundersync: its release times are those of a barrier.
    """
    run = OmegaConf.load(run_dir / "config.yaml").thundersync
    if run.schedule != "thundersync":
        raise ValueError(
            f"{run_dir} was recorded under the schedule {run.schedule!r}: its work was released at a barrier, and when it "
            f"was ready is not known. Record with thundersync.schedule=thundersync"
        )
    grouped = find(run.objective).rewards == GROUP
    policy = WorkPolicy(statistics_cap=run.grpo.admission_cap if grouped else None)
    rows = {int(row["thundersync/policy_version"]): row for row in read_metrics(run_dir) if "timing/update" in row}
    recordings = []
    for batch in load_batches(run_dir / "record"):
        if batch.version not in rows:
            raise ValueError(
                f"{run_dir}/metrics.jsonl has no update of policy version {batch.version}, but it is recorded"
            )
        row = rows[batch.version]
        own = replace(
            machine,
            ranks=run.learner.ranks or max(batch.ranks) + 1,
            block_tokens=run.learner.block_tokens,
            sweep_at_close=not (grouped and run.learner.accumulator == "exact"),
            suffix_s=row["timing/suffix"] + row["timing/host"],
        )
        times = (row["timing/rollout"], row["timing/update"], row["timing/learner_busy"])
        recordings.append(Recording(batch, own, policy, *times))
    return recordings


def fit(recordings: list[Recording], machine: Machine) -> Machine:
    """`machine` with the learner rate at which the recordings take their measured busy time, summed.

    How turns wait for each other depends on the speed, so the rate is corrected until simulated and measured time agree.

    Raises:
        ValueError: nothing was measured, or `item_s` alone exceeds it.
    """
    measured = sum(r.busy_s for r in recordings)
    for _ in range(FIT_ROUNDS):
        fixed = busy = 0.0
        for recording in recordings:
            on = replace(recording.machine, learner_rate=machine.learner_rate)
            run = direct(recording.rollouts(), on, recording.policy)
            fixed += len(run.service_s) * on.item_s
            busy += float(run.service_s.sum())
        if measured <= fixed:
            raise ValueError(f"measured learner time {measured:.3f} s is less than item_s of all work, {fixed:.3f} s")
        machine = replace(machine, learner_rate=machine.learner_rate * (busy - fixed) / (measured - fixed))
    return machine


def predict(recordings: list[Recording], index: int, policies: list[WorkPolicy]) -> list[dict]:
    """Update `index` under each policy, with a learner rate fitted to the others (to itself where it is the only one).

    A policy without a statistics cap gets the run's. Under GRPO a close that waited for its statistics was recorded when it
    entered the queue, so a larger cap than the run's gains less here than it would.

    Returns:
        One row a policy: version, schedule, cap, statistics_cap, learner_rate, figures; for what was run also
        measured_step_s and error_percent, d_i of PAPER.md on step time; None for what was not.
    """
    target = recordings[index]
    machine = fit(recordings[:index] + recordings[index + 1 :] or recordings, target.machine)
    own_cap, rows = target.policy.statistics_cap, []
    for policy in policies:
        policy = policy if policy.statistics_cap is not None else replace(policy, statistics_cap=own_cap)
        figures = direct(target.rollouts(), machine, policy).figures
        ran = policy == target.policy
        rows.append(
            {
                "version": target.batch.version,
                "schedule": policy.schedule,
                "cap": policy.cap,
                "statistics_cap": policy.statistics_cap,
                "learner_rate": machine.learner_rate,
                "figures": asdict(figures),
                "measured_step_s": target.step_s if ran else None,
                "error_percent": float(measured_error(figures.step_s, target.step_s)) if ran else None,
            }
        )
    return rows
