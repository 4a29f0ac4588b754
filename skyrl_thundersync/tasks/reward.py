"""What a reward may be, whoever gives it."""

from __future__ import annotations

import math

LARGEST_REWARD = 1e30
REWARD_RULE = f"a reward is a finite number of at most {LARGEST_REWARD:g} in size"
"""Times a gradient and summed over a batch, rewards are to stay within FP32 (3.4e38)."""


def usable_reward(said: object) -> float | None:
    """A reward, or the text of one, as a number; None where it is none by `REWARD_RULE`."""
    try:
        reward = float(said)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return reward if math.isfinite(reward) and abs(reward) <= LARGEST_REWARD else None
