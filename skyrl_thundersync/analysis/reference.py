"""The gradient of a recorded OPD batch by the textbook: whole sequences, stock attention, one plain autograd backward each.

Shares no code with the learner: no cut states, no segments, no packing, no accumulator, no hooks. It is what the streamed
gradient is checked against.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from skyrl_thundersync.analysis.record import Batch
from skyrl_thundersync.stream.sources import Append, TrajectoryId


@dataclass
class Sequence:
    """Token ids of one branch of a trajectory and, by position of the token in it, the teacher's score of scored ones."""

    ids: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)


def sequences(batch: Batch) -> list[Sequence]:
    """The batch as whole sequences: one a trajectory, and one more wherever a turn did not extend what came before."""
    current: dict[TrajectoryId, Sequence] = {}
    done: list[Sequence] = []
    for work in batch.work:
        if not isinstance(work, Append):
            continue
        source = work.source
        held = current.setdefault(source.trajectory, Sequence())
        if source.prefix < len(held.ids):
            done.append(held)
            held = current[source.trajectory] = Sequence(held.ids[: source.prefix])
        held.ids.extend(source.context_ids)
        for token, scored, score in zip(source.action_ids, source.mask, work.scores, strict=True):
            if scored:
                held.scores[len(held.ids)] = score
            held.ids.append(token)
    return done + list(current.values())


def opd_gradient(model: torch.nn.Module, batch: Batch) -> tuple[dict[str, torch.Tensor], int, float]:
    """(1/N_k) Σ_j g_j of PAPER.md as gradients of the minimised loss, in the model's dtype.

    Returns the gradient by parameter name, N_k, and the mean reverse-KL estimate per scored token. Leaves no `.grad` behind.
    """
    model.zero_grad(set_to_none=True)
    n_scored, sum_kl = 0, 0.0
    for sequence in sequences(batch):
        if not sequence.scores:
            continue
        ids_T = torch.tensor(sequence.ids)
        at = torch.tensor(sorted(sequence.scores))
        teacher = torch.tensor([sequence.scores[i] for i in at.tolist()], dtype=next(model.parameters()).dtype)
        logits_TV = model(input_ids=ids_T[None, :-1], use_cache=False).logits[0]
        logp = torch.log_softmax(logits_TV, -1)[at - 1, ids_T[at]]
        advantage = teacher - logp.detach()
        (-(advantage * logp).sum()).backward()
        n_scored += len(at)
        sum_kl -= float(advantage.sum())
    gradient = {name: p.grad / n_scored for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradient, n_scored, sum_kl / n_scored


def relative_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """‖ours - reference‖ / ‖reference‖ over all parameters, in FP64.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    if ours.keys() != reference.keys():
        raise ValueError(f"gradients of different parameters: {sorted(ours.keys() ^ reference.keys())[:5]}")
    gap = sum(float(((ours[n].double() - g.double()) ** 2).sum()) for n, g in reference.items())
    return (gap / sum(float((g.double() ** 2).sum()) for g in reference.values())) ** 0.5
