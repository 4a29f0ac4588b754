"""Make the quickstart's teacher and student (`python -m skyrl_thundersync.quickstart.prepare`).

The teacher learns the tasks from demonstrations. The student is the teacher, trained on for a little on
demonstrations most of which follow a bad habit: it keeps the skill and uses it wrongly, which is what a few dozen small
updates of on-policy distillation can mend. Takes about ten minutes on two cores and replaces the assets in the package.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from transformers import Qwen3ForCausalLM

from skyrl_thundersync.data.byte_tokenizer import PAD_ID
from skyrl_thundersync.data.terminal_tasks import tasks
from skyrl_thundersync.quickstart.demonstrations import Demonstration, Shell, clean, habit, recovery, slip
from skyrl_thundersync.quickstart.files import ASSETS, DEMONSTRATION_SEEDS, model_config, save_asset


def teacher_demonstrations(shell: Shell, seed: int) -> Iterator[Demonstration]:
    """Half of them clean, the rest with one wrong turn, unscored, and the way on from there."""
    rng = Random(seed)
    for task in tasks("train", seed):
        draw = rng.random()
        if draw < 0.5:
            yield clean(task, shell)
        elif draw < 0.8:
            yield recovery(task, shell, rng)
        elif (demonstration := slip(task, shell, rng)) is not None:
            yield demonstration


def student_demonstrations(shell: Shell, seed: int, wrong_share: float) -> Iterator[Demonstration]:
    """A `wrong_share` of them follow the task's bad habit, the others are clean."""
    rng = Random(seed)
    for task in tasks("train", seed):
        yield habit(task, shell) if rng.random() < wrong_share else clean(task, shell)


def batch(demonstrations: list[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded (ids, labels), both [B, T] int64; label -100 where nothing is to be learned."""
    width = max(len(d.ids) for d in demonstrations)
    ids = torch.full((len(demonstrations), width), PAD_ID)
    labels = torch.full_like(ids, -100)
    for row, d in enumerate(demonstrations):
        ids[row, : len(d.ids)] = torch.tensor(d.ids)
        scored = torch.tensor(d.mask, dtype=torch.bool)
        labels[row, : len(d.ids)][scored] = torch.tensor(d.ids)[scored]
    return ids, labels


def train(
    model: Qwen3ForCausalLM, demonstrations: list[Demonstration], epochs: int, lr: float, size: int, seed: int
) -> None:
    """AdamW with warm-up and cosine decay; batches of `size` demonstrations of similar length, in random order."""
    rng, start = Random(seed), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps, mean = epochs * (len(demonstrations) // size), 0.0
    for step, (ids, labels) in zip(range(steps), batches(demonstrations, size, rng), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.item()
        if step % 50 == 49 or step == steps - 1:
            print(f"  step {step + 1}/{steps}: loss {mean / (step % 50 + 1):.4f}, {time.monotonic() - start:.0f} s")
            mean = 0.0


def batches(demonstrations: list[Demonstration], size: int, rng: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless shuffled epochs of `batch`es; lengths are alike within one, sorted inside windows of 16 batches."""
    while True:
        shuffled = rng.sample(demonstrations, len(demonstrations))
        rows: list[list[Demonstration]] = []
        for at in range(0, len(shuffled), 16 * size):
            window = sorted(shuffled[at : at + 16 * size], key=lambda d: len(d.ids))
            rows += [window[i : i + size] for i in range(0, len(window) - size + 1, size)]
        yield from map(batch, rng.sample(rows, len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for teacher.safetensors, student.safetensors")
    parser.add_argument("--demonstrations", type=int, default=6000, help="the teacher's, each seen in every epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--student-demonstrations", type=int, default=2000)
    parser.add_argument("--wrong-share", type=float, default=0.75)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with Shell() as shell:
        good = list(itertools.islice(teacher_demonstrations(shell, DEMONSTRATION_SEEDS[0]), args.demonstrations))
        mixed = list(
            itertools.islice(
                student_demonstrations(shell, DEMONSTRATION_SEEDS[1], args.wrong_share), args.student_demonstrations
            )
        )
    model = Qwen3ForCausalLM(model_config())
    print(f"teacher ({sum(p.numel() for p in model.parameters()):,} parameters)")
    train(model, good, args.epochs, 3e-3, size=16, seed=0)
    teacher = copy.deepcopy(model)
    print("student")
    train(model, mixed, 1, 5e-4, size=32, seed=1)
    for name, trained in (("teacher", teacher), ("student", model)):
        path = save_asset(args.out, name, trained)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
