"""Small run folders with a tiny model and random batches, as a run leaves them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, get_peft_model

from skyrl_thundersync.objectives import registry
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId, Work, group_of
from skyrl_thundersync.telemetry.record import Batch, Recorder
from skyrl_thundersync.verify.reference import facts
from tests.learner.plain import interleave, plain_gradient, plain_model, save_model, trajectory


def works(seed: int, version: int, objective: str) -> list[Work]:
    """Two groups of three trajectories of two to three turns, one of which drops earlier tokens; interleaved."""
    rng, made = random.Random(seed), []
    for group in ("g0", "g1"):
        prompt = tuple(rng.randrange(96) for _ in range(9))
        for sample in range(3):
            turns = [{"context": 4, "action": rng.randint(2, 7)} for _ in range(rng.randint(2, 3))]
            if sample == 1:
                turns[-1]["keep"] = 11
            for append in trajectory(rng, group, sample, prompt, turns):
                source = replace(append.source, policy_version=version)
                made.append(Append(source, append.scores if objective == "opd" else None))
            made.append(CloseTrajectory(TrajectoryId(group, sample), (1.0, 0.0, 0.5)[sample]))
        made.append(CloseGroup(group))
    return interleave(made, seed)


def batch(seed: int, version: int = 0, objective: str = "opd", ranks: int = 1) -> Batch:
    made = works(seed, version, objective)
    home = {"g0": 0, "g1": ranks - 1}
    placed = tuple(home[group_of(work)] for work in made)
    return Batch(version, {"g0": 3, "g1": 3}, tuple(made), placed, tuple(float(i) for i in range(len(made))))


def write_run(
    folder: Path,
    objective: str = "opd",
    lora: int = 0,
    ranks: int = 1,
    updates: int = 2,
    gap_tolerance: float = 1e9,
    family="qwen3",
) -> Path:
    """A run folder: configuration, metrics and record. The sampler's log-probs are random, so gaps are large."""
    model = save_model(folder.parent / f"{folder.name}-model", family)
    optimizer = {"lr": 1e-3, "adam_betas": [0.9, 0.999], "weight_decay": 0.0, "max_grad_norm": 1.0}
    optimizer |= {"num_warmup_steps": 0, "scheduler": "constant_with_warmup"}
    adapter = {"rank": lora, "alpha": 2 * lora, "target_modules": "all-linear"}
    learner = {"ranks": ranks, "dtype": "float32", "zero_stage": 1, "offload_optimizer": False, "block_tokens": 6}
    learner |= {"retain_gib": 1.0, "accumulator": "fp32", "threads": 1}
    config = {
        "thundersync": {
            "objective": objective,
            "device": "cpu",
            "learner": learner,
            "grpo": {"law": "population", "epsilon": 1e-6},
            "publish": {"tolerance": gap_tolerance},
        },
        "trainer": {
            "max_training_steps": updates,
            "policy": {"model": {"path": model, "lora": adapter}, "optimizer_config": optimizer},
            "placement": {"policy_num_gpus_per_node": 1, "policy_num_nodes": 1},
        },
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    rows = []
    for version in range(updates):
        made = batch(version, version, objective, ranks)
        write_batch(folder, made)
        rows.append({"thundersync/policy_version": version, "thundersync/n_scored": made.n_scored})
    rows[0]["policy/grad_norm"] = norm_of(student(model, lora), batch(0, 0, objective, ranks), objective)
    write_metrics(folder, rows)
    return folder


def write_batch(folder: Path, made: Batch) -> None:
    """Record a batch in a run folder, in place of the one of its version."""
    recorder = Recorder(folder / "record")
    record = recorder.begin(made.version, made.groups)
    for rank, work in zip(made.ranks, made.work, strict=True):
        record(rank, work)
    recorder.end()


def student(folder: str, lora: int) -> torch.nn.Module:
    """θ_0 in FP32; with `lora` under a PEFT adapter of that rank, seeded as a run's is."""
    model = plain_model(folder, torch.float32)
    if not lora:
        return model
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def norm_of(model: torch.nn.Module, made: Batch, objective: str) -> float:
    """The gradient norm of a batch over what is trained, one whole context at a time (tests/learner/plain.py)."""
    known = facts(made, registry.build(objective))

    def weight_of(work, logp_T):
        of = known[work.source.trajectory]
        return torch.full_like(logp_T, of.advantage / of.m / of.n_scored)

    found, n = plain_gradient("", made.work, torch.float32, weight_of if objective == "grpo" else None, model=model)
    norm = sum(float(g.square().sum()) for g in found.values()) ** 0.5
    return norm / n if objective == "opd" else norm


def write_metrics(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1)), encoding="utf-8"
    )
