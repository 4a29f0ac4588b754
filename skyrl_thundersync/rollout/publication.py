"""The zero-staleness barrier's last step: every replica proves that it serves θ_{k+1} (PAPER.md, "Scheduling").

A version number is a claim. The proof is of two kinds. Bits: order-free sums over the weights that a replica's kernels read
must equal the learner's own, group by group, exactly; nothing that is old, missing or under a wrong name passes, however
small the step was. Behaviour: log-probs of a fixed text, within the rounding of two sets of kernels; it sees what bits
cannot: an order of elements, a kernel, an adapter that is there and not applied.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyrl_thundersync.engines.weight_bits import Bits, group_of

PROBE_TEXT = """\
You are working in a terminal on a Linux machine. The service in /srv/app stopped after last night's upgrade, and the people \
who use it are waiting. Read the logs before you change anything.

$ tail -n 3 /var/log/app.log
2024-03-18 02:14:07 ERROR could not open database "orders.db": no such table: customers
2024-03-18 02:14:07 INFO retrying in 30 s (attempt 5 of 5)
2024-03-18 02:14:37 FATAL giving up; 17 requests were waiting

$ python3 -c "import sqlite3; print(sqlite3.connect('/srv/app/orders.db').execute('select count(*) from orders').fetchone())"
(48213,)

The table `orders` is there and the table `customers` is not, so the migration was interrupted half-way: it renames the old \
table first and fills the new one afterwards. Nothing is lost. I will make a copy, finish the second step, and start it:

def migrate(connection):
    rows = connection.execute("select id, name, email from customers_old").fetchall()
    connection.executemany("insert into customers values (?, ?, ?)", rows)
    return len(rows)
"""


class StaleReplicaError(RuntimeError):
    """A replica serves something other than what was published."""


class AdapterIgnoredError(RuntimeError):
    """A replica serves without its adapter, or without a part of it."""


class Publishable(Protocol):
    """What weights are published to: `LocalEngineClient`, or `ServerPublisher` for SkyRL's inference servers."""

    async def load_weights(self, path: str, version: int, probe_ids: list[int]) -> list[dict[str, Any]]: ...

    def acknowledged(self, version: int) -> None: ...


@dataclass(frozen=True)
class Expected:
    """What a replica must prove.

    Attributes:
        bits: of the weights (the adapter) that the learner wrote, by group (engines/weight_bits.py).
        probe_ids: n fixed token ids, n ≥ 2.
        logps: the learner's own log-probs of `probe_ids[1:]` at the published weights (n - 1, natural log).
        tolerance: largest |gap| in nats allowed at any position.
    """

    bits: Bits
    probe_ids: Sequence[int]
    logps: Sequence[float]
    tolerance: float


@dataclass(frozen=True)
class Acknowledgement:
    """One replica's proof: its name, the version it serves, and the largest probe gap (nats) to the learner."""

    replica: str
    version: int
    worst_gap: float


def probe_ids(tokenizer: Any, count: int) -> list[int]:
    """`count` ids of the probe: `PROBE_TEXT`, as often as it takes; random ids where the tokenizer has no words for it."""
    text = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    if len(set(text)) < 16:
        rng = random.Random(0)
        return [rng.randrange(len(tokenizer)) for _ in range(count)]
    return (text * -(-count // len(text)))[:count]


async def publish(path: str, version: int, target: Publishable, expected: Expected) -> list[Acknowledgement]:
    """Publish the checkpoint (or adapter) folder `path` as `version` to every replica, and check each one's proof.

    Raises:
        ValueError: probe and expectation do not belong together, or the expectation is not finite.
        StaleReplicaError: a replica's version, bits or log-probs are not those of the publication; none counts as published.
        AdapterIgnoredError: a replica has no modules under the names that the adapter gives them.
        PublishRefusedError, EngineFailedError: from a replica.
    """
    ids, logps = expected.probe_ids, expected.logps
    if len(ids) < 2 or len(logps) != len(ids) - 1:
        raise ValueError(f"{len(ids)} probe ids need one expected log-prob less, not {len(logps)}")
    if not all(map(math.isfinite, logps)):
        raise ValueError(f"the learner's probe log-probs for version {version} are not finite")
    answers = await target.load_weights(path, version, list(ids))
    acknowledgements = [_check(answer, version, path, expected) for answer in answers]
    target.acknowledged(version)
    return acknowledgements


def _check(answer: dict[str, Any], version: int, path: str, expected: Expected) -> Acknowledgement:
    replica, served = answer["replica"], answer["probe_logps"]
    if answer["version"] != version:
        raise StaleReplicaError(f"{replica} serves version {answer['version']} after version {version} was published")
    if answer["prefix_cache_reset"] is not True:
        raise StaleReplicaError(f"{replica} kept the prefix cache of the version before {version}")
    _check_bits(answer, version, path, expected.bits)
    if len(served) != len(expected.logps):
        raise StaleReplicaError(f"{replica} scored {len(served)} probe tokens of {len(expected.logps)}")
    gaps = [abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(served, expected.logps, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] > expected.tolerance:
        raise StaleReplicaError(
            f"{replica} holds the weights of version {version}, but its log-prob of probe token {worst + 1} is "
            f"{served[worst]:.6f} and the learner's {expected.logps[worst]:.6f}: gap {gaps[worst]:.2e} > tolerance "
            f"{expected.tolerance:g} (thundersync.publish.tolerance). It computes something else with them, or in another "
            "precision"
        )
    return Acknowledgement(replica, answer["version"], gaps[worst])


def _check_bits(answer: dict[str, Any], version: int, path: str, expected: Bits) -> None:
    """Raises StaleReplicaError or AdapterIgnoredError naming what of the weights is not the learner's."""
    replica, held = answer["replica"], answer["bits"]
    wrong = [group for group, pair in expected.items() if tuple(held.get(group, (0, 0))) != tuple(pair)]
    if not wrong:
        return
    none = [group for group in wrong if tuple(held.get(group, (0, 0))) == (0, 0)]
    if none and (Path(path) / "adapter_config.json").is_file():
        names = [name for name in adapter_modules(path) if group_of(f"{name}.lora") in none]
        empty = [name for name in answer["empty"] if group_of(f"{name}.lora") in none]
        raise AdapterIgnoredError(
            f"{replica} took nothing of the adapter's {_some(names)}: vLLM's class for this model has no such module under "
            f"that name{f'; its own {_some(empty)} hold nothing' if empty else ''}. It would sample without them"
        )
    raise StaleReplicaError(
        f"{replica} says that it serves version {version}, but {len(wrong)} of {len(expected)} groups of its weights are "
        f"not, bit by bit, those that the learner wrote: {_some(wrong)}. They are old, or only partly loaded"
    )


def adapter_modules(path: str) -> list[str]:
    """The modules that the PEFT adapter in folder `path` names, as it names them."""
    from safetensors import safe_open

    with safe_open(Path(path) / "adapter_model.safetensors", framework="pt") as tensors:
        names = [name.partition(".lora_A.") for name in tensors.keys()]  # noqa: SIM118 - not a dict
    return [module.removeprefix("base_model.model.") for module, found, _ in names if found]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


async def serve_adapter(
    path: str, version: int, target: Any, bits: Bits, probe_ids: Sequence[int], tolerance: float
) -> None:
    """Serve the adapter in folder `path` as `version`, where no learner is there to say what it must compute.

    `target` is a `LocalEngineClient`, `bits` those of the folder (`weight_bits.adapter_folder_bits`). The proof is that
    every replica holds them, and that its log-probs of `probe_ids` change by more than they do from one time to the next
    without the adapter, and to the same for all replicas.

    Raises:
        AdapterIgnoredError: a replica has no modules of the adapter's names, or computes what it did without it.
        StaleReplicaError: replicas differ by more than `tolerance` (nats), or one kept its cache or version.
    """
    before, again = [await target.logps(list(probe_ids)) for _ in range(2)]
    answers = await target.load_weights(path, version, list(probe_ids))
    expected = Expected(bits, probe_ids, answers[0]["probe_logps"], tolerance)
    for answer, base, repeated in zip(answers, before, again, strict=True):
        _check(answer, version, path, expected)
        change, noise = _gap(answer["probe_logps"], base), _gap(repeated, base)
        if not change > noise:
            raise AdapterIgnoredError(
                f"{answer['replica']} was given the adapter {path} and computes the same without it (log-probs of "
                f"{len(base)} tokens changed by {change:.1e} nats, {noise:.1e} from one time to the next): it was made for "
                "another model, or never trained"
            )
    target.acknowledged(version)


def _gap(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))
