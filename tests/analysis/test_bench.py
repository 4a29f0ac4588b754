import json

import pytest
from typer.testing import CliRunner

from skyrl_thundersync import bench
from skyrl_thundersync.cli import app
from skyrl_thundersync.errors import ConfigError


def row(step: float, rho: float = 1.0) -> dict:
    return {key: 1.0 for key in bench.FIGURES.values()} | {"timing/update": step, "theory/rho": rho}


def rows(value: str | None = None, rho: float = 1.0) -> list[bench.Row]:
    steps = {"sync": (10.0, 12.0), "group": (8.0, 8.0), "thundersync": (5.0, 6.0)}
    return bench.summary({schedule: [row(s, rho) for s in own] for schedule, own in steps.items()}, value)


def test_speedups_are_ratios_of_means_with_the_range_of_paired_updates():
    sync, group, ours = rows()
    assert (sync.speedup, sync.low, sync.high) == (1.0, 1.0, 1.0)
    assert group.speedup == pytest.approx(11 / 8)
    assert (group.low, group.high) == (1.25, 1.5)
    assert ours.speedup == ours.low == ours.high == 2.0
    assert ours.figures["step_s"] == 5.5
    assert ours.updates == 2


def test_a_sweep_measures_one_point_for_every_value():
    assert bench.swept(None) == [(None, [])]
    assert bench.swept("a.b=1,2") == [("1", ["a.b=1"]), ("2", ["a.b=2"])]
    for bad in ("a.b", "a.b=", "=1,2", "a.b=1,,2"):
        with pytest.raises(ConfigError, match="write key=value,value"):
            bench.swept(bad)


def test_measured_points_lie_at_the_sync_runs_rho():
    found = bench.points(rows("1", 0.5) + rows("2", 0.9))["speedup_rho"]
    assert found["measured, thundersync"] == ([0.5, 0.9], [2.0, 2.0])
    assert set(found) == {"measured, group", "measured, thundersync"}


def test_the_table_shows_every_schedule_and_the_swept_value(capsys):
    bench.show(rows("1") + rows("2"), "generator.max_turns")
    out = capsys.readouterr().out
    assert out.count("thundersync") == 2
    assert "generator.max_turns" in out
    assert "2.00x" in out


def test_a_run_that_cannot_start_ends_the_comparison_with_its_own_words(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)sync: .*exited 2.*no_such_option"):
        bench.run("sync", ["+config=opd/quickstart", "trainer.no_such_option=1"], tmp_path / "run", 1)


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
