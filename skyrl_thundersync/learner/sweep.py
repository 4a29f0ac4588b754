"""Fused sweeps over the segment tree: one forward on arrival, one merged backward per segment at close (Algorithm 1).

The paper's text runs a turn's backward on arrival and replays it at close. Backward is linear, so here a segment's single
backward carries both its own loss and the adjoints that its descendants left on its state; the gradient is the same.
Turns wait for each other until a block is worth running. A branch that nothing can attach to any more is swept at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch

from skyrl_thundersync.learner.accumulate import Accumulator
from skyrl_thundersync.learner.retain import GraphBudget
from skyrl_thundersync.learner.segments import Graph, Segment, SegmentModel, pieces
from skyrl_thundersync.learner.statistics import GroupStatistics
from skyrl_thundersync.learner.trajectory import Branch, Group, Tally, Trajectory, check_source
from skyrl_thundersync.objectives.contract import NONE, OWN, Objective, SupportTokens, Tokens
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId, Work, group_of

SMALLEST_GAP = 2.0**-30
"""Log-prob gaps below this (nats) are counted as this."""

Apart = Callable[[Segment], AbstractContextManager[None]]


class Forest:
    """All open groups of the running batch on one rank.

    Args:
        model: the student, segment by segment.
        objective: what each scored token loses, and what a trajectory's reward weighs (objectives/contract.py).
        block_tokens: pending tokens run when at least this many wait; 0 runs every turn at once.
        budget: which graphs stay from arrival to sweep.
        accumulator: takes the gradients. When it is exact, adjoints on shared prompts are summed in fixed point too, so that
            the order of samples cannot matter.
    """

    def __init__(
        self,
        model: SegmentModel,
        objective: Objective,
        block_tokens: int,
        budget: GraphBudget,
        accumulator: Accumulator,
    ):
        self.model, self.objective, self.block, self.budget = model, objective, block_tokens, budget
        self.accumulator, self.exact = accumulator, accumulator.exact
        self.groups: dict[str, Group] = {}
        model.states.leaving = budget.drop_readers

    def open_names(self) -> list[str]:
        """Trajectories that are open, and groups that are; what finish must not find."""
        names = [f"trajectory {TrajectoryId(g, s)}" for g, group in self.groups.items() for s in group.open]
        return names + [f"group {g}" for g in self.groups]

    def clear(self) -> None:
        self.groups.clear()
        self.budget.clear()

    def expect(self, work: Work) -> None:
        """`work` is next: begin to bring back the states that it will read."""
        group = self.groups.get(group_of(work))
        if group is None:
            return
        if isinstance(work, CloseGroup):
            leaf = group.nodes[-1] if group.nodes else None
        else:
            sample = (work.source.trajectory if isinstance(work, Append) else work.trajectory).sample
            leaf = group.open[sample].leaf if sample in group.open else None
        if leaf is not None:
            self.model.states.expect(leaf.states())

    def append(self, work: Append, closing: bool) -> Tally:
        """Add a source's tokens; run what is worth running, unless the trajectory is `closing` within this call.

        Raises ValueError naming the source for tokens, scores or an order that cannot be right.
        """
        source, tally = work.source, Tally()
        check_source(work, self.model.rows, self.objective)
        group = self.groups.setdefault(source.trajectory.group, Group())
        if source.trajectory.sample in group.rewards:
            raise ValueError(f"source {source.name}: trajectory {source.trajectory} is closed already")
        trajectory = group.open.setdefault(source.trajectory.sample, Trajectory())
        if source.turn != trajectory.turns:
            raise ValueError(f"source {source.name}: turn {trajectory.turns} of its trajectory was expected next")
        if source.prefix + len(source.context_ids) == 0:
            raise ValueError(
                f"source {source.name}: its context is empty; the first action token would have no predictor"
            )
        if source.prefix > len(trajectory.tokens):
            raise ValueError(
                f"source {source.name}: repeats {source.prefix} tokens, but its trajectory has {len(trajectory.tokens)}"
            )
        if trajectory.turns == 0:
            self._start(group, trajectory, source, tally)
        elif source.prefix < len(trajectory.tokens):
            self._branch(trajectory, source)
            if self.objective.rewards == NONE:
                self._sweep_finished(group, trajectory, None, tally)
        trajectory.turns += 1
        if trajectory.turns > 1:
            n = len(source.context_ids)
            trajectory.extend(source.context_ids, [0] * n, [0.0] * n, [0.0] * n, source.name)
        scores = work.scores if work.scores is not None else [0.0] * len(source.action_ids)
        trajectory.extend(source.action_ids, source.mask, scores, source.sampler_logps, source.name, work.support)
        trajectory.n_scored += source.n_scored
        if not closing and len(trajectory.tokens) - 1 - trajectory.run >= max(self.block, 1):
            self.run_ahead(trajectory, tally)
        return tally

    def close_trajectory(self, work: CloseTrajectory) -> Tally:
        """Sweep the trajectory down to the group's prompt.

        Under a group objective with A_i itself when `work` brings the group's rewards, else what the reward weighs goes into
        the group's statistics; with the exact accumulator when the group closes, since only one way of summing gives the same
        bits. What no reward weighs is learned from whatever the reward, and where there is none.

        Raises ValueError for a trajectory that is closed already, FloatingPointError for a reward that is not finite.
        """
        tally, sample = Tally(), work.trajectory.sample
        group = self.groups.setdefault(work.trajectory.group, Group())
        if sample in group.rewards:
            raise ValueError(f"trajectory {work.trajectory} is closed already")
        if self.objective.rewards != NONE and work.reward is not None and not math.isfinite(work.reward):
            raise FloatingPointError(f"trajectory {work.trajectory}: its reward is {work.reward}, not a finite number")
        trajectory = group.open.pop(sample, None) or Trajectory()
        self._finish_path(trajectory)
        group.rewards[sample] = work.reward
        if self.objective.rewards == NONE:
            self._sweep_finished(group, trajectory, None, tally)
        elif work.reward is None:
            self._sweep_finished(group, trajectory, 0.0, tally)
        elif self.objective.rewards == OWN:
            self._sweep_finished(group, trajectory, self.objective.weight(work.reward), tally)
        elif self.exact:
            group.waiting[sample] = trajectory
        elif work.group_rewards is not None:
            self._sweep_finished(group, trajectory, self.objective.weights(work.group_rewards)[sample], tally)
        else:
            if group.statistics is None:
                group.statistics = GroupStatistics(self.accumulator, work.reward)
            if self.objective.has_loss:
                self._sweep_finished(group, trajectory, 1.0, tally, partial(self._apart, group, work.reward))
            else:
                with group.statistics.collecting(work.reward, group.nodes):
                    self._sweep_finished(group, trajectory, 1.0, tally)
        return tally

    def close_group(self, work: CloseGroup) -> Tally:
        """Combine the group's statistics, sweep what waited for its rewards, then the shared prompt, once; free the group.

        Raises ValueError when a trajectory of the group is still open.
        """
        tally, group = Tally(), self.groups.get(work.group, Group())
        if group.open:
            still = ", ".join(str(TrajectoryId(work.group, sample)) for sample in sorted(group.open))
            raise ValueError(f"group {work.group} cannot close: open trajectories {still}")
        rewards = [group.rewards[sample] for sample in sorted(group.rewards)]
        if group.statistics is not None:
            self.model.states.bring(group.nodes[-1].states() if group.nodes else [])
            group.statistics.close(*self.objective.affine(rewards, group.statistics.origin))
        if group.waiting:
            weight_of = dict(zip(sorted(group.rewards), self.objective.weights(rewards), strict=True))
            for sample in sorted(group.waiting):
                self._sweep_finished(group, group.waiting[sample], weight_of[sample], tally)
        with tally.on_prompt():
            for node in reversed(group.nodes):
                self._backward(node, None, 0, tally)
        self.groups.pop(work.group, None)
        return tally

    def _start(self, group: Group, trajectory: Trajectory, source: Source, tally: Tally) -> None:
        """Turn 0: its context is the group's prompt, forwarded here when this is the group's first source."""
        ids = source.context_ids
        if not ids:
            raise ValueError(
                f"source {source.name}: the prompt is empty; the first action token would have no predictor"
            )
        if group.prompt is None:
            group.prompt, parent = ids, None
            with tally.on_prompt():
                for part in pieces(len(ids) - 1, self.block):
                    parent = self.model.segment(parent, list(ids[part]), None, shared=True, exact=self.exact)
                    group.nodes.append(parent)
                    self._run_path([parent], tally)
        shared = next((i for i, (a, b) in enumerate(zip(group.prompt, ids, strict=False)) if a != b), None)
        shared = min(len(group.prompt), len(ids)) if shared is None else shared
        for node in group.nodes:
            if node.end <= min(shared, len(ids) - 1):
                trajectory.leaf = node
        n = len(ids)
        trajectory.extend(ids, [0] * n, [0.0] * n, [0.0] * n, source.name)

    def _branch(self, trajectory: Trajectory, source: Source) -> None:
        """Leave the current path at the deepest boundary inside the common prefix; its rest becomes a finished branch."""
        end = min(source.prefix, source.prefix + len(source.context_ids) - 1)  # the first new token's predictor is new
        if trajectory.run < end:
            self._make(trajectory, end)
        attach = trajectory.leaf
        while attach is not None and attach.end > end:
            attach = attach.parent
        self._make(trajectory, trajectory.last_scored())
        if trajectory.leaf is not attach:
            trajectory.finished.append(Branch(trajectory.leaf, attach))
        trajectory.leaf = attach
        trajectory.cut(source.prefix)

    def _finish_path(self, trajectory: Trajectory) -> None:
        """Nothing can follow: what is pending after the last scored token's predictor need not run at all."""
        self._make(trajectory, trajectory.last_scored())
        trajectory.finished.append(Branch(trajectory.leaf, None))
        trajectory.leaf = None
        trajectory.cut(0)

    def _make(self, trajectory: Trajectory, end: int) -> None:
        """Turn the pending inputs before `end` into unrun segments below the leaf."""
        start = trajectory.run
        for part in pieces(max(0, end - start), self.budget.piece(self.block)):
            a, b = start + part.start, start + part.stop
            scored = trajectory.scored(a, b, self.objective.needs_teacher, self.model.device)
            trajectory.leaf = self.model.segment(trajectory.leaf, trajectory.tokens[a:b], scored)

    def _run_path(self, nodes: list[Segment], tally: Tally) -> None:
        """Forward what is unrun of a path, root first, for its state; keep graphs where the budget allows."""
        for segment in nodes:
            if not segment.run:
                self.arrive(segment, tally)

    def run_ahead(self, trajectory: Trajectory, tally: Tally) -> None:
        """Forward of an open trajectory what need not be forwarded again for it (or all, where turns do not wait).

        That is all that is pending where its graph can be kept until the sweep. Else it is what lies before the last piece: a
        close would have to forward that for its state too, while the last piece's own forward is its sweep's.
        """
        start, pending = trajectory.run, len(trajectory.tokens) - 1 - trajectory.run
        *_, last = pieces(pending, self.budget.piece(self.block))
        whole = not self.block or self.budget.admits(pending, start)
        if self.exact:  # bounds follow from the trajectory alone, so the last piece is made, but not run
            self._make(trajectory, start + pending)
            path = trajectory.leaf.path()
            self._run_path(path if whole else path[:-1], tally)
            return
        self._make(trajectory, start + (pending if whole else last.start))
        if trajectory.leaf is not None:
            self._run_path(trajectory.leaf.path(), tally)

    def arrive(self, segment: Segment, tally: Tally) -> None:
        """A segment's first forward, before its sweep."""
        keep = self.budget.admits(segment.length, segment.start)
        graph = self.model.forward(segment, grad=keep)
        if keep:
            self.budget.keep(segment, graph)

    def _sweep_finished(
        self, group: Group, trajectory: Trajectory, weight: float | None, tally: Tally, apart: Apart | None = None
    ) -> None:
        """Sweep all finished branches of a trajectory, oldest first: later ones hang nearer the prompt.

        weight: w_i; None where no reward has a part. apart: within it, what the reward weighs is summed apart.
        """
        for branch in trajectory.finished:
            chain, node = [], branch.tip
            while node is not None and node is not branch.stop and not any(node is root for root in group.nodes):
                chain.append(node)
                node = node.parent
            if weight == 0.0 and not self.objective.has_loss:  # exactly zero gradient, but the tokens still count
                for node in chain:
                    tally.n_scored += len(node.scored or ())
                    self._free(node)
                continue
            if chain:
                self._run_path(branch.tip.path()[:-1], tally)  # the tip's own forward is its sweep's
            for node in chain:
                self._backward(node, weight, trajectory.n_scored, tally, apart)
        trajectory.finished.clear()

    def _backward(
        self, segment: Segment, weight: float | None, n_scored: int, tally: Tally, apart: Apart | None = None
    ) -> None:
        """One backward of a segment: its own loss and the adjoints of its state together; then free it.

        With `apart` two, of one graph: what no reward weighs goes where it always goes, the rest into the statistics.
        """
        if segment.scored is not None or segment.has_adjoint:
            self.model.states.bring(segment.states())
            graph = segment.graph or self.model.forward(segment, grad=True)
            tokens = None if segment.scored is None else self.tokens(segment, graph.hidden, tally)
            if apart is None:
                self._one_pass(segment, graph, tokens and self.total(tokens, weight, n_scored))
            else:
                self._one_pass(segment, graph, tokens and self.total(tokens, None, n_scored), again=True)
                with apart(segment):
                    rest = tokens and self.objective.reward_loss(tokens, weight, n_scored).sum()
                    self._one_pass(segment, graph, rest, apart=True)
        self._free(segment)

    def _one_pass(
        self, segment: Segment, graph: Graph, loss: torch.Tensor | None, again: bool = False, apart: bool = False
    ) -> None:
        """Backward through a segment's graph from its loss and from the adjoints of its state. again: it is not the last."""
        outputs, cotangents = ([], []) if loss is None else ([loss], [None])
        for state, cotangent in segment.cotangents(graph.own, apart):
            outputs.append(state)
            cotangents.append(cotangent)
        if outputs:
            torch.autograd.backward(outputs, cotangents, retain_graph=again)
            self.model.deposit_leaves(segment, graph)

    @contextmanager
    def _apart(self, group: Group, reward: float, segment: Segment) -> Iterator[None]:
        """Within it, gradients go into the group's statistics, and what they leave on the trajectory's own states apart."""
        own = (node for node in segment.path() if not node.shared)
        with ExitStack() as stack:
            stack.enter_context(group.statistics.collecting(reward, group.nodes))
            for adjoint in dict.fromkeys(held for node in own for held in (node.chunk.adjoint, node.adjoint)):
                adjoint.apart = adjoint.apart or adjoint.beside()
                stack.enter_context(adjoint.collecting([(adjoint.apart, 1.0)]))
            yield

    def total(self, tokens: Tokens, weight: float | None, n_scored: int) -> torch.Tensor:
        """The scalar whose gradient is accumulated. weight, n_scored: the trajectory's w_i (None or 0: no part) and |M_i|."""
        parts = [self.objective.loss(tokens)] if self.objective.has_loss else []
        if weight:
            parts.append(self.objective.reward_loss(tokens, weight, n_scored))
        return sum(parts[1:], parts[0]).sum()

    def tokens(self, segment: Segment, hidden: torch.Tensor, tally: Tally) -> Tokens:
        """A segment's scored tokens as the objective sees them, counted in `tally`. hidden: [1, n, d].

        Raises FloatingPointError naming the source whose log-prob is not finite.
        """
        scored = segment.scored
        logp_TI = self.model.logp(hidden, scored)
        logp_T, support = logp_TI[:, 0], None
        detached_T = logp_T.detach().double()
        if not bool(torch.isfinite(detached_T).all()):
            bad = next(
                name for name, x in zip(scored.sources, detached_T.tolist(), strict=True) if not math.isfinite(x)
            )
            raise FloatingPointError(f"source {bad}: the student's log-prob of a scored token is not finite")
        gap_T = (detached_T - scored.sampler_T).abs()
        tally.n_scored += len(scored)
        tally.sum_logp_gap += float(gap_T.sum())
        tally.max_logp_gap = max(tally.max_logp_gap, float(gap_T.max()))
        tally.gap_counts.update((gap_T.clamp(min=SMALLEST_GAP).log2() * 8).floor().int().tolist())
        scores_T = None
        if scored.scores_T is not None:
            tally.sum_kl += float((detached_T - scored.scores_T).sum())
            scores_T = scored.scores_T.to(logp_T.dtype)
        if scored.support is not None:
            ids_TK, scores_TK = scored.support
            sampled_TK = ids_TK == scored.ids_T[:, None]
            support = SupportTokens(logp_TI[:, 1:], scores_TK.to(logp_T.dtype), sampled_TK)
        return Tokens(logp_T, scored.sampler_T.to(logp_T.dtype), scores_T, support)

    def _free(self, segment: Segment) -> None:
        self.budget.drop(segment)
        segment.free()
