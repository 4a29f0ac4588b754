"""The development split: 5 % of the groups, rounded up, the first in order of the SHA-256 of their normalised id.

A group is a repository or a source family, so no development task has a sibling in training. The order depends on the ids
alone: more tasks in a group, or another order of reading, change nothing.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

SHARE = Fraction(5, 100)


def normalised(group: str) -> str:
    """NFKC, case folded, surrounding white space off, inner white space one space."""
    return " ".join(unicodedata.normalize("NFKC", group).casefold().split())


def development_groups(groups: Iterable[str], share: Fraction = SHARE) -> list[str]:
    """The normalised ids of the development groups, in order of their hash.

    Raises:
        ValueError: an id is empty.
    """
    names = {normalised(group) for group in groups}
    if "" in names:
        raise ValueError("a group without a name")
    ordered = sorted(names, key=lambda name: (hashlib.sha256(name.encode()).hexdigest(), name))
    return ordered[: math.ceil(share * len(ordered))]
