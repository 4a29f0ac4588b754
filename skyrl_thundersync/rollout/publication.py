"""The zero-staleness barrier's last step: every replica proves that it serves θ_{k+1} (PAPER.md, "Scheduling").

A version number is a claim; log-probs are evidence. Each replica computes those of a fixed token sequence with the
weights it now serves, and they must equal the learner's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class StaleReplicaError(RuntimeError):
    """A replica serves something other than what was published."""


class Publishable(Protocol):
    """What weights are published to: `LocalEngineClient`, or `ServerPublisher` for SkyRL's inference servers."""

    async def load_weights(self, path: str, version: int, probe_ids: list[int]) -> list[dict[str, Any]]: ...

    def acknowledged(self, version: int) -> None: ...


@dataclass(frozen=True)
class Acknowledgement:
    """One replica's proof: its name, the version it serves, and the largest probe gap (nats) to the learner."""

    replica: str
    version: int
    worst_gap: float


async def publish(
    path: str,
    version: int,
    target: Publishable,
    probe_ids: Sequence[int],
    expected_logps: Sequence[float],
    tolerance: float,
) -> list[Acknowledgement]:
    """Publish the checkpoint (or adapter) folder `path` as `version` to every replica, and check each one's proof.

    Args:
        probe_ids: n fixed token ids, n ≥ 2.
        expected_logps: the learner's own log-probs of `probe_ids[1:]` at the published weights (n - 1, natural log).
        tolerance: largest |gap| allowed at any position.

    Raises:
        ValueError: probe and expectation do not belong together, or the expectation is not finite.
        StaleReplicaError: a replica's version or log-probs are not those of the publication; none counts as published.
        PublishRefusedError, EngineFailedError: from a replica.
    """
    if len(probe_ids) < 2 or len(expected_logps) != len(probe_ids) - 1:
        raise ValueError(f"{len(probe_ids)} probe ids need one expected log-prob less, not {len(expected_logps)}")
    if not all(map(math.isfinite, expected_logps)):
        raise ValueError(f"the learner's probe log-probs for version {version} are not finite")
    answers = await target.load_weights(path, version, list(probe_ids))
    acknowledgements = [_check(answer, version, expected_logps, tolerance) for answer in answers]
    target.acknowledged(version)
    return acknowledgements


def _check(answer: dict[str, Any], version: int, expected_logps: Sequence[float], tolerance: float) -> Acknowledgement:
    replica, served = answer["replica"], answer["probe_logps"]
    if answer["version"] != version:
        raise StaleReplicaError(f"{replica} serves version {answer['version']} after version {version} was published")
    if answer["prefix_cache_reset"] is not True:
        raise StaleReplicaError(f"{replica} kept the prefix cache of the version before {version}")
    if len(served) != len(expected_logps):
        raise StaleReplicaError(f"{replica} scored {len(served)} probe tokens of {len(expected_logps)}")
    gaps = [abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(served, expected_logps, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] > tolerance:
        raise StaleReplicaError(
            f"{replica} says that it serves version {version}, but its log-prob of probe token {worst + 1} is "
            f"{served[worst]:.6f} and the learner's {expected_logps[worst]:.6f}: gap {gaps[worst]:.2e} > tolerance "
            f"{tolerance:g} (thundersync.publish.tolerance). It serves other weights than those published, or in "
            "another precision"
        )
    return Acknowledgement(replica, answer["version"], gaps[worst])


class AdapterIgnoredError(RuntimeError):
    """A replica computes with its adapter what it computes without."""


async def serve_adapter(path: str, version: int, target: Any, probe_ids: Sequence[int], tolerance: float) -> None:
    """Serve the adapter in folder `path` as `version`, where no learner is there to say what it must compute.

    `target` is a `LocalEngineClient`. The proof is that every replica's log-probs of `probe_ids` change by more than they do
    from one time to the next without it, and to the same for all replicas.

    Raises:
        AdapterIgnoredError: a replica's do not.
        StaleReplicaError: replicas differ by more than `tolerance` (nats), or one kept its cache or version.
    """
    before, again = [await target.logps(list(probe_ids)) for _ in range(2)]
    answers = await target.load_weights(path, version, list(probe_ids))
    for answer, base, repeated in zip(answers, before, again, strict=True):
        _check(answer, version, answers[0]["probe_logps"], tolerance)
        change, noise = _gap(answer["probe_logps"], base), _gap(repeated, base)
        if not change > noise:
            raise AdapterIgnoredError(
                f"{answer['replica']} was given the adapter {path} and computes the same without it (log-probs of "
                f"{len(base)} tokens changed by {change:.1e} nats, {noise:.1e} from one time to the next): it was made for "
                "another model, names modules that this one has not, or was never trained"
            )
    target.acknowledged(version)


def _gap(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))
