"""The theory against brute force: recursions, Monte Carlo, and the limits that PAPER.md states."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from skyrl_thundersync import theory
from skyrl_thundersync.cli.theory import command
from skyrl_thundersync.report import curves

SVG = "{http://www.w3.org/2000/svg}"
jobs = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), min_size=1, max_size=40)
shape = st.tuples(st.floats(0, 3), st.floats(0, 1), st.floats(0.3, 4))


def recursion(release, service):
    """When each job is done: c_j = max(τ_j, c_{j-1}) + p_j (PAPER.md, "Scheduling")."""
    done, out = 0.0, []
    for tau, p in zip(release, service, strict=True):
        done = max(tau, done) + p
        out.append(done)
    return out


@settings(deadline=None)
@given(jobs, st.floats(1, 60))
def test_the_tail_of_a_trace_is_the_tail_of_its_release_law_and_within_its_bounds(pairs, rollout):
    release, service = map(np.array, zip(*sorted(pairs), strict=True))
    release = np.minimum(release, rollout)
    if service.sum() < 1e-6:
        return
    lam, rho = max(recursion(release, service)[-1] / rollout - 1, 0.0), service.sum() / rollout
    law = theory.measured_release(release, service, rollout)
    assert theory.tail(law, rho) == pytest.approx(lam, abs=1e-9)
    low, high = theory.tail_bounds(rho, max(theory.lag(law), 0.0))
    assert low - 1e-9 <= lam <= high + 1e-9


@settings(deadline=None)
@given(shape, st.integers(1, 16), st.floats(0, 4))
def test_both_release_laws_are_distributions_whose_tails_keep_the_bounds(parameters, count, rho):
    gamma, share, skew = parameters
    for law in (
        lambda u: theory.grpo_release(u, gamma, count, share, skew),
        lambda u: theory.opd_release(u, gamma, count, share, skew),
    ):
        u = np.linspace(0, 1, 201)
        f = law(u)
        assert f[0] == 0 and f[-1] == pytest.approx(1) and np.all(np.diff(f) >= -1e-12)
        lam, (low, high) = theory.tail(law, rho), theory.tail_bounds(rho, theory.lag(law))
        assert low - 1e-9 <= lam <= high + 1e-9
        assert 1 - 1e-9 <= theory.speedup(rho, 0.1, lam) <= theory.speedup_bound(rho, 0.1) + 1e-9 <= 2 + 1e-9


@pytest.mark.parametrize(("gamma", "skew"), [(0.0, 1.0), (1.0, 1.0), (0.5, 3.0)])
def test_release_laws_are_those_of_sampled_trajectories(gamma, skew):
    rng = np.random.default_rng(0)
    duration = rng.random((100_000, 4)) ** skew
    service = duration**gamma
    u = np.array([0.1, 0.3, 0.6, 0.9])

    def released(at):
        return np.array([(service * (at <= x)).sum() for x in u]) / service.sum()

    group_end = np.broadcast_to(duration.max(axis=1, keepdims=True), duration.shape)
    grpo = 0.7 * released(duration) + 0.3 * released(group_end)
    np.testing.assert_allclose(theory.grpo_release(u, gamma, 4, 0.3, skew), grpo, atol=5e-3)
    turns = sum(released(duration * j / 5) for j in range(1, 6)) / 5
    opd = 0.6 * turns + 0.4 * released(duration)
    np.testing.assert_allclose(theory.opd_release(u, gamma, 5, 0.4, skew), opd, atol=5e-3)
    assert theory.spread(skew) == pytest.approx(duration.std() / duration.mean(), rel=1e-2)


def test_closed_forms_of_the_tail():
    # F = u^2 at ρ = 1: sup u + 1 - u^2 = 5/4 at u = 1/2. F = u: nothing lags. All at the end: the whole of ρ.
    assert theory.tail(lambda u: u**2, 1.0) == pytest.approx(0.25, abs=1e-9)
    np.testing.assert_allclose(theory.tail(lambda u: u, [0.5, 1.0, 1.5]), [0, 0, 0.5], atol=1e-9)
    assert theory.tail(lambda u: np.where(u >= 1, 0.0, 0.0), 0.7) == pytest.approx(0.7)
    assert theory.lag(lambda u: u**2) == pytest.approx(0.25, abs=1e-9)


def test_balanced_work_approaches_twice_as_fast_and_never_more():
    assert theory.speedup_bound(1.0) == 2
    rho = np.linspace(0, 5, 501)
    assert np.all(theory.speedup_bound(rho) <= 2) and np.argmax(theory.speedup_bound(rho)) == 100
    assert np.all(np.diff(theory.speedup_bound(1.0, np.linspace(0, 1, 11))) < 0)
    waves = theory.waves_speedup([1, 2, 4, 64, 1e6], 1.0, 0.1, 0.25)
    assert np.all(np.diff(waves) > 0) and waves[-1] == pytest.approx(2, abs=1e-5)
    # One wave is the plain formula; many waves that are not balanced reach the bound of their ρ, less than 2.
    assert theory.waves_speedup(1, 1.4, 0.1, 0.6) == pytest.approx(theory.speedup(1.4, 0.1, 0.6))
    assert theory.waves_speedup(1e6, 1.4, 0.1, 0.6) == pytest.approx(2.4 / 1.4, abs=1e-5)


def test_more_heterogeneous_durations_gain_more_from_the_papers_lower_to_its_upper_figure():
    skew = np.array([1, 2, 4, 8, 16, 32])
    lam = np.array([theory.tail(lambda u, s=s: theory.grpo_release(u, 1.0, 8, 0.0, s), 1.0) for s in skew])
    gain = theory.speedup(1.0, 0.043, lam)
    assert np.all(np.diff(theory.spread(skew)) > 0) and np.all(np.diff(gain) > 0)
    assert gain[0] == pytest.approx(1.58, abs=0.01) and gain[-1] > 1.9


def test_what_waits_for_its_group_or_its_close_costs_tail():
    for law in (
        lambda share: lambda u: theory.grpo_release(u, 1.0, 8, share),
        lambda share: lambda u: theory.opd_release(u, 1.0, 20, share),
    ):
        lam = [theory.tail(law(share), 1.0) for share in (0.0, 0.25, 0.5, 1.0)]
        assert np.all(np.diff(lam) > 0)
    turns = [theory.tail(lambda u, a=a: theory.opd_release(u, 1.0, a, 0.2), 1.0) for a in (1, 2, 5, 50)]
    assert np.all(np.diff(turns) < 0)


def test_errors_as_the_paper_defines_them():
    assert theory.release_error(1.8, 2.0) == pytest.approx(10)
    assert theory.measured_error(2.0, 1.9) == pytest.approx(5)
    assert theory.measured_error(2.0, 2.1) == pytest.approx(-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.speedup(-1, 0, 0), "rho must be finite, at least 0"),
        (lambda: theory.grpo_release(0.5, 1, 8, 1.5), "waits must be finite, at least 0 and at most 1"),
        (lambda: theory.opd_release(0.5, 1, 0, 0.5), "turns must be finite, at least 1"),
        (lambda: theory.measured_release([1], [0], 1), "no learner work"),
        (lambda: theory.waves_speedup(0, 1, 0, 0), "waves must be finite, at least 1"),
    ],
)
def test_impossible_inputs_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_curves_are_written_with_their_numbers_and_measured_points(tmp_path):
    files = curves.plot(tmp_path, {"speedup_rho": {"measured": ([0.8, 1.1], [1.4, 1.6])}})
    drawn = json.loads((tmp_path / "theory.json").read_text())
    for name, chart in drawn.items():
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        named = {group.findtext(f"{SVG}title"): group for group in root.iter(f"{SVG}g")}
        pixels, values = [], []
        for curve, (x, y) in chart["curves"].items():
            line = named[curve].find(f"{SVG}path").get("d")
            a, b = np.array(re.findall(r"[ML] ([\d.]+) ([\d.]+)", line), dtype=float).T
            at = x[0] + (a - a[0]) * (x[-1] - x[0]) / (a[-1] - a[0])
            pixels.append(b)
            values.append(np.interp(at, x, y))
        # One scale for all curves of a figure, upside down.
        pixels, values = np.concatenate(pixels), np.concatenate(values)
        slope, offset = np.polyfit(values, pixels, 1)
        assert slope < 0 and np.abs(slope * values + offset - pixels).max() < 0.5
    assert {f.name for f in files} == {f"{name}.svg" for name in drawn} | {"theory.json"}
    points = re.findall(r"<title>(measured: [\d.]+)</title>", (tmp_path / "speedup_rho.svg").read_text())
    assert points == ["measured: 1.40", "measured: 1.60"]
    for name in ("speedup_rho", "speedup_heterogeneity", "speedup_waves"):
        assert all(1 - 1e-9 <= y <= 2 + 1e-9 for _, ys in drawn[name]["curves"].values() for y in ys)
    with pytest.raises(ValueError, match="no figure is named 'other'"):
        curves.plot(tmp_path, {"other": {}})


def test_the_command_says_what_the_functions_say():
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--rho", "1", "--objective", "grpo", "--share", "0", "--kappa", "0", "--json"])
    figures = json.loads(result.stdout)
    assert figures["tail"] == pytest.approx(0.25, abs=1e-6) and figures["speedup"] == pytest.approx(1.6, abs=1e-5)
    assert CliRunner().invoke(app, ["--objective", "ppo"]).exit_code == 2


@pytest.mark.parametrize("objective", ["opd", "grpo"])
def test_every_figure_that_is_printed_has_its_meaning(objective):
    from typer.testing import CliRunner

    from skyrl_thundersync.cli.app import app

    figures = theory.predict(0.9, 0.05, objective, 1.0, 1.0, 20, 8, 2 / 3)
    assert figures.keys() == theory.FIGURES.keys()
    shown = " ".join(CliRunner().invoke(app, ["theory", "--objective", objective]).output.split())
    for words in ("ρ = L/R", "κ = P/R", "in units of R", "times R in seconds they are seconds"):
        assert words in shown, words
