"""How well the closed release laws predict simulated speed-ups: e_i of PAPER.md ("Theory") over a grid of workloads.

    python -m benchmarks.release_model [--seeds 2] [--json]

Each configuration is one learner lane under sync and thundersync, simulated by the scheduler that trains. o_i: speed-up by
the release law with the workload's own γ, skew, turns and δ, and the ρ and κ of the trace; s_i: speed-up of the trace.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from skyrl_thundersync import theory
from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import Workload
from skyrl_thundersync.stream.release import WorkPolicy

GAMMA = 1.0  # a turn costs the learner as much as any other: service grows as the number of turns does


@dataclass(frozen=True)
class Pair:
    """One configuration: release model o and trace s, both speed-ups, and e in percent."""

    objective: str
    skew: float
    turns: int
    trajectories: int
    rho: float
    model: float
    trace: float
    error: float


def pair(objective: str, skew: float, turns: int, trajectories: int, rho: float, seed: int) -> Pair:
    """Simulate one configuration at ρ and compare. GRPO: whole trajectories, known rewards (β = 0); OPD: δ = 2/3."""
    workload = Workload(
        groups=trajectories,
        samples=1,
        turns=turns,
        skew=skew,
        prompt_tokens=20,
        turn_tokens=60,
        observation_tokens=20,
        token_spread=0.2,
        tool_spread=0.2,
    )
    machine = Machine(ranks=1, replicas=1, teachers=0, decode_rate=50, decode_peak=1e9, item_s=0.0, suffix_s=2.0)
    opd = objective == "opd"
    machine = replace(machine, block_tokens=0 if opd else 10**9, retain_tokens=10**9)
    probe = direct(workload.rollouts(machine, seed), machine, WorkPolicy("sync")).figures
    machine = replace(machine, learner_rate=machine.learner_rate * probe.rho / rho)
    sync, ours = (
        direct(workload.rollouts(machine, seed), machine, WorkPolicy(s)).figures for s in ("sync", "thundersync")
    )

    def law(u):
        if opd:
            return theory.opd_release(u, GAMMA, turns, 2 / 3, skew)
        return theory.grpo_release(u, GAMMA, 1, 0.0, skew)

    model = float(theory.speedup(sync.rho, sync.kappa, theory.tail(law, ours.rho)))
    trace = sync.step_s / ours.step_s
    return Pair(objective, skew, turns, trajectories, rho, model, trace, float(theory.release_error(model, trace)))


def main(
    seeds: Annotated[int, typer.Option(help="Draws of each configuration.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare on every configuration of the grid."""
    grid = itertools.product(("opd", "grpo"), (1.0, 2.0, 4.0), (5, 20), (64, 256), (0.6, 1.0, 1.4), range(seeds))
    pairs = [pair(*configuration) for configuration in grid]
    errors = [p.error for p in pairs]
    result = {"configurations": len(pairs), "mean_percent": statistics.fmean(errors), "worst_percent": max(errors)}
    if as_json:
        print(json.dumps(result | {"pairs": [vars(p) for p in pairs]}))
        return
    print(f"{result['configurations']} configurations: e {result['mean_percent']:.1f}% mean, {max(errors):.1f}% worst")
    for p in sorted(pairs, key=lambda p: -p.error)[:5]:
        print(f"  {p}")


if __name__ == "__main__":
    typer.run(main)
