"""Does an objective keep its contract? Asked with a few random tokens before anything starts, and in every learner rank.

What the stream relies on cannot be seen in a signature: that a token's loss is its own, that what a reward weighs is linear
in the weight and the weight affine in the reward, that the loss and its plain statement are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from skyrl_thundersync.objectives.contract import (
    GROUP,
    NONE,
    OWN,
    REWARDS,
    Objective,
    PlainToken,
    SupportTokens,
    Tokens,
)
from skyrl_thundersync.objectives.textbook import textbook_advantages

T = 7
TOLERANCE = 1e-9


def problems(objective: Objective) -> list[str]:
    """The first thing of the contract that `objective` breaks, as a list; empty when it keeps it. FP64, some milliseconds."""
    name = type(objective).__name__
    try:
        return [f"the objective {name} {problem}." for problem in islice(_problems(objective), 1)]
    except Exception as error:  # whatever somebody else's class raises
        return [f"the objective {name} raised {type(error).__name__}: {error}"]


def _problems(objective: Objective) -> Iterator[str]:
    if objective.rewards not in REWARDS:
        yield f"says rewards={objective.rewards!r}; there is {', '.join(REWARDS)}"
        return
    weighed = type(objective).reward_loss is not Objective.reward_loss
    if weighed != (objective.rewards != NONE):
        missing = "has no `reward_loss`" if not weighed else "has a `reward_loss` that nothing would weigh"
        yield f"says rewards={objective.rewards!r} and {missing}"
        return
    if not weighed and not objective.has_loss:
        yield "has no `loss`: there is nothing to learn from"
        return
    tokens = _tokens(objective)
    if objective.has_loss:
        yield from _token_by_token("loss", lambda t: objective.loss(t), tokens)
    if weighed:
        yield from _token_by_token("reward_loss", lambda t: objective.reward_loss(t, 1.0, T), tokens)
        once, thrice = (_gradient(objective.reward_loss(t := _tokens(objective), w, T), t) for w in (1.0, 3.0))
        if not _close(3 * once, thrice):
            yield "has a `reward_loss` that is not linear in its weight"
    if objective.rewards == GROUP:
        yield from _affine(objective)
    yield from _plain(objective)


def _tokens(objective: Objective) -> Tokens:
    rng = torch.Generator().manual_seed(0)
    logp, score, sampler = -torch.rand(3, T, generator=rng, dtype=torch.float64) * 4
    support = _support(objective.support_size, logp, score) if objective.support_size else None
    return Tokens(logp.requires_grad_(), sampler, score if objective.needs_teacher else None, support)


def _support(k: int, logp: torch.Tensor, score: torch.Tensor) -> SupportTokens:
    """Of small probabilities; at every other position the sampled token is the last of it."""
    rng = torch.Generator().manual_seed(1)
    logp_TK, scores_TK = -torch.rand(2, T, k, generator=rng, dtype=torch.float64) * 4 - math.log(k + 1)
    sampled_TK = torch.zeros(T, k, dtype=torch.bool)
    sampled_TK[::2, -1] = True
    logp_TK[::2, -1], scores_TK[::2, -1] = logp[::2], score[::2]
    return SupportTokens(logp_TK.requires_grad_(), scores_TK, sampled_TK)


def _part(tokens: Tokens, where: slice) -> Tokens:
    held = {name: value[where] for name, value in vars(tokens).items() if isinstance(value, torch.Tensor)}
    if tokens.support is not None:
        held["support"] = SupportTokens(*(value[where] for value in vars(tokens.support).values()))
    return replace(tokens, **held)


def _gradient(loss: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """By log π_θ of the sampled tokens, then of their supports, [T, 1 + K]; where one is the other, as the support's."""
    of = tokens.support
    inputs = [tokens.logp_T] if of is None else [tokens.logp_T, of.logp_TK]
    found = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    if of is None:
        return found[0][:, None]
    own_T, best_TK = found
    inside_T = of.sampled_TK.any(-1)
    return torch.cat([(own_T * ~inside_T)[:, None], best_TK + own_T[:, None] * of.sampled_TK], -1)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= TOLERANCE * (1 + a.abs())).all())


def _token_by_token(name: str, loss, tokens: Tokens) -> Iterator[str]:
    whole = loss(tokens)
    if whole.shape != (T,) or whole.dtype != tokens.logp_T.dtype or not whole.requires_grad:
        yield (
            f"has a `{name}` that must give one differentiable number a token, [{T}] {tokens.logp_T.dtype}; it gave "
            f"{list(whole.shape)} {whole.dtype}, {'' if whole.requires_grad else 'not '}differentiable"
        )
        return
    if not bool(torch.isfinite(whole).all()):
        yield f"has a `{name}` that is not finite on finite log-probs"
        return
    parts = torch.cat([loss(_part(tokens, slice(0, 3))), loss(_part(tokens, slice(3, T)))])
    if not _close(whole, parts) or not _close(_gradient(whole, tokens), _gradient(parts, tokens)):
        yield f"has a `{name}` in which a token depends on others: where a trajectory is cut would change the gradient"


def _affine(objective: Objective) -> Iterator[str]:
    rewards = [0.0, 1.0, None, 0.25]
    wanted = objective.weights(rewards)
    for origin in (0.0, 0.25, 7.0):
        b, c = objective.affine(rewards, origin)
        found = [0.0 if r is None else ((r - origin) - b) * c for r in rewards]
        if not all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12) for x, y in zip(found, wanted, strict=True)):
            yield f"has an `affine` whose weights depend on the origin: {found} at {origin}, {wanted} else"
            return
    moved = [r and r * 2 for r in rewards]
    if not all(map(math.isfinite, objective.weights(moved))):
        yield "has an `affine` that gives weights that are not finite"


def _plain(objective: Objective) -> Iterator[str]:
    """`plain_weights` of the sampled token against the gradient, one trajectory of a group of three."""
    rewards = (1.0, 0.0, 0.25)
    tokens = _tokens(objective)
    weight, advantage = None, 0.0
    if objective.rewards == OWN:
        weight = objective.weight(rewards[0])
    elif objective.rewards == GROUP:
        weight = objective.weights(rewards)[0]
        advantage = textbook_advantages(getattr(objective, "law", None), getattr(objective, "epsilon", 0.0), rewards)[0]
    loss = objective.loss(tokens).sum() if objective.has_loss else 0.0
    if weight is not None:
        loss = loss + objective.reward_loss(tokens, weight, T).sum()
    gradient = _gradient(loss, tokens)
    logp, sampler = tokens.logp_T.tolist(), tokens.sampler_T.tolist()
    score = tokens.scores_T.tolist() if objective.needs_teacher else [0.0] * T
    columns = [[i, *ids] for i, ids in enumerate(_ids(tokens.support))]
    try:
        by_hand = []
        for i, (own, *best) in enumerate(columns):
            pairs = (
                zip(tokens.support.logp_TK[i].tolist(), tokens.support.scores_TK[i].tolist(), strict=True)
                if best
                else ()
            )
            support = tuple((id, *pair) for id, pair in zip(best, pairs, strict=True))
            token = PlainToken(own, logp[i], sampler[i], score[i], 1.0, rewards, advantage, 3, T, support)
            weights = objective.plain_weights(token)
            by_hand.append([0.0 if own in best else weights.get(own, 0.0), *(weights.get(id, 0.0) for id in best)])
    except NotImplementedError:
        yield "has no `plain_weight`: nothing could check its gradients"
        return
    by_hand = torch.tensor(by_hand, dtype=torch.float64)
    if not _close(gradient, -by_hand):
        worst = int((gradient + by_hand).abs().argmax())
        yield (
            f"says two things: by `plain_weight` a token weighs {float(by_hand.view(-1)[worst]):.6g}, by its loss's gradient "
            f"{-float(gradient.reshape(-1)[worst]):.6g}"
        )


def _ids(support: SupportTokens | None) -> list[list[int]]:
    """Ids of the support of each of the T tokens, whose own are 0 … T - 1."""
    if support is None:
        return [[] for _ in range(T)]
    k = support.sampled_TK.shape[1]
    return [
        [i if on else T + i * k + j for j, on in enumerate(row)] for i, row in enumerate(support.sampled_TK.tolist())
    ]
