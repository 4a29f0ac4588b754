"""Replays of recorded runs: the fitted learner, the predictions, and what is refused."""

import gzip
import json
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from skyrl_thundersync.simulate import replay
from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import RecordedRollouts
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.telemetry.record import _encode
from tests.analysis.test_simulate import SMALL, recorded

TRUE = Machine(ranks=2, teachers=0, learner_rate=437.0, item_s=0.01, block_tokens=150, suffix_s=2.0)


def write_run(folder, objective="opd", schedule="thundersync", updates=3):
    """A run folder as training leaves it, its metrics those of a simulation with TRUE's learner."""
    config = {
        "thundersync": {
            "objective": objective,
            "schedule": schedule,
            "learner": {"ranks": None, "block_tokens": 150, "accumulator": "fp32"},
            "grpo": {"admission_cap": 1},
        }
    }
    (folder / "record").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    rows = [{"step": 0, "eval/all/avg_score": 0.0}]
    for version in range(updates):
        batch = replace(recorded(SMALL, TRUE, version), version=version)
        policy = WorkPolicy(statistics_cap=1 if objective == "grpo" else None)
        batch = replace(
            batch,
            work=tuple(
                replace(w, source=replace(w.source, policy_version=version)) if hasattr(w, "source") else w
                for w in batch.work
            ),
            ranks=tuple(i % 2 for i in range(len(batch.work))),
        )
        run = direct(RecordedRollouts(batch), TRUE, policy)
        f = run.figures
        rows.append(
            {
                "step": version + 1,
                "thundersync/policy_version": version,
                "timing/rollout": f.rollout_s,
                "timing/suffix": 1.7,
                "timing/host": 0.3,
                "timing/update": f.step_s,
                "timing/learner_busy": float(run.service_s.sum()),
            }
        )
        with gzip.open(folder / "record" / f"batch_{version:06d}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"version": version, "groups": batch.groups}) + "\n")
            for rank, second, work in zip(batch.ranks, batch.seconds, batch.work, strict=True):
                file.write(json.dumps({"rank": rank, "t": second, **_encode(work)}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("objective", ["opd", "grpo"])
def test_the_learners_speed_is_found_from_other_updates_and_predicts_this_one(tmp_path, objective):
    write_run(tmp_path, objective)
    recordings = replay.load_recordings(tmp_path, Machine(item_s=0.01, learner_rate=90.0))
    assert [r.machine.ranks for r in recordings] == [2, 2, 2]
    policies = [WorkPolicy("sync"), WorkPolicy("group"), WorkPolicy()]
    for index in range(3):
        sync, group, ours = replay.predict(recordings, index, policies)
        assert ours["learner_rate"] == pytest.approx(437, rel=0.01)
        assert ours["measured_step_s"] is not None and abs(ours["error_percent"]) < 0.5
        assert sync["measured_step_s"] is None and group["error_percent"] is None
        assert ours["figures"]["step_s"] < sync["figures"]["step_s"]


def test_a_single_recording_is_fitted_to_itself(tmp_path):
    write_run(tmp_path, updates=1)
    (row,) = replay.predict(replay.load_recordings(tmp_path, Machine(item_s=0.01)), 0, [WorkPolicy()])
    assert abs(row["error_percent"]) < 0.5


def test_runs_that_cannot_be_replayed_are_refused(tmp_path):
    write_run(tmp_path / "sync", schedule="sync", updates=1)
    with pytest.raises(ValueError, match="recorded under the schedule 'sync'"):
        replay.load_recordings(tmp_path / "sync", Machine())
    write_run(tmp_path / "lost", updates=2)
    rows = (tmp_path / "lost" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "lost" / "metrics.jsonl").write_text("\n".join(rows[:-1]))
    with pytest.raises(ValueError, match="no update of policy version 1, but it is recorded"):
        replay.load_recordings(tmp_path / "lost", Machine())
    write_run(tmp_path / "fast", updates=1)
    with pytest.raises(ValueError, match="less than item_s of all work"):
        replay.predict(replay.load_recordings(tmp_path / "fast", Machine(item_s=100.0)), 0, [WorkPolicy()])
