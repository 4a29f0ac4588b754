"""The gradient of a recorded batch by the textbook: whole sequences, stock attention, one plain autograd backward each.

Shares no code with the learner: no cut states, no segments, no packing, no accumulator, no hooks, no statistics. It is what
the streamed gradient is checked against. Of the objective it takes the plain statement alone, `plain_weights`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from skyrl_thundersync.objectives.contract import GROUP, Objective, PlainToken
from skyrl_thundersync.objectives.textbook import textbook_advantages
from skyrl_thundersync.options.schema import LoraSettings
from skyrl_thundersync.stream.sources import Append, CloseTrajectory, TrajectoryId
from skyrl_thundersync.telemetry.record import Batch

Gradient = dict[str, torch.Tensor]


@dataclass
class Sequence:
    """One branch of a trajectory: its token ids and, by position of a scored token in it, log π_T, the sampler's log-prob,
    the source's turn, and (id, log π_T) of the teacher's support where there is one."""

    trajectory: TrajectoryId
    ids: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    sampler: dict[int, float] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    support: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def load_model(path: str, dtype: torch.dtype, lora: LoraSettings | None, device: str) -> torch.nn.Module:
    """The student with stock attention; with `lora` under a fresh adapter, as the learner's ranks start it."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped kernels take no FP64
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **experts).to(device).eval()
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()


def fill_adapter(model: torch.nn.Module) -> None:
    """Give an adapter random weights that depend on their names only: a fresh one's B is 0, so that A has no gradient."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                p.copy_(torch.randn(p.shape, generator=noise, dtype=torch.float64) / p.shape[-1] ** 0.5)


def sequences(batch: Batch) -> list[Sequence]:
    """The batch as whole sequences: one a trajectory, and one more wherever a turn did not extend what came before."""
    current: dict[TrajectoryId, Sequence] = {}
    done: list[Sequence] = []
    for work in batch.work:
        if not isinstance(work, Append):
            continue
        source = work.source
        held = current.setdefault(source.trajectory, Sequence(source.trajectory))
        if source.prefix < len(held.ids):
            done.append(held)
            held = current[source.trajectory] = Sequence(source.trajectory, held.ids[: source.prefix])
        held.ids.extend(source.context_ids)
        scores = work.scores if work.scores is not None else [0.0] * len(source.action_ids)
        for index, (token, scored, score, sampler) in enumerate(
            zip(source.action_ids, source.mask, scores, source.sampler_logps, strict=True)
        ):
            if scored:
                if work.support is not None:
                    best = (work.support.ids_nk[index].tolist(), work.support.logps_nk[index].tolist())
                    held.support[len(held.ids)] = list(zip(*best, strict=True))
                held.scores[len(held.ids)] = score
                held.sampler[len(held.ids)] = sampler
                held.turns[len(held.ids)] = source.turn
            held.ids.append(token)
    return done + list(current.values())


@dataclass(frozen=True)
class Facts:
    """Of one trajectory of the finished batch, as `PlainToken` has them."""

    reward: float | None
    rewards: tuple[float | None, ...]
    advantage: float
    m: int
    n_scored: int


def facts(batch: Batch, objective: Objective) -> dict[TrajectoryId, Facts]:
    """Of every trajectory that closed. Advantages are those of the law that the objective names, 0 where it names none."""
    rewards: dict[str, dict[TrajectoryId, float | None]] = {}
    tokens: dict[TrajectoryId, int] = {}
    for work in batch.work:
        if isinstance(work, CloseTrajectory):
            rewards.setdefault(work.trajectory.group, {})[work.trajectory] = work.reward
        elif isinstance(work, Append):
            tokens[work.source.trajectory] = tokens.get(work.source.trajectory, 0) + work.source.n_scored
    found: dict[TrajectoryId, Facts] = {}
    for group in rewards.values():
        samples = sorted(group)
        own = tuple(group[trajectory] for trajectory in samples)
        law = getattr(objective, "law", None)
        advantages = textbook_advantages(law, getattr(objective, "epsilon", 0.0), own)
        m = sum(reward is not None for reward in own)
        for trajectory, reward, advantage in zip(samples, own, advantages, strict=True):
            found[trajectory] = Facts(reward, own, advantage, max(1, m), max(1, tokens.get(trajectory, 0)))
    return found


def silent(batch: Batch, objective: Objective) -> set[TrajectoryId]:
    """Trajectories without a gradient: the reward weighs all of it, and weighs nothing."""
    if objective.has_loss or objective.rewards != GROUP:
        return set()
    return {trajectory for trajectory, known in facts(batch, objective).items() if known.advantage == 0.0}


def gradient(model: torch.nn.Module, batch: Batch, objective: Objective) -> tuple[Gradient, int]:
    """The batch's loss gradient, unnormalised, by name of each trainable parameter, in the model's dtype; and N_k.

    Divide by N_k where `objective.divides_by_tokens`. Leaves no `.grad` behind.
    """
    known, n_scored = facts(batch, objective), 0
    model.zero_grad(set_to_none=True)
    for sequence in sequences(batch):
        n_scored += len(sequence.scores)
        _backward(model, sequence, sorted(sequence.scores), objective, known)
    return _take(model), n_scored


def source_gradients(
    model: torch.nn.Module, batch: Batch, objective: Objective
) -> Iterator[tuple[TrajectoryId, Gradient, dict[int, Gradient]]]:
    """Per trajectory: its part of `gradient`, and by turn the part of each source that has scored tokens."""
    known = facts(batch, objective)
    branches: dict[TrajectoryId, list[Sequence]] = {}
    for sequence in sequences(batch):
        branches.setdefault(sequence.trajectory, []).append(sequence)
    for trajectory, own in branches.items():
        parts: dict[int, Gradient] = {}
        for turn in sorted({turn for sequence in own for turn in sequence.turns.values()}):
            model.zero_grad(set_to_none=True)
            for sequence in own:
                at = [i for i, t in sorted(sequence.turns.items()) if t == turn]
                _backward(model, sequence, at, objective, known)
            parts[turn] = _take(model)
        if parts:
            whole = {name: sum(part[name] for part in parts.values()) for name in next(iter(parts.values()))}
            yield trajectory, whole, parts


def _backward(
    model: torch.nn.Module,
    sequence: Sequence,
    at: list[int],
    objective: Objective,
    known: dict[TrajectoryId, Facts],
) -> None:
    """Add the gradient of the loss over the scored tokens at positions `at`: −Σ w ∇ log π_θ."""
    if not at:
        return
    device = next(model.parameters()).device
    ids_T, at_S = torch.tensor(sequence.ids, device=device), torch.tensor(at, device=device)
    logits_TV = model(input_ids=ids_T[None, :-1], use_cache=False).logits[0]
    logp_SV = torch.log_softmax(logits_TV, -1)[at_S - 1]
    plain_SV = logp_SV.detach()
    sampled = plain_SV.gather(-1, ids_T[at_S, None])[:, 0].tolist()
    weighed = []
    for row, (i, logp) in enumerate(zip(at, sampled, strict=True)):
        support = tuple((id, float(plain_SV[row, id]), score) for id, score in sequence.support.get(i, ()))
        token = PlainToken(
            sequence.ids[i],
            logp,
            sequence.sampler[i],
            sequence.scores[i],
            **vars(known[sequence.trajectory]),
            support=support,
        )
        weighed += [(row, id, weight) for id, weight in objective.plain_weights(token).items()]
    rows, tokens, weights = zip(*weighed, strict=True)
    weights_W = torch.tensor(weights, dtype=torch.float64, device=device).to(logp_SV.dtype)
    (-(weights_W * logp_SV[list(rows), list(tokens)]).sum()).backward()


def _take(model: torch.nn.Module) -> Gradient:
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return found


def feeds_cut_states(model: torch.nn.Module, ids: list[int]) -> set[str]:
    """Names of the trainable parameters that a model's cached states (keys, values, recurrent states) depend on.

    The gradient of the others never passes a cut: a lost adjoint cannot change it.
    """
    device = next(model.parameters()).device
    cache = model(input_ids=torch.tensor([ids], device=device), use_cache=True).past_key_values
    states = [t for layer in cache.layers for t in _tensors(vars(layer)) if t.requires_grad]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(sum(s.double().sum() for s in states), [p for _, p in named], allow_unused=True)
    return {name for (name, _), g in zip(named, gradients, strict=True) if g is not None}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def dot(a: Gradient, b: Gradient) -> float:
    """Inner product over all parameters, summed in FP64."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def difference(ours: Gradient, reference: Gradient) -> Gradient:
    """ours − reference, in FP64.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    if ours.keys() != reference.keys():
        raise ValueError(f"gradients of different parameters: {sorted(ours.keys() ^ reference.keys())[:5]}")
    return {name: ours[name].double().cpu() - g.double().cpu() for name, g in reference.items()}


def relative_error(ours: Gradient, reference: Gradient) -> float:
    """‖ours − reference‖ / ‖reference‖ over all parameters, in FP64; 0 when both are 0."""
    gap = difference(ours, reference)
    size = dot(reference, reference)
    return (dot(gap, gap) / size) ** 0.5 if size else float(dot(gap, gap) > 0)
