"""When a trajectory's sweep may start under a group objective, and with which rewards (PAPER.md, "GRPO, exactly").

A close that goes to its rank before its group's rewards are known makes that rank keep the group's statistics, two
model-sized host buffers. At most `cap` groups a rank may hold them; a further group's closes wait here while its turns are
forwarded as ever. Differs from the paper: a group whose last reward has arrived needs no statistics, so it never waits, and
its closes carry the rewards. What waits therefore goes at the latest with its group's last trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, Work


@dataclass
class RewardGate:
    """The gate in front of all ranks' queues; both methods return the (rank, work) that may enter now, in order.

    Args:
        cap: groups that may hold statistics on a rank at once; 0: none, every trajectory waits for its group's rewards.
        groups: group id to its number of trajectories.

    Raises:
        ValueError: a negative cap.
    """

    cap: int
    groups: dict[str, int]
    _rewards: dict[str, dict[int, float | None]] = field(init=False, default_factory=dict)
    _holding: dict[int, set[str]] = field(init=False, default_factory=dict)
    _waiting: dict[int, dict[str, list[CloseTrajectory]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise ValueError(f"a cap of {self.cap} groups with statistics makes no sense; give 0 or more")

    def offer(self, rank: int, work: Work) -> list[tuple[int, Work]]:
        """`work` was released and placed on `rank`."""
        if not isinstance(work, CloseTrajectory):
            return [(rank, work)]
        group, waiting = work.trajectory.group, self._waiting.setdefault(rank, {})
        holding, rewards = self._holding.setdefault(rank, set()), self._rewards.setdefault(group, {})
        rewards[work.trajectory.sample] = work.reward
        if len(rewards) == self.groups[group]:
            known = tuple(rewards[sample] for sample in sorted(rewards))
            late = [*waiting.pop(group, []), work]
            return [(rank, replace(close, group_rewards=known)) for close in late]
        if group not in holding:
            if len(holding) >= self.cap:
                waiting.setdefault(group, []).append(work)
                return []
            holding.add(group)
        return [(rank, work)]

    def acknowledged(self, rank: int, work: Work) -> list[tuple[int, Work]]:
        """`rank` finished `work`; a swept group's statistics are gone and make room for the group that waited longest."""
        if not isinstance(work, CloseGroup):
            return []
        holding, waiting = self._holding.get(rank, set()), self._waiting.get(rank, {})
        holding.discard(work.group)
        if not waiting or len(holding) >= self.cap:
            return []
        group = next(iter(waiting))
        holding.add(group)
        return [(rank, close) for close in waiting.pop(group)]
