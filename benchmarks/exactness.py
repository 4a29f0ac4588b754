"""How far the learner's gradient is from an independent monolithic computation, family by family.

    python -m benchmarks.exactness [--quick] [--json]

Reference: the monolithic gradient in FP64, of parameters rounded to the student's dtype. Beside the learner's own relative
error stands that of the monolithic computation in the student's dtype. Exits 1 when a bound is broken:

    FP64           ≤ 1e-12
    FP32, BF16     ≤ 2 × the monolithic computation's own error; where that is smaller, 2 units in the last place
    one adjoint dropped, any of a random twenty: the error must be seen
    exact sums     one hash of the parameters after 3 updates, over random arrival orders and placements on 1, 2, 3 ranks
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.eager import EagerForest
from benchmarks.monolithic import FAMILIES, Gradient, batch, distance, gradient, save_model, settings, stock_model
from skyrl_thundersync.learner.rank import WHOLE_TRAJECTORY, LearnerRank, RankSpec
from skyrl_thundersync.learner.states import Adjoint
from skyrl_thundersync.stream.sources import Work, group_of

POLICIES = {
    "fused": {"block_tokens": 8},
    "retain": {"block_tokens": 8, "retain_gib": 1.0},
    "retain, in part": {"block_tokens": 8, "retain_gib": 3e-4},
    "turn by turn": {"block_tokens": 0},
    "trajectory": {"block_tokens": WHOLE_TRAJECTORY, "retain_gib": 1.0},
    "eager": {"block_tokens": 0, "forest": EagerForest},
}
MODELS = {name: (name, {}) for name in FAMILIES} | {"llama, tied head": ("llama", {"tie_word_embeddings": True})}
QUICK = {"models": ("qwen3", "glm4_moe_lite"), "policies": {name: POLICIES[name] for name in ("fused", "retain")}}


@dataclass(frozen=True)
class Row:
    """One line of the table: relative gradient errors against FP64 and whether the bound holds."""

    model: str
    dtype: str
    policy: str
    objective: str
    ranks: int
    error: float
    own: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound


def bound(dtype: str, own: float) -> float:
    """The largest error allowed, given the monolithic computation's own in the same dtype.

    Both are sums of many roundings, in another order: neither is a bound of the other, but they are of one size.
    """
    return 1e-12 if dtype == "float64" else max(2 * own, 2 * torch.finfo(getattr(torch, dtype)).eps)


def streamed(folder: str, works: list[Work], objective: str, dtype: str, policy: dict, ranks: int, device: str):
    """Σ over `ranks` learner ranks, each with its share of the groups, of the accumulated gradient."""
    total: Gradient = {}
    options = {name: value for name, value in policy.items() if name != "forest"}
    for rank in range(ranks):
        spec = RankSpec(folder, 0, 1, "127.0.0.1", 0, settings(dtype=dtype, **options), objective, device=device)
        learner = LearnerRank(spec)
        if "forest" in policy:
            learner.forest = policy["forest"].of(learner.forest)
        groups = sorted({group_of(w) for w in works})[rank::ranks]
        share = [w for w in works if group_of(w) in groups]
        if policy["block_tokens"] == WHOLE_TRAJECTORY:
            learner.run_many(share)
        else:
            for work in share:
                learner.run(work)
        for name, g in learner.gradient().items():
            total[name] = total[name] + g if name in total else g
        learner.accumulator.detach()
    return total


def table(models, policies, dtypes, ranks, device: str, folder: Path, works: list[Work]):
    """Rows of the table, model by model. policies: as POLICIES."""
    for name in models:
        family, changes = MODELS[name]
        model = save_model(folder / name, family, **changes)
        for dtype, objective in itertools.product(dtypes, ("opd", "grpo")):
            true = gradient(stock_model(model, dtype, "float64", device), works, objective)
            own = distance(gradient(stock_model(model, dtype, dtype, device), works, objective), true)
            # eager needs sources that are complete on arrival
            able = [policy for policy in policies if policy != "eager" or objective == "opd"]
            for policy, n in [(policy, 1) for policy in able] + [("fused", n) for n in ranks if n > 1]:
                ours = streamed(model, works, objective, dtype, policies[policy], n, device)
                yield Row(name, dtype, policy, objective, n, distance(ours, true), own, bound(dtype, own))


def severed(folder: str, works: list[Work], device: str, tries: int = 20) -> float:
    """The smallest relative error over `tries` sweeps that each lose one adjoint, FP64."""
    true = gradient(stock_model(folder, "float64", "float64", device), works, "opd")
    deposit, count, errors = Adjoint.deposit, 0, []

    def all_but(lost: int):
        def counted(self, layer, part, value):
            nonlocal count
            count += 1
            if count - 1 != lost:
                deposit(self, layer, part, value)

        return counted

    try:
        Adjoint.deposit = all_but(-1)
        streamed(folder, works, "opd", "float64", POLICIES["fused"], 1, device)
        for lost in torch.linspace(0, count - 1, tries).long().tolist():
            count, Adjoint.deposit = 0, all_but(lost)
            errors.append(distance(streamed(folder, works, "opd", "float64", POLICIES["fused"], 1, device), true))
    finally:
        Adjoint.deposit = deposit
    return min(errors)


def hashes(folder: str, orders: int, worlds: tuple[int, ...]) -> set[str]:
    """Hashes of the parameters after 3 updates: `orders` arrival orders and placements on each number of ranks."""
    import ranks  # of the tests

    found = set()
    for world in worlds:
        for own in ranks.in_processes(ranks.hashes, folder, "opd", orders, world=world):
            found |= set(own)
    return found


def show(rows: list[Row], console: Console) -> None:
    view = Table("model", "dtype", "policy", "objective", "ranks", "error", "monolithic's own", "bound", box=None)
    for r in rows:
        numbers = (f"{r.error:.1e}", f"{r.own:.1e}", f"{r.bound:.1e}" + ("" if r.holds else "  [red]broken[/red]"))
        view.add_row(r.model, r.dtype, r.policy, r.objective, str(r.ranks), *numbers)
    console.print(view)


def main(
    quick: Annotated[bool, typer.Option(help="Two families, two policies, two ranks: under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the table; exit 1 when a bound is broken."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(stderr=as_json)
    models, policies = (QUICK["models"], QUICK["policies"]) if quick else (tuple(MODELS), POLICIES)
    works = batch(seed=21, groups=3, samples=3)
    with tempfile.TemporaryDirectory(prefix="exactness-") as name:
        folder = Path(name)
        ranks = () if quick else (2, 3)
        rows = list(table(models, policies, ("float64", "float32", "bfloat16"), ranks, "cpu", folder, works))
        show(rows, console)
        lost = severed(str(folder / "qwen3"), works, "cpu", 3 if quick else 20)
        console.print(f"one adjoint dropped: error at least {lost:.1e}" + ("" if lost > 1e-9 else ", NOT SEEN"))
        orders, worlds = (2, (1, 2)) if quick else (20, (1, 2, 3))
        found = hashes(str(folder / "qwen3"), orders, worlds)
        console.print(f"exact sums, {orders} orders x {worlds} ranks, 3 updates: {len(found)} hash(es), one wanted")
    broken = [r for r in rows if not r.holds]
    console.print(f"{len(rows)} rows, {len(broken)} broken")
    if as_json:
        print(json.dumps({"rows": [asdict(r) for r in rows], "severed": lost, "hashes": sorted(found)}))
    if broken or lost <= 1e-9 or len(found) != 1:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
