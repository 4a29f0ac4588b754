"""A process's heap that keeps its pages.

Segments' graphs are made and freed in large blocks, gigabytes an update. glibc's malloc hands such blocks back to the
kernel, and each page comes back by a fault and a clearing, which where memory is dear costs as much as the
arithmetic. What a rank holds is bounded (learner/retain.py, learner/state_budget.py), so its pages may stay:
docs/design.md has what that gains.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_pages() -> None:
    """From now on this process's malloc returns no memory to the kernel: no block is mapped by itself, no top is trimmed.

    Raises:
        RuntimeError: the C library refused.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
        if not mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) failed: this learner needs glibc's malloc")
