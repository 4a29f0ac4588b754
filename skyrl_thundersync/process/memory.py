"""The most host memory that this process held since a moment."""

from __future__ import annotations

from pathlib import Path

PEAK_ONLY = "5"
"""What the kernel takes for: forget the peak (proc_pid_clear_refs(5)); nothing else of the process changes."""


def forget_peak() -> None:
    """Begin anew. Where the kernel does not let a process do so, peaks are those since its start."""
    try:
        Path("/proc/self/clear_refs").write_text(PEAK_ONLY)
    except PermissionError:
        return


def peak_bytes() -> int:
    """Most resident memory since `forget_peak`, or since the process began."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
