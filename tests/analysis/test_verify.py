"""`verify`: right updates pass to rounding, and each planted fault is found and named, whatever the objective."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from skyrl_thundersync.cli.app import app
from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.stream.sources import Append, CloseTrajectory
from skyrl_thundersync.telemetry.record import Batch
from skyrl_thundersync.verify import equivalence
from skyrl_thundersync.verify import planted as faults
from skyrl_thundersync.verify.diagnose import check_release
from skyrl_thundersync.verify.equivalence import TOLERANCE, report
from skyrl_thundersync.verify.rerun import Updaters
from tests.analysis.runs import batch, write_batch, write_metrics, write_run
from tests.learner.plain import contexts, plain_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("objective", "lora", "ranks"), [("opd", 0, 1), ("grpo", 2, 1)])
def test_a_right_run_passes_exactly(tmp_path, objective, lora, ranks):
    result = report(write_run(tmp_path / "run", objective, lora, ranks))
    assert result["findings"] == []
    assert max(result["relative_error"]["float64"]) <= TOLERANCE["float64"]
    assert len(result["delta"]) == 2
    for row in result["batches"]:
        # Clipping and division happened once: the learner's own norm is the textbook's at the replayed weights.
        assert row["replayed_norm"] == pytest.approx(row["textbook_norm"], rel=1e-4)
        assert 0 < row["float32"]["worst_share"] <= 1


def test_the_norm_is_the_runs_own_also_with_an_adapter(tmp_path):
    run = write_run(tmp_path / "run", lora=2)
    result = report(run, limit=1)
    (row,) = result["batches"]
    assert row["replayed_norm"] == pytest.approx(row["run_norm"], rel=1e-4) and result["findings"] == []
    shown = CliRunner().invoke(app, ["verify", str(run), "--limit", "1"]).stdout
    assert f" {row['run_norm']:.4g} " in shown
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[0]["policy/grad_norm"] *= 1.01
    write_metrics(run, rows)
    assert "the run's gradient norm was" in report(run, limit=1)["findings"][0]["detail"]


def agreed(folder: str, made: Batch) -> Batch:
    """The batch with a teacher that has nothing to teach in group g1: its scores are θ_0's own, and what is left is rounding.

    The two groups have no token in common, so that the rows of g1's tokens in an untied embedding get nothing else.
    """
    work = []
    for w in made.work:
        if isinstance(w, Append):
            ids = [
                tuple(60 + t % 36 if w.source.trajectory.group == "g1" else t % 60 for t in part)
                for part in (w.source.context_ids, w.source.action_ids)
            ]
            w = replace(w, source=replace(w.source, context_ids=ids[0], action_ids=ids[1]))
        work.append(w)
    model, scores = plain_model(folder, torch.float64), {}
    for append, context in contexts(work):
        ids = torch.tensor([context + list(append.source.action_ids)])
        with torch.no_grad(), all_double():
            logp_TV = torch.log_softmax(model(input_ids=ids).logits[0, len(context) - 1 : -1], -1)
        scores[append.source.name] = tuple(logp_TV.gather(-1, ids[0, len(context) :, None])[:, 0].tolist())
    work = [
        replace(w, scores=scores[w.source.name]) if isinstance(w, Append) and w.source.trajectory.group == "g1" else w
        for w in work
    ]
    return replace(made, work=tuple(work))


def test_elements_whose_gradient_is_rounding_do_not_make_another_update(tmp_path):
    """AdamW moves them by up to ±lr, whichever way they were rounded: a right run's parameters differ, visibly."""
    run = write_run(tmp_path / "run", updates=1, family="llama")
    write_batch(run, agreed(str(tmp_path / "run-model"), batch(0)))
    write_metrics(run, [])
    result = report(run)
    ((_, to_book),) = result["delta"]
    assert to_book > 1e-3 and result["findings"] == []


def test_a_wrong_step_on_right_gradients_is_found(tmp_path, monkeypatch):
    class Other(Updaters):
        def __init__(self, run, sides):
            super().__init__(replace(run, adam=replace(run.adam, adam_betas=(0.8, 0.999))), sides)

    monkeypatch.setattr(equivalence, "Updaters", Other)
    findings = report(write_run(tmp_path / "run"))["findings"]
    assert [(f["version"], f["kind"]) for f in findings] == [(1, "unknown")]  # Adam's first step knows no β
    assert "to AdamW; rounding explains at most" in findings[0]["detail"]


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
    row = {
        "step": 1,
        "thundersync/policy_version": 0,
        "thundersync/n_scored": batch(0).n_scored - 1,
        "policy/grad_norm": 1.0,
    }
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
