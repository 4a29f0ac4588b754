"""How much overlap is worth: the release laws, tails, bounds and speed-ups of PAPER.md ("Theory", its Appendix F).

Plain numpy; every argument broadcasts. Times are divided by the rollout time R, so a moment u lies in [0, 1]:
ρ = L/R is learner service, κ = P/R the suffix (final reduction, step, publication), λ the learner's tail after the last
rollout.

    skyrl theory --rho 1.2 --objective opd --turns 20 --share 0.67 --plot FOLDER

Beyond the paper: durations may be skewed (U^skew instead of U), which is how heterogeneity enters here, and laws
can be built from measured release times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Law = Callable[[np.ndarray], np.ndarray]
"""F(u): share of learner service released by normalised time u, nondecreasing from F(0) ≥ 0 to F(1) = 1."""

POINTS = 4096
"""Moments at which a law is looked at; the best one's neighbourhood is then looked at once more, as finely."""


def speedup(rho, kappa, tail) -> np.ndarray:
    """T_sync / T = (1 + ρ + κ) / (1 + λ + κ) ("Theory")."""
    rho, kappa, tail = _numbers("rho", rho), _numbers("kappa", kappa), _numbers("tail", tail)
    return (1 + rho + kappa) / (1 + tail + kappa)


def speedup_bound(rho, kappa=0.0) -> np.ndarray:
    """What no order of work can beat: (R + L + P) / (max(R, L) + P), at most 2 ("Theory")."""
    rho, kappa = _numbers("rho", rho), _numbers("kappa", kappa)
    return (1 + rho + kappa) / (np.maximum(1, rho) + kappa)


def grpo_release(u, gamma: float, group: int, waits: float, skew: float = 1.0) -> np.ndarray:
    """F(u) = (1-β) u^{γ+1} + β u^{γ+m} ("Theory", GRPO release).

    Trajectory durations are uniform and its service grows as duration^γ; a share β of it waits for the group's last
    reward. With `skew` s durations are U^s instead: F(u) = (1-β) u^{γ+1/s} + β u^{γ+m/s}. Larger s: many short
    trajectories and a few long ones, that is, more heterogeneity (`spread`).

    Args:
        u: normalised time; below 0 counts as 0, above 1 as 1.
        gamma: γ ≥ 0.
        group: m ≥ 1, trajectories a group.
        waits: β in [0, 1]; 1 is the group-ready pipeline.
        skew: s > 0.
    """
    u = _unit(u)
    gamma, waits = _numbers("gamma", gamma), _numbers("waits", waits, most=1)
    skew, group = _numbers("skew", skew, above=0), _numbers("group", group, least=1)
    return (1 - waits) * u ** (gamma + 1 / skew) + waits * u ** (gamma + group / skew)


def opd_release(u, gamma: float, turns: int, deferred: float, skew: float = 1.0) -> np.ndarray:
    """F(u) = (1-δ)/a Σ_{j=1..a} min(1, a u/j)^{γ+1} + δ u^{γ+1} ("Theory", OPD release).

    Turn j of a trajectory is released at j/a of its duration; a share δ of the service is deferred to its close. In units
    of DESIGN.md §3 δ is 3/4 for fused sweeps, 2/3 where graphs are retained, and 1 where whole trajectories run at once.
    `skew` as in `grpo_release`.

    Args:
        turns: a ≥ 1.
        deferred: δ in [0, 1].
    """
    u = _unit(u)
    gamma, deferred = _numbers("gamma", gamma), _numbers("deferred", deferred, most=1)
    power = gamma + 1 / _numbers("skew", skew, above=0)
    turns = int(_numbers("turns", turns, least=1))
    early = sum(np.minimum(1.0, turns * u / j) ** power for j in range(1, turns + 1)) / turns
    return (1 - deferred) * early + deferred * u**power


def spread(skew) -> np.ndarray:
    """Coefficient of variation of trajectory durations U^s: sqrt((s+1)² / (2s+1) - 1); 0.577 for uniform ones."""
    s = _numbers("skew", skew, above=0)
    return np.sqrt((s + 1) ** 2 / (2 * s + 1) - 1)


@dataclass(frozen=True)
class MeasuredLaw:
    """F⁻ of a trace as a step function: `share[i]` of the service was released before `kinks[i]`, ascending, in [0, 1]."""

    kinks: np.ndarray
    share: np.ndarray

    def __call__(self, u) -> np.ndarray:
        return self.share[np.searchsorted(self.kinks, np.asarray(u, float), side="left")]


def measured_release(release_s, service_s, rollout_s: float) -> MeasuredLaw:
    """F⁻ of a trace: the share of service released strictly before u R ("Theory"). Work released after R counts from 1 on.

    Args:
        release_s, service_s: (n,) seconds, in any order.
        rollout_s: R > 0, seconds.
    """
    rollout = _numbers("rollout_s", rollout_s, above=0)
    moment = np.minimum(_numbers("release_s", release_s) / rollout, 1.0)
    order = np.argsort(moment, kind="stable")
    moment = moment[order]
    share = np.concatenate([[0.0], np.cumsum(_numbers("service_s", service_s)[order])])
    if share[-1] <= 0:
        raise ValueError("service_s sums to 0: there is no learner work whose release could be described")
    return MeasuredLaw(moment, share / share[-1])


def tail(law: Law, rho) -> np.ndarray:
    """λ with 1 + λ = max{1, sup_{0≤u≤1} [u + ρ (1 - F⁻(u))]} ("Theory"). Shape of `rho`, dimensionless."""
    rho = _numbers("rho", rho)
    sup = lambda weight: _sup(law, lambda u, f: u + weight * (1 - f))  # noqa: E731
    return np.maximum(np.vectorize(sup, otypes=[float])(rho) - 1, 0.0)


def lag(law: Law) -> float:
    """D = sup_u [u - F⁻(u)]: how far release runs behind a uniform one ("Theory"). In [0, 1]."""
    return _sup(law, lambda u, f: u - f)


def tail_bounds(rho, lag_d) -> tuple[np.ndarray, np.ndarray]:
    """[ρ-1]_+ ≤ λ ≤ [ρ-1]_+ + ρ D ("Theory")."""
    rho, lag_d = _numbers("rho", rho), _numbers("lag_d", lag_d, most=1)
    floor = np.maximum(rho - 1, 0.0)
    return floor, floor + rho * lag_d


def waves_speedup(waves, rho_w, kappa_w, tail_w) -> np.ndarray:
    """S(w) = (w (1+ρ_w) + κ_w) / (w max(1, ρ_w) + κ_w - [ρ_w-1]_+ + λ_w), → 2 when balanced ("Theory", waves).

    Args:
        waves: w ≥ 1 rollout waves, one after the other, each of W seconds.
        rho_w, kappa_w, tail_w: learner service of one wave, suffix, and tail of the last wave, each divided by W.
    """
    waves = _numbers("waves", waves, least=1)
    rho, kappa, lam = _numbers("rho_w", rho_w), _numbers("kappa_w", kappa_w), _numbers("tail_w", tail_w)
    return (waves * (1 + rho) + kappa) / (waves * np.maximum(1, rho) + kappa - np.maximum(rho - 1, 0) + lam)


def release_error(predicted, simulated) -> np.ndarray:
    """e_i = 100 |o_i - s_i| / s_i in percent: release model o against trace prediction s ("Theory", 588 configurations)."""
    s = _numbers("simulated", simulated, above=0)
    return 100 * np.abs(_numbers("predicted", predicted) - s) / s


def measured_error(predicted, measured) -> np.ndarray:
    """d_i = 100 (o_i - f_i) / o_i in percent, signed: prediction o against measured speed-up f ("Theory")."""
    o = _numbers("predicted", predicted, above=0)
    return 100 * (o - _numbers("measured", measured)) / o


def _sup(law: Law, value: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """sup over [0, 1]: a grid and the law's own jumps, then a grid around the best moment."""
    kinks = law.kinks if isinstance(law, MeasuredLaw) else np.empty(0)
    u = np.union1d(np.linspace(0.0, 1.0, POINTS + 1), kinks)
    values = value(u, law(u))
    best = int(np.argmax(values))
    near = np.linspace(u[max(best - 1, 0)], u[min(best + 1, len(u) - 1)], POINTS + 1)
    return float(max(values[best], np.max(value(near, law(near)))))


def _numbers(name: str, value, *, least: float = 0.0, above: float | None = None, most: float = np.inf) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    bound = f"at least {least:g}" if above is None else f"above {above:g}"
    low = array < least if above is None else array <= above
    if not np.all(np.isfinite(array)) or np.any(low) or np.any(array > most):
        limit = "" if most == np.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be finite, {bound}{limit}; got {value!r}")
    return array


def _unit(u) -> np.ndarray:
    return np.clip(np.asarray(u, dtype=np.float64), 0.0, 1.0)


FIGURES = {
    "tail": ("λ", "learner time after the last rollout, in units of R"),
    "tail_lower_bound": ("[ρ-1]₊", "no order of work has a shorter tail; in units of R"),
    "tail_upper_bound": ("[ρ-1]₊ + ρD", "no law with this lag has a longer one; in units of R"),
    "lag": ("D", "how far release runs behind an even one at most, as a share of the learner's work; 0 to 1"),
    "duration_spread": (
        "",
        "coefficient of variation of trajectory durations, deviation over mean; uniform ones have 0.577",
    ),
    "speedup": ("T_sync / T", "step time of sync over that of thundersync; 1 is no gain"),
    "speedup_bound": ("", "the most that any schedule could reach with this ρ and κ; at most 2"),
}
"""Symbol and meaning, unit included, of what `predict` returns."""


def predict(
    rho: float,
    kappa: float,
    objective: str,
    gamma: float,
    skew: float,
    turns: int,
    group: int,
    share: float,
    waves: int = 1,
) -> dict[str, float]:
    """All figures of one configuration; arguments as `command`'s.

    Raises:
        ValueError: an objective other than "opd" and "grpo", or a figure out of its range.
    """
    if objective not in ("opd", "grpo"):
        raise ValueError(f"unknown objective {objective!r}; known are opd, grpo")

    def law(u):
        if objective == "opd":
            return opd_release(u, gamma, turns, share, skew)
        return grpo_release(u, gamma, group, share, skew)

    lam, behind = float(tail(law, rho)), lag(law)
    low, high = tail_bounds(rho, behind)
    return {
        "tail": lam,
        "tail_lower_bound": float(low),
        "tail_upper_bound": float(high),
        "lag": behind,
        "duration_spread": float(spread(skew)),
        "speedup": float(waves_speedup(waves, rho, kappa, lam)),
        "speedup_bound": float(speedup_bound(rho, kappa / waves)),
    }
