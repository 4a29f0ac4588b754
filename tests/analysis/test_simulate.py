"""The simulator: its two drivers against each other, and its outcomes against the theory's closed forms."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import release_model
from skyrl_thundersync import theory
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.simulate import command as simulate
from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct, via_update
from skyrl_thundersync.simulate.workload import RecordedRollouts, Workload, float_zeros, ones, zeros
from skyrl_thundersync.stream.release import SCHEDULES, WorkPolicy
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId
from skyrl_thundersync.telemetry.record import Batch
from tests.analysis.test_theory import recursion

SMALL = Workload(groups=6, samples=3, turns=5, prompt_tokens=200, turn_tokens=100, observation_tokens=80, tool_s=1.0)
MACHINE = Machine(ranks=2, replicas=2, teachers=2, learner_rate=300, item_s=0.01, suffix_s=1.0)


def same(a, b):
    assert a.figures == b.figures
    for name in ("rank", "released_s", "started_s", "service_s"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("cap", "statistics"), [(None, None), (1, None), (2, 0), (None, 1), (None, 3)])
@pytest.mark.parametrize(
    "machine",
    [
        MACHINE,
        replace(MACHINE, teachers=0, sweep_at_close=False, ranks=3, past_tokens=5000.0),
        replace(MACHINE, slots=2, retain_tokens=3000, block_tokens=0, ranks=1),
    ],
)
def test_the_trainers_own_update_and_the_direct_driver_agree_to_the_bit(schedule, cap, statistics, machine):
    policy = WorkPolicy(schedule, cap, statistics)
    for seed in range(2):
        same(
            direct(SMALL.rollouts(machine, seed), machine, policy),
            via_update(SMALL.rollouts(machine, seed), machine, policy),
        )


def test_a_simulation_is_repeatable_and_depends_on_its_seed():
    one, again, other = (direct(SMALL.rollouts(MACHINE, s), MACHINE, WorkPolicy()) for s in (3, 3, 4))
    same(one, again)
    assert one.figures.step_s != other.figures.step_s


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_idles_while_its_work_is_ready(schedule):
    run = direct(SMALL.rollouts(MACHINE, 0), MACHINE, WorkPolicy(schedule))
    tails = []
    for rank in range(MACHINE.ranks):
        mine = run.rank == rank
        released, service = run.released_s[mine], run.service_s[mine]
        assert np.all(np.diff(released) >= 0)  # ready order
        done = recursion(released, service)
        np.testing.assert_allclose(run.started_s[mine] + service, done, rtol=1e-9)
        tails.append(max(done[-1] / run.figures.rollout_s - 1, 0.0))
    assert run.figures.tail == pytest.approx(max(tails), abs=1e-9)
    n = run.figures.sources
    assert run.figures.work_items == len(run.service_s) == n + SMALL.groups * (SMALL.samples + 1)


def test_schedules_change_neither_rollouts_nor_the_work_that_there_is():
    # Graphs retained and no fixed costs: every token is forwarded once and backwarded once under every schedule.
    machine = replace(MACHINE, item_s=0.0, retain_tokens=10**9)
    runs = [direct(SMALL.rollouts(machine, 1), machine, WorkPolicy(schedule)) for schedule in SCHEDULES]
    assert len({run.figures.rollout_s for run in runs}) == 1
    np.testing.assert_allclose([run.service_s.sum() for run in runs], runs[0].service_s.sum(), rtol=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    st.builds(
        Workload,
        groups=st.integers(1, 6),
        samples=st.integers(1, 4),
        turns=st.floats(1, 6),
        skew=st.floats(0, 4),
        alike=st.floats(0, 1),
        prompt_tokens=st.just(50),
        turn_tokens=st.just(40),
        tool_s=st.floats(0, 3),
    ),
    st.floats(5, 5000),
    st.integers(0, 10**6),
)
def test_on_one_rank_earlier_release_is_never_slower_and_never_beats_the_bound(workload, rate, seed):
    machine = replace(MACHINE, ranks=1, item_s=0.0, retain_tokens=10**9, learner_rate=rate)
    sync, group, ours = (direct(workload.rollouts(machine, seed), machine, WorkPolicy(s)).figures for s in SCHEDULES)
    assert ours.step_s <= group.step_s + 1e-9 and group.step_s <= sync.step_s + 1e-9
    # Teachers may score after the last rollout ended; sync's learner then starts a little later than R.
    assert sync.step_s >= (1 + sync.rho) * sync.rollout_s + 1.0 - 1e-9
    assert ours.tail >= max(0.0, ours.rho - 1) - 1e-9
    assert ours.step_s >= max(1, ours.rho) * ours.rollout_s + 1.0 - 1e-9


class LawRollouts:
    """The theory's own assumptions as rollouts: durations U^skew R, turns evenly spaced, tokens that grow as duration^γ."""

    version = 0

    def __init__(self, n, samples, turns, gamma, skew, seed, rollout_s=1000.0):
        u = np.random.default_rng(seed).random(n) ** skew
        u[np.argmax(u)] = 1.0
        self.groups = {f"g{i}": samples for i in range(n // samples)}
        self.events = []
        for index, x in enumerate(u.tolist()):
            trajectory = TrajectoryId(f"g{index // samples}", index % samples)
            tokens = max(1, round(4000 * x**gamma / turns))
            for turn in range(turns):
                source = Source(
                    trajectory,
                    turn,
                    turn and 1,
                    () if turn else (0,),
                    zeros(tokens),
                    ones(tokens),
                    float_zeros(tokens),
                    "stop",
                    0,
                )
                self.events.append((rollout_s * x * (turn + 1) / turns, turn, source))
            self.events.append((rollout_s * x * turns / turns, turns, trajectory))
        self.events.sort(key=lambda event: event[:2])

    def begin(self, timers, sink, ended):
        for when, _, what in self.events:
            if isinstance(what, Source):
                timers.call_at(when, sink.on_turn, what)
            else:
                timers.call_at(when, sink.on_trajectory_closed, what, 1.0, None)
        timers.call_at(self.events[-1][0], ended)


def at_rho(rollouts, machine, policy, rho):
    """Run with the learner's speed set so that ρ comes out about as asked (turns that wait for a close are cheaper)."""
    machine = replace(machine, ranks=1, teachers=0, item_s=0.0, suffix_s=0.0)
    probe = direct(rollouts, machine, policy).figures.rho
    machine = replace(machine, learner_rate=machine.learner_rate * probe / rho)
    run = direct(rollouts, machine, policy)
    assert run.figures.rho == pytest.approx(rho, rel=0.02)
    return run


@pytest.mark.parametrize("rho", [0.5, 1.0, 1.6])
@pytest.mark.parametrize(("gamma", "skew"), [(0.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize(("retain", "deferred"), [(10**9, 2 / 3), (0, 3 / 4)], ids=["graphs retained", "forward twice"])
def test_many_trajectories_have_the_tail_of_the_opd_release_law(rho, gamma, skew, retain, deferred):
    rollouts = LawRollouts(2000, 1, 4, gamma, skew, seed=0)
    machine = Machine(block_tokens=1, retain_tokens=retain)
    run = at_rho(rollouts, machine, WorkPolicy(), rho)
    rho = run.figures.rho
    law = lambda u: theory.opd_release(u, gamma, 4, deferred, skew)  # noqa: E731
    assert run.figures.tail == pytest.approx(theory.tail(law, rho), abs=0.04)
    trace = theory.measured_release(run.released_s, run.service_s, run.figures.rollout_s)
    assert run.figures.tail == pytest.approx(theory.tail(trace, rho), abs=1e-6)


@pytest.mark.parametrize("rho", [0.7, 1.0])
def test_whole_trajectories_and_whole_groups_have_the_grpo_release_laws_tail(rho):
    whole = Machine(block_tokens=10**9)
    for policy, machine, samples, waits in (
        (WorkPolicy(), whole, 1, 0.0),  # a trajectory is one source, swept when its reward is there
        (WorkPolicy(statistics_cap=0), whole, 4, 1.0),  # waits for its group's rewards
        (WorkPolicy(), replace(whole, sweep_at_close=False), 4, 1.0),  # swept when all of its group's are
        (WorkPolicy("group"), whole, 4, 1.0),  # the group-ready pipeline
    ):
        run = at_rho(LawRollouts(2000, samples, 1, 1.0, 1.0, seed=1), machine, policy, rho)
        law = lambda u: theory.grpo_release(u, 1.0, samples, waits)  # noqa: B023, E731
        assert run.figures.tail == pytest.approx(theory.tail(law, rho), abs=0.04)


@pytest.mark.parametrize(
    ("machine", "deferred"),
    [
        (Machine(block_tokens=0), 3 / 4),
        (Machine(block_tokens=0, retain_tokens=10**9), 2 / 3),
        (Machine(block_tokens=10**9), 1.0),
    ],
    ids=["fused", "retain", "whole"],
)
def test_the_share_of_work_that_waits_for_a_close_is_the_laws(machine, deferred):
    """Units of DESIGN.md §3: one forward on arrival; at the close forward and backward, the backward alone, or all."""
    # Never behind, and closed after its last tool: no turn meets its close in the queue.
    machine = replace(machine, ranks=1, item_s=0.0, learner_rate=1e5)
    workload = Workload(groups=20, samples=1, prompt_tokens=1, observation_tokens=0)
    run = direct(workload.rollouts(machine, 0), machine, WorkPolicy(statistics_cap=1))
    assert run.figures.deferred_share == pytest.approx(deferred, abs=1e-3)


def test_sync_pays_rollout_and_learner_one_after_the_other():
    run = at_rho(LawRollouts(500, 1, 3, 1.0, 1.0, seed=2), Machine(), WorkPolicy("sync"), 0.8)
    assert run.figures.tail == pytest.approx(0.8, rel=1e-6) and run.figures.early_share == 0.0


def gain(workload, machine, seeds=3):
    """Speed-up over sync of a balanced learner (ρ = 1 of what sync works), averaged over seeds as PAPER.md does."""
    machine = replace(machine, ranks=1, item_s=0.0, retain_tokens=10**9, suffix_s=0.0)
    probe = [direct(workload.rollouts(machine, s), machine, WorkPolicy("sync")).figures.rho for s in range(seeds)]
    machine = replace(machine, learner_rate=machine.learner_rate * float(np.mean(probe)))
    sync, ours = simulate.compare(workload, machine, [WorkPolicy("sync"), WorkPolicy()], updates=seeds, seed=0)
    assert 1 <= ours.speedup <= 2
    return ours.speedup


def test_heterogeneity_and_waves_raise_the_speedup_as_the_paper_says():
    many = Workload(groups=40, samples=2, turns=8, prompt_tokens=20, turn_tokens=60, observation_tokens=20, tool_s=2.0)
    many = replace(many, token_spread=0.1, tool_spread=0.1)
    # A batch that decodes at one speed whatever runs: durations are then those of the draw.
    machine = Machine(replicas=1, teachers=0, decode_rate=50, decode_peak=1e9, block_tokens=0)
    by_skew = [gain(replace(many, skew=skew), machine) for skew in (0.0, 1.0, 3.0)]
    assert by_skew[0] < by_skew[1] < by_skew[2] and by_skew[2] > 1.6
    by_waves = [gain(replace(many, groups=groups), replace(machine, slots=20)) for groups in (10, 40, 160)]
    assert by_waves[0] < by_waves[1] < by_waves[2] and by_waves[2] > 1.8


@pytest.mark.parametrize("objective", ["opd", "grpo"])
def test_release_laws_predict_the_speedups_of_drawn_workloads(objective):
    few, many = (release_model.pair(objective, 1.0, 20, n, 1.0, seed=0) for n in (32, 512))
    assert many.error < 4 and many.error < few.error
    assert 1.5 < many.trace < 2


def test_a_cap_bounds_the_groups_that_hold_state_and_the_memory():
    machine = replace(MACHINE, ranks=1, retain_tokens=10**9)  # else what is short waits for its sweep, without state
    runs = [direct(SMALL.rollouts(machine, 0), machine, WorkPolicy("thundersync", cap)).figures for cap in (1, 2, None)]
    assert [f.groups_peak for f in runs[:2]] == [1, 2] and runs[2].groups_peak > 2
    assert runs[0].state_tokens_peak < runs[1].state_tokens_peak < runs[2].state_tokens_peak


def test_the_statistics_cap_bounds_statistics_and_more_of_them_is_never_slower_on_one_rank():
    machine = replace(MACHINE, ranks=1, teachers=0, item_s=0.0, retain_tokens=10**9)
    caps = (0, 1, 2, 100)
    runs = [direct(SMALL.rollouts(machine, 0), machine, WorkPolicy(statistics_cap=cap)).figures for cap in caps]
    assert [f.statistics_peak for f in runs[:3]] == [0, 1, 2] and runs[3].statistics_peak > 2
    steps = [f.step_s for f in runs]
    assert steps[0] > steps[-1] and all(a >= b - 1e-9 for a, b in zip(steps, steps[1:], strict=False))


def test_a_thousand_ranks_finish_all_work():
    workload = Workload(groups=1100, samples=4, turns=2, turn_tokens=50, observation_tokens=50, prompt_tokens=100)
    machine = Machine(ranks=1024, replicas=128, teachers=128)
    rollouts = workload.rollouts(machine, 0)
    run = direct(rollouts, machine, WorkPolicy())
    assert run.figures.sources == rollouts.sources > 8000
    assert len(np.unique(run.rank)) == 1024
    assert run.figures.work_items == rollouts.sources + 1100 * 5


def test_a_sweep_does_not_wait_for_the_last_check_unless_it_needs_the_reward():
    """A learner that is much faster than the rollouts: what waits for a reward is swept in a tail of its own."""
    machine = Machine(ranks=1, learner_rate=1e4, block_tokens=10**9)
    workload = Workload(groups=1, samples=1, turns=1, skew=0, tool_s=500.0, tool_spread=0.0)
    assert direct(workload.rollouts(machine, 0), machine, WorkPolicy()).figures.tail == 0.0
    assert direct(workload.rollouts(machine, 0), machine, WorkPolicy(statistics_cap=1)).figures.tail > 0.0


def recorded(workload, machine, seed):
    """A batch as `Recorder` would have kept it, its seconds rounded so that some fall together."""
    log, rollouts = [], workload.rollouts(machine, seed)

    class Log:
        def on_turn(self, source):
            log.append(Append(source, None))

        def on_last_turn(self, trajectory): ...

        def on_trajectory_closed(self, trajectory, reward, host_scored):
            log.append(CloseTrajectory(trajectory, reward))

    from skyrl_thundersync.simulate.virtual_time import Events

    events, seconds = Events(), []
    rollouts.begin(events, Log(), lambda: None)
    events.run(lambda: seconds.extend([events.time()] * (len(log) - len(seconds))), [True])
    ends = {group: max(s for s, w in zip(seconds, log, strict=True) if _group(w) == group) for group in rollouts.groups}
    rows = sorted(
        [(round(s, 1), i, w) for i, (s, w) in enumerate(zip(seconds, log, strict=True))]
        + [(round(s, 1), len(log), CloseGroup(group)) for group, s in ends.items()],
        key=lambda row: row[:2],
    )
    return Batch(0, rollouts.groups, tuple(w for *_, w in rows), (0,) * len(rows), tuple(s for s, *_ in rows))


def _group(work):
    return work.source.trajectory.group if isinstance(work, Append) else work.trajectory.group


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recorded_batch_happens_again_at_its_seconds_under_both_drivers(schedule):
    batch = recorded(SMALL, MACHINE, 0)
    runs = [drive(RecordedRollouts(batch), MACHINE, WorkPolicy(schedule)) for drive in (direct, via_update)]
    same(*runs)
    assert runs[0].figures.rollout_s == batch.seconds[-1]
    if schedule == "thundersync":
        np.testing.assert_array_equal(np.sort(runs[0].released_s), np.array(batch.seconds))
    slower = direct(RecordedRollouts(batch, pace=2.0), MACHINE, WorkPolicy(schedule)).figures
    assert slower.rollout_s == pytest.approx(2 * batch.seconds[-1])
    late = direct(RecordedRollouts(batch, rollout_s=1000.0), MACHINE, WorkPolicy(schedule)).figures
    assert late.rollout_s == 1000.0


def test_the_sweep_tries_every_split_and_puts_the_fastest_first():
    policies = simulate.policies_of([1, None], [None])
    rows = simulate.sweep(SMALL, MACHINE, 5, policies, updates=1)
    tried = {(r.ranks, r.replicas, r.teachers) for r in rows}
    assert tried == {(a, b, 5 - a - b) for a in range(1, 4) for b in range(1, 5 - a)}
    assert len(rows) == len(tried) * 4 and all(a.step_s <= b.step_s for a, b in zip(rows, rows[1:], strict=False))
    best = rows[0]
    again = replace(MACHINE, ranks=best.ranks, replicas=best.replicas, teachers=best.teachers)
    own = direct(SMALL.rollouts(again, 42), again, WorkPolicy(best.schedule, best.cap))
    assert own.figures.step_s == best.step_s
    limit = int(np.median([r.figures["state_tokens_peak"] for r in rows]))
    fit = simulate.sweep(SMALL, MACHINE, 5, policies, updates=1, state_limit=limit)
    assert 0 < len(fit) < len(rows) and all(r.figures["state_tokens_peak"] <= limit for r in fit)
    with pytest.raises(ValueError, match="no configuration keeps a rank's state within 1 tokens"):
        simulate.sweep(SMALL, MACHINE, 5, policies, updates=1, state_limit=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WorkPolicy("async"), "unknown schedule 'async'"),
        (lambda: Machine(ranks=0), "ranks=0 must be above 0"),
        (lambda: Machine(decode_peak=1, decode_rate=2), "decode_peak=1 must be at least decode_rate"),
        (lambda: Machine(learner_rate=float("nan")), "learner_rate=nan"),
        (lambda: Workload(turns=0.5), "turns=0.5 must be at least 1"),
        (lambda: Workload(alike=2), "alike=2 must be at least 0, at most 1"),
        (lambda: list(simulate.splits(2, teacher=True)), "2 devices are too few"),
        (lambda: simulate.settings(["turn=3"]), "did you mean turns"),
        (lambda: simulate.settings(["turns=many"]), "'many' is not a number"),
    ],
)
def test_impossible_configurations_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_prints_json_and_refuses_what_it_does_not_know():
    app = typer.Typer()
    app.command()(simulate.command)
    small = ["groups=3", "samples=2", "turns=2", "--updates", "1"]
    result = CliRunner().invoke(app, [*small, "--json", "--caps", "1,none"])
    rows = json.loads(result.stdout)
    assert [(r["schedule"], r["cap"]) for r in rows] == [
        ("sync", None),
        ("group", None),
        ("thundersync", 1),
        ("thundersync", None),
    ]
    assert rows[0]["speedup"] == 1.0
    assert "best:" in CliRunner().invoke(app, [*small, "--gpus", "4"]).stdout
    assert CliRunner().invoke(app, ["--caps", "few"]).exit_code == 2


def test_help_lists_every_key_with_its_default_and_meaning():
    from skyrl_thundersync.cli.app import app

    done = CliRunner().invoke(app, ["simulate", "--help"])
    shown = " ".join(done.output.split())
    for kind in (Workload, Machine):
        for field in fields(kind):
            assert f"{field.name}=" in shown and field.metadata["meaning"][:20] in shown, field.name
    assert "turns=20.0: mean turns of a trajectory" in shown and "+config=GROUP/NAME" in shown


def test_a_preset_and_a_runs_options_set_what_a_configuration_knows():
    base = ["+config=opd/quickstart", "trainer.train_batch_size=6", "thundersync.learner.ranks=3"]
    workload, machine = simulate.settings([*base, "turns=7", "replicas=5"])
    assert (workload.groups, workload.samples, workload.turns) == (6, 4, 7)
    assert (machine.ranks, machine.replicas, machine.teachers, machine.slots) == (3, 5, 1, 64)
    assert simulate.settings(["+config=grpo/quickstart"])[1].teachers == 0
    with pytest.raises(ConfigError, match="opd/quickstrat"):
        simulate.settings(["+config=opd/quickstrat"])
    with pytest.raises(ValueError, match="--help lists the keys"):
        simulate.settings(["zzz=1"])
