"""sync, group and thundersync side by side on a workload with real learner and rollout time.

    python -m benchmarks.schedules [--updates 5] [--rounds 1] [--plot FOLDER] [--json] [key=value …]

`skyrl-thundersync bench` with the preset `opd/bench` and a student of its own: the quickstart's with a wider MLP whose added
units are silent. It acts like the original at thirty times the arithmetic.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skyrl_thundersync.analysis import curves
from skyrl_thundersync.bench import compare, points, show

WIDTH = 16384  # of the student's MLP; 384 in the original


def widened_student(folder: Path) -> Path:
    """The quickstart's student with an MLP of `WIDTH` units, those added having output weights of zero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
    from skyrl_thundersync.quickstart.files import load_asset

    disable_progress_bar()
    torch.manual_seed(0)
    small = load_asset("student")
    wide = Qwen3ForCausalLM(Qwen3Config(**{**small.config.to_dict(), "intermediate_size": WIDTH})).float()
    weights = wide.state_dict()
    for name, weight in small.state_dict().items():
        if name.endswith("down_proj.weight"):
            weights[name].zero_()
        weights[name][tuple(slice(n) for n in weight.shape)] = weight
    wide.load_state_dict(weights)
    wide.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    updates: Annotated[int, typer.Option(help="Counted updates a run.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Runs of each schedule, interleaved.", min=1)] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write the theory's curves with the measured points here.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run all three schedules and compare."""
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        student = widened_student(Path(folder) / "student")
        arguments = ["+config=opd/bench", f"trainer.policy.model.path={student}", *(overrides or [])]
        rows = compare(arguments, Path(folder), updates, rounds)
    if plot is not None:
        curves.plot(plot, points(rows))
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    show(rows)


if __name__ == "__main__":
    typer.run(main)
