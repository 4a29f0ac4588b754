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

from skyrl_thundersync.objectives.contract import GROUP, NONE, OWN, REWARDS, Objective, PlainToken, Tokens
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
    return Tokens(logp.requires_grad_(), sampler, score if objective.needs_teacher else None)


def _part(tokens: Tokens, where: slice) -> Tokens:
    held = {name: value[where] for name, value in vars(tokens).items() if value is not None}
    return replace(tokens, **held)


def _gradient(loss: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss.sum(), tokens.logp_T, allow_unused=True)
    return torch.zeros(T, dtype=torch.float64) if found is None else found


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
    try:
        by_hand = [
            objective.plain_weights(PlainToken(i, logp[i], sampler[i], score[i], 1.0, rewards, advantage, 3, T))[i]
            for i in range(T)
        ]
    except NotImplementedError:
        yield "has no `plain_weight`: nothing could check its gradients"
        return
    if not _close(gradient, -torch.tensor(by_hand, dtype=torch.float64)):
        worst = max(range(T), key=lambda i: abs(float(gradient[i]) + by_hand[i]))
        yield (
            f"says two things: by `plain_weight` a token weighs {by_hand[worst]:.6g}, by its loss's gradient "
            f"{-float(gradient[worst]):.6g}"
        )
