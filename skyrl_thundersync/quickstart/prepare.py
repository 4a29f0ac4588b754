"""Make the quickstart's teacher and student (`python -m skyrl_thundersync.quickstart.prepare`).

The teacher first learns to copy (`copying`), without which it would spend most of its time finding that out, and then the
tasks, from demonstrations. The student is the teacher, trained on for a little on demonstrations most of which follow
a bad habit: it keeps the skill and uses it wrongly, which is what a few dozen small updates of on-policy distillation can
mend. Takes about ten minutes on two cores and replaces the assets in the package.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from transformers import Qwen3ForCausalLM

from skyrl_thundersync.data.byte_tokenizer import ASSISTANT_ID, END_ID, PAD_ID, USER_ID
from skyrl_thundersync.data.terminal_tasks import NUMBERS, WORDS, tasks
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


def copying(seed: int) -> Iterator[Demonstration]:
    """Words and numbers in some order, to be given back in another: only looking them up gets the letters right."""
    rng = Random(seed)
    while True:
        parts = [
            rng.choice(WORDS["train"]) if rng.random() < 0.75 else str(rng.choice(NUMBERS["train"]))
            for _ in range(rng.randint(3, 6))
        ]
        context = [USER_ID, *" ".join(parts).encode(), END_ID, ASSISTANT_ID]
        answer = [*" ".join(rng.sample(parts, len(parts))).encode(), END_ID]
        yield Demonstration(context + answer, [0] * len(context) + [1] * len(answer))


def initial_model() -> Qwen3ForCausalLM:
    """Random weights. The norms of queries and keys start above 1, so that attention can soon be sharp."""
    model = Qwen3ForCausalLM(model_config())
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.constant_(parameter, 1.6)
    return model


def train(
    model: Qwen3ForCausalLM, demonstrations: list[Demonstration], steps: int, lr: float, size: int, seed: int
) -> None:
    """`steps` updates on batches of `size`: Muon at `lr` for the layers' matrices, AdamW at 0.15 `lr` for the rest.

    Warm-up over 20 steps, linear decay over the last 60%.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers = [
        (lr, torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0)),
        (lr * 0.15, torch.optim.AdamW(others, lr=lr * 0.15, betas=(0.9, 0.98), weight_decay=0.0)),
    ]
    start, mean = time.monotonic(), 0.0
    for step, (ids, labels) in zip(range(steps), batches(demonstrations, size, Random(seed)), strict=False):
        factor = min(1.0, (step + 1) / 20) * max(0.02, min(1.0, (steps - step) / (0.6 * steps)))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        for rate, optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
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
    parser.add_argument("--demonstrations", type=int, default=6000, help="the teacher's")
    parser.add_argument("--student-steps", type=int, default=100)
    parser.add_argument("--wrong-share", type=float, default=0.75)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    teacher_seed, student_seed = DEMONSTRATION_SEEDS
    with Shell() as shell:
        good = list(itertools.islice(teacher_demonstrations(shell, teacher_seed), args.demonstrations))
        mixed = list(itertools.islice(student_demonstrations(shell, student_seed, args.wrong_share), 2000))
    model = initial_model()
    print(f"copying ({sum(p.numel() for p in model.parameters()):,} parameters)")
    train(model, list(itertools.islice(copying(5), 12_000)), 300, 0.02, size=32, seed=0)
    print("teacher")
    train(model, good, 600, 0.02, size=24, seed=1)
    train(model, good, 400, 0.01, size=24, seed=3)
    teacher = copy.deepcopy(model)
    print("student")
    train(model, mixed, args.student_steps, 0.006, size=32, seed=2)
    for name, trained in (("teacher", teacher), ("student", model)):
        path = save_asset(args.out, name, trained)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
