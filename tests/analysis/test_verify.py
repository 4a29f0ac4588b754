"""`verify`: right updates pass to rounding, and each planted fault is found and named, whatever the objective."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from skyrl_thundersync.analysis import faults
from skyrl_thundersync.analysis.diagnose import check_release
from skyrl_thundersync.analysis.equivalence import TOLERANCE, report
from skyrl_thundersync.cli import app
from skyrl_thundersync.stream.sources import Append, CloseTrajectory
from tests.analysis.runs import batch, write_run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("objective", "lora", "ranks"), [("opd", 0, 1), ("grpo", 2, 1)])
def test_a_right_run_passes_exactly(tmp_path, objective, lora, ranks):
    result = report(write_run(tmp_path / "run", objective, lora, ranks))
    assert result["findings"] == []
    assert max(result["relative_error"]["float64"]) <= TOLERANCE["float64"]
    assert len(result["delta"]) == 2
    for row in result["batches"]:
        # Clipping and division happened once: the learner's own norm is the textbook's at the replayed weights.
        assert row["replayed_norm"] > 0
        assert 0 < row["float32"]["worst_share"] <= 1


@pytest.mark.parametrize("kind", list(faults.PLANTS))
@pytest.mark.parametrize(("objective", "lora", "ranks"), [("opd", 0, 2), ("grpo", 0, 1), ("opd", 2, 1), ("grpo", 2, 2)])
def test_a_planted_fault_is_found_and_named(tmp_path, kind, objective, lora, ranks):
    result = report(write_run(tmp_path / "run", objective, lora, ranks), kind=kind)
    assert [finding["kind"] for finding in result["findings"]] == [kind]


def test_the_command_exits_1_and_says_which(tmp_path):
    run = write_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["verify", str(run), "--plant", "wrong-n", "--json"])
    assert done.exit_code == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["kind"] == "wrong-n"
    n = batch(0).n_scored
    assert f"divided by {n + 1} and N_k is {n}" in finding["detail"]


def test_what_was_sampled_by_other_weights_is_found_by_its_log_probs(tmp_path):
    """The run's sampler log-probs are random numbers, though every source claims the right version."""
    result = report(write_run(tmp_path / "run", updates=1, gap_tolerance=1e-3))
    assert [finding["kind"] for finding in result["findings"]] == ["stale-version"]
    assert "6 of 6 trajectories" in result["findings"][0]["detail"]


def test_a_run_that_divided_by_another_number_than_its_record_holds_is_found(tmp_path):
    run = write_run(tmp_path / "run", updates=1)
    row = {"thundersync/policy_version": 0, "thundersync/n_scored": batch(0).n_scored - 1, "policy/grad_norm": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row))
    kinds = [finding["kind"] for finding in report(run)["findings"]]
    assert kinds[0] == "wrong-n"


def release_faults():
    good = batch(1)
    at = next(i for i, w in enumerate(good.work) if isinstance(w, Append) and w.source.turn == 1)
    close = next(i for i, w in enumerate(good.work) if isinstance(w, CloseTrajectory))

    def edit(work, ranks=None):
        return replace(good, work=tuple(work), ranks=tuple(ranks or [0] * len(work)), seconds=(0.0,) * len(work))

    yield "source-twice", edit([*good.work[: at + 1], good.work[at], *good.work[at + 1 :]])
    yield "source-missing", edit([w for w in good.work if w is not first(good, at)])
    yield "open", edit([w for i, w in enumerate(good.work) if i != close])
    yield "placement", edit(good.work, [1] + [0] * (len(good.work) - 1))


def first(good, at):
    trajectory = good.work[at].source.trajectory
    return next(w for w in good.work if isinstance(w, Append) and w.source.trajectory == trajectory)


@pytest.mark.parametrize(("kind", "bad"), list(release_faults()))
def test_work_released_against_the_rules_is_found(kind, bad):
    assert check_release(batch(1)) == []
    assert kind in {finding.kind for finding in check_release(bad)}
