"""sync, group and thundersync side by side on a workload with real learner and rollout time.

    python -m benchmarks.schedules [--rounds 6] [--plot FOLDER] [--json] [key=value …]

`skyrl bench` with the preset `opd/bench` and what makes learner and rollouts take about equal time: the
quickstart's student with a wider MLP whose added units are silent, so that it acts like the original at several times the
arithmetic; and the quickstart's tasks in shells whose commands print more and take longer, in some tasks
much longer than in others.
"""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_thundersync.cli.bench import publish, run, summary
from skyrl_thundersync.data.terminal_tasks import NUMBERS, WORDS, tasks
from skyrl_thundersync.process.quiet import quiet_imports
from skyrl_thundersync.quickstart.files import TRAIN_SEED

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

WIDTH = 4096  # of the student's MLP; 384 in the original
POSITIONS = 4096  # of student and teacher; 1024 in the originals
TASKS = 256
COMMANDS = ("cat", "cp", "echo", "expr", "grep", "head", "ls", "mv", "rm", "sed", "wc")
LINES = 40  # that each of `COMMANDS` prints besides
SECONDS = (1.0, 6.5)  # that each of `COMMANDS` takes: drawn once a task


def widened(small: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same model with an MLP of `WIDTH` units, those added with output weights of zero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    wide = Qwen3ForCausalLM(Qwen3Config(**{**small.config.to_dict(), "intermediate_size": WIDTH})).float()
    weights = wide.state_dict()
    for name, weight in small.state_dict().items():
        if name.endswith("down_proj.weight"):
            weights[name].zero_()
        weights[name][tuple(slice(n) for n in weight.shape)] = weight
    wide.load_state_dict(weights)
    return wide


def models(folder: Path) -> tuple[Path, Path]:
    """Folders of the student, widened, and the teacher, both with room for `POSITIONS` tokens."""
    from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
    from skyrl_thundersync.quickstart.files import load_asset

    for name, model in {"student": widened(load_asset("student")), "teacher": load_asset("teacher")}.items():
        model.config.max_position_embeddings = POSITIONS
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder / "student", folder / "teacher"


def slow_tasks(path: Path) -> Path:
    """The quickstart's training tasks, whose commands first print `LINES` lines like those of the files, and sleep."""
    rows = []
    for index, task in enumerate(islice(tasks("train", TRAIN_SEED), TASKS)):
        rng = Random(index)
        lines = "".join(f"{rng.choice(WORDS['train'])} {rng.choice(NUMBERS['train'])}\\n" for _ in range(LINES))
        before = f"printf '{lines}' >&2; sleep {rng.uniform(*SECONDS):.2f}"
        setup = "\n".join(f'{name}() {{ {before}; command {name} "$@"; }}' for name in COMMANDS)
        rows.append(json.dumps(task.row() | {"setup": setup}) + "\n")
    path.write_text("".join(rows))
    return path


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    rounds: Annotated[int, typer.Option(help="Counted rounds: an update under each schedule.", min=1)] = 6,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep the run folder here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the theory's curves with the measured points here.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run all three schedules and compare."""
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        with quiet_imports():
            student, teacher = models(Path(folder))
        arguments = [
            "+config=opd/bench",
            f"trainer.policy.model.path={student}",
            f"thundersync.teacher.model={teacher}",
            f"generator.max_input_length={POSITIONS - 96}",
            f"data.train_data=['{slow_tasks(Path(folder) / 'tasks.jsonl')}']",
            *(overrides or []),
        ]
        rows = summary(run(arguments, (out or Path(folder) / "run").absolute(), rounds))
    publish(rows, None, plot, as_json)


if __name__ == "__main__":
    typer.run(main)
