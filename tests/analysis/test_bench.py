"""`skyrl bench`: ratios from rows, and a real run whose schedules share tasks, weights and seeds."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl_thundersync.cli import bench
from skyrl_thundersync.cli.app import app
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.interleaved import DifferentWorkError, order, require_same_work

STEPS = {"sync": (10.0, 12.0, 30.0), "group": (8.0, 8.0, 10.0), "thundersync": (5.0, 8.0, 10.0)}
LEARNER = {"sync": 4.0, "group": 4.2, "thundersync": 6.0}


def row(schedule: str, index: int, rho: float = 1.0) -> dict:
    metrics = dict.fromkeys(bench.FIGURES.values(), 1.0)
    metrics |= {"theory/rho": rho, "timing/learner_busy": LEARNER[schedule], "timing/learner_sweep": LEARNER[schedule]}
    ranks = [{"cores": [0, 1], "threads": 1}, {"cores": [0, 1], "threads": 1}]
    return {
        "round": index + 1,
        "schedule": schedule,
        "step_s": STEPS[schedule][index],
        "metrics": metrics,
        "ranks": ranks,
    }


def rows(value: str | None = None, rho: float = 1.0) -> list[bench.Row]:
    return bench.summary([row(schedule, index, rho) for index in (2, 0, 1) for schedule in STEPS], value)


def test_speedups_are_medians_of_ratios_within_a_round():
    """One round in which the whole machine is three times slower changes no ratio of the others."""
    sync, group, ours = rows()
    assert (sync.speedup, sync.low, sync.high) == (1.0, 1.0, 1.0)
    assert (group.ratios, group.speedup, group.low, group.high) == ((1.25, 1.5, 3.0), 1.5, 1.25, 3.0)
    assert (ours.ratios, ours.speedup, ours.low, ours.high) == ((2.0, 1.5, 3.0), 2.0, 1.5, 3.0)
    assert ours.figures["step_s"] == 8.0
    assert ours.figures["busy_share"] == pytest.approx(6.0 / (8.0 * 2))
    assert ours.rounds == 3
    assert {r.bound for r in (sync, group, ours)} == {2.0}


def test_the_same_work_that_took_longer_is_warned_of_with_its_kind():
    (warning,) = bench.warnings(rows())
    assert warning.startswith("thundersync: the learner took 1.50 times as long as under sync")
    assert "sweep 6.0 s (4.0)" in warning


def test_a_sweep_measures_one_point_for_every_value():
    assert bench.swept(None) == [(None, [])]
    assert bench.swept("a.b=1,2") == [("1", ["a.b=1"]), ("2", ["a.b=2"])]
    for bad in ("a.b", "a.b=", "=1,2", "a.b=1,,2"):
        with pytest.raises(ConfigError, match="write key=value,value"):
            bench.swept(bad)


def test_measured_points_lie_at_the_sync_updates_rho():
    found = bench.points(rows("1", 0.5) + rows("2", 0.9))["speedup_rho"]
    assert found["measured, thundersync"] == (pytest.approx([0.5, 0.9]), [2.0, 2.0])
    assert set(found) == {"measured, group", "measured, thundersync"}


def test_the_table_shows_every_schedule_the_swept_value_cores_and_the_bound(capsys):
    bench.show(rows("1") + rows("2"), "generator.max_turns")
    out = capsys.readouterr().out
    assert out.count("thundersync at ") == 2
    assert "generator.max_turns=2: 1 + ρ = 2.00" in out
    assert "2.00x" in out
    assert "learner-1: threads 1, cores 0, 1" in out


def test_a_run_that_cannot_start_ends_the_comparison_after_its_own_words(tmp_path, capfd):
    with pytest.raises(ConfigError, match="exited 2 and said why above"):
        bench.run(["+config=opd/quickstart", "trainer.no_such_option=1"], tmp_path / "run", 1)
    assert "no_such_option" in capfd.readouterr().err


def test_every_point_of_a_sweep_is_read_before_the_first_run():
    done = CliRunner().invoke(app, ["bench", "+config=opd/quickstart", "--sweep", "generator.max_turn=3,4"])
    assert isinstance(done.exception, ConfigError)
    assert "Did you mean 'generator.max_turns'" in str(done.exception)


@pytest.mark.parametrize(
    "arguments", [["theory", "--rho", "1.1", "--json"], ["simulate", "turns=3", "groups=2", "--json"]]
)
def test_theory_and_simulate_are_subcommands(arguments):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", ["bench", "theory", "simulate"])
def test_subcommands_from_elsewhere_show_their_own_options(name):
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0
    assert f"{name} [OPTIONS]" in done.stdout
    assert "--json" in done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A real comparison: two counted rounds of few, quick tasks. What it printed, and the lines it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("skyrl-thundersync")),
            *("bench", "+config=opd/quickstart", "--rounds", "2", "--json", "--out", str(folder / "run")),
            *("trainer.train_batch_size=2", "generator.n_samples_per_prompt=3", "thundersync.sandbox.latency_s=0.1"),
            # All schedules then run whole trajectories, and the sum is the same whatever the order: so is the update.
            *("thundersync.learner.accumulator=exact", "thundersync.learner.block_tokens=100000"),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "run" / "rounds.jsonl").read_text().splitlines()
    return json.loads(done.stdout), [json.loads(line) for line in lines]


@pytest.fixture(params=[0, 1, 2])
def one_round(measured, request):
    return [line for line in measured[1] if line["round"] == request.param]


needs_a_run = pytest.mark.timeout(600)


@needs_a_run
def test_the_order_of_schedules_rotates(measured):
    found = [line["schedule"] for line in measured[1]]
    assert found == [schedule for index in range(3) for schedule in order(index)]
    assert {order(index)[0] for index in range(3)} == set(bench.SCHEDULES)


@needs_a_run
def test_a_round_is_one_update_under_every_schedule(one_round):
    """The same parameters before, the same rollouts, the same version, and with the exact accumulator the same bits after."""
    for key in (
        "thundersync/n_scored",
        "thundersync/n_tokens",
        "thundersync/policy_version",
        "policy/grad_norm",
        "policy/lr",
    ):
        assert len({line["metrics"][key] for line in one_round}) == 1, key
    for key in ("parameters", "result"):
        assert len({json.dumps(line[key]) for line in one_round}) == 1, key
    assert one_round[0]["metrics"]["thundersync/policy_version"] == one_round[0]["round"]


@needs_a_run
def test_the_next_round_goes_on_from_the_updates_result(measured):
    first, second, third = (
        [line for line in measured[1] if line["round"] == index][0 if index else -1] for index in range(3)
    )
    assert second["parameters"] == first["result"] != first["parameters"]
    assert third["parameters"] == second["result"] != second["parameters"]


@needs_a_run
def test_each_schedule_is_followed(one_round):
    before = {line["schedule"]: line["metrics"]["thundersync/work_before_rollouts_ended"] for line in one_round}
    assert before["sync"] == 0 < before["thundersync"]


@needs_a_run
def test_learner_seconds_are_told_by_kind_with_page_faults_and_cores(one_round):
    for line in one_round:
        metrics = line["metrics"]
        kinds = [metrics[f"timing/learner_{kind}"] for kind in bench.KINDS]
        assert min(kinds) > 0
        assert sum(kinds) == pytest.approx(metrics["timing/learner_busy"])
        assert metrics["memory/learner_page_faults"] > 0
        assert metrics["timing/learner_cpu"] > 0
        assert [rank["threads"] for rank in line["ranks"]] == [1, 1]
        assert all(rank["cores"] for rank in line["ranks"])
        assert line["step_s"] > metrics["timing/rollout"] + metrics["timing/tail"]


@needs_a_run
def test_what_it_prints_is_the_summary_of_the_counted_rounds(measured):
    printed, lines = measured
    assert [r["schedule"] for r in printed] == list(bench.SCHEDULES)
    steps = {(line["round"], line["schedule"]): line["step_s"] for line in lines}
    for r in printed:
        assert r["ratios"] == [steps[k, "sync"] / steps[k, r["schedule"]] for k in (1, 2)]


@needs_a_run
def test_dearer_work_in_a_real_run_is_warned_of(measured):
    lines = copy.deepcopy([line for line in measured[1] if line["round"]])
    for line in lines:
        seconds = 3.0 if line["schedule"] == "group" else 1.0
        line["metrics"] |= {"timing/learner_busy": seconds, "timing/learner_sweep": seconds}
    (warning,) = bench.warnings(bench.summary(lines))
    assert "group: the learner took 3.00 times as long as under sync" in warning
    assert "sweep 3.0 s (1.0)" in warning
    assert "CPU time" in warning


@needs_a_run
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"thundersync/n_scored": 1.0}, "N_k"),
        ({"thundersync/n_tokens": 1.0}, "tokens"),
        ({"policy/grad_norm": 1.001}, "more than rounding"),
    ],
)
def test_updates_that_differ_are_not_compared(one_round, change, says):
    (key, by), first, last = *change.items(), one_round[0], copy.deepcopy(one_round[-1])
    require_same_work([first, last], 1e-4)
    last["metrics"][key] = last["metrics"][key] * by if key == "policy/grad_norm" else last["metrics"][key] + by
    with pytest.raises(DifferentWorkError, match=rf"round {first['round']}: .*{says}"):
        require_same_work([first, last], 1e-4)


@needs_a_run
def test_updates_from_other_parameters_are_not_compared(one_round):
    first, last = one_round[0], copy.deepcopy(one_round[-1])
    last["parameters"][0][0] += 1
    with pytest.raises(DifferentWorkError, match="did not begin with the same parameters"):
        require_same_work([first, last], 1e-4)
