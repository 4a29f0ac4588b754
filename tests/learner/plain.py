"""Tiny random models, random batches of sources, and the textbook gradient: whole contexts, stock attention, autograd."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId

COMMON = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
FAMILIES = {
    "qwen3": {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {"num_hidden_layers": 2, "num_key_value_heads": 1},
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "glm4_moe_lite": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
}
VOCAB = COMMON["vocab_size"]


def save_model(folder: Path, family: str, **overrides) -> str:
    """A random causal LM of `family` with a sharp output distribution, saved in FP32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0 if p.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return str(folder)


def settings(**changes) -> SimpleNamespace:
    """`thundersync.learner` options for tests."""
    return SimpleNamespace(
        **{
            "dtype": "float64",
            "zero_stage": 1,
            "offload_optimizer": False,
            "block_tokens": 0,
            "retain_gib": 0.0,
            "graph_gib": None,
            "state_gib": None,
            "accumulator": "fp32",
            "threads": 1,
            **changes,
        }
    )


def make_rank(
    folder: str, objective: str = "opd", lora=None, law: str | None = None, options: dict | None = None, **changes
) -> LearnerRank:
    """A rank that only accumulates. law: of the group's advantages. options: further ones of the objective."""
    laws = ({"law": law} if law else {}) | (options or {})
    spec = RankSpec(folder, 0, 1, "127.0.0.1", 0, settings(**changes), objective, lora=lora, objective_settings=laws)
    return LearnerRank(spec)


def trajectory(rng: random.Random, group: str, sample: int, prompt: tuple, turns: list[dict]) -> list[Append]:
    """Appends of one trajectory. Each turn: context, action (lengths), and optionally keep (prefix tokens), scored share."""
    path, works = [], []
    for index, turn in enumerate(turns):
        prefix = 0 if index == 0 else min(turn.get("keep", len(path)), len(path))
        context = prompt if index == 0 else tuple(rng.randrange(VOCAB) for _ in range(turn["context"]))
        action = tuple(rng.randrange(VOCAB) for _ in range(turn["action"]))
        mask = tuple(int(rng.random() < turn.get("scored", 1.0)) for _ in action)
        scores, sampler = (tuple(-rng.uniform(0.5, 8.0) for _ in action) for _ in range(2))
        source = Source(TrajectoryId(group, sample), index, prefix, context, action, mask, sampler, "stop", 0)
        works.append(Append(source, scores))
        path = path[:prefix] + list(context) + list(action)
    return works


def batch(seed: int, groups: int = 2, samples: int = 2, branchy: bool = True) -> list:
    """Works of a random batch, trajectory by trajectory, every trajectory and group closed."""
    rng, works = random.Random(seed), []
    for g in range(groups):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 9))))
        for s in range(samples):
            turns = []
            for _ in range(rng.randint(1, 4)):
                turn = {
                    "context": rng.choice((0, 1, 5)),
                    "action": rng.choice((0, 1, 2, 7)),
                    "scored": rng.choice((1, 0.6, 0)),
                }
                if branchy and rng.random() < 0.4:
                    turn["keep"] = rng.randint(1, 25)
                turns.append(turn)
            works += trajectory(rng, f"g{g}", s, prompt, turns)
            works.append(CloseTrajectory(TrajectoryId(f"g{g}", s), rng.choice((0.0, 0.5, 1.0))))
        works.append(CloseGroup(f"g{g}"))
    return works


def interleave(works, seed):
    """Another arrival order: trajectories' own orders and closes kept, everything else shuffled."""
    rng, lanes = random.Random(seed), {}
    for work in works:
        if isinstance(work, CloseGroup):
            continue
        lanes.setdefault(work.source.trajectory if isinstance(work, Append) else work.trajectory, []).append(work)
    left, order = {t: list(lane) for t, lane in lanes.items()}, []
    while left:
        pick = rng.choice(sorted(left))
        order.append(left[pick].pop(0))
        if not left[pick]:
            del left[pick]
            if not any(t.group == pick.group for t in left):
                order.append(CloseGroup(pick.group))
    return order


def plain_model(folder: str, dtype: torch.dtype):
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **experts).eval()


def contexts(works: list) -> list[tuple[Append, list[int]]]:
    """Each append with its whole realised context (before its action)."""
    paths, found = {}, []
    for work in works:
        if isinstance(work, Append):
            source = work.source
            context = paths.get(source.trajectory, [])[: source.prefix] + list(source.context_ids)
            found.append((work, context))
            paths[source.trajectory] = context + list(source.action_ids)
    return found


def plain_gradient(
    folder: str, works: list, dtype=torch.float64, weight_of=None, model=None
) -> tuple[dict[str, torch.Tensor], int]:
    """Σ over all turns of the gradient of −Σ w_t log π_θ, one whole context at a time; and the number of scored tokens.

    weight_of(work, logp_T): weights of a turn's scored tokens; by default OPD's log π_T − log π_θ. model: in place of one
    loaded from `folder`; its gradients are taken away afterwards.
    """
    model, n = model or plain_model(folder, dtype), 0
    for work, context in contexts(works):
        scored = [i for i, on in enumerate(work.source.mask) if on]
        if not scored:
            continue
        ids = torch.tensor([context + list(work.source.action_ids)])
        with all_double() if dtype == torch.float64 else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        at = torch.tensor([len(context) + i for i in scored])
        logp = torch.log_softmax(logits[at - 1], -1)[torch.arange(len(at)), ids[0, at]]
        if weight_of is None:
            weights = torch.tensor([work.scores[i] for i in scored], dtype=dtype) - logp.detach()
        else:
            weights = weight_of(work, logp.detach())
        (-(weights * logp).sum()).backward()
        n += len(scored)
    found = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in model.named_parameters()}
    model.zero_grad()
    return found, n


def distance(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """‖ours − plain‖ / ‖plain‖ over all parameters; the absolute norm where plain is zero."""
    assert set(ours) == set(plain)
    gap = sum(float((ours[k].double() - plain[k].double()).square().sum()) for k in plain) ** 0.5
    return gap / (sum(float(plain[k].double().square().sum()) for k in plain) ** 0.5 or 1.0)
