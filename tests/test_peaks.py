"""Peaks are an update's own."""

import mmap

from skyrl_thundersync.process.memory import forget_peak, peak_bytes

MIB = 2**20


def test_a_peak_is_forgotten_and_counted_anew():
    with mmap.mmap(-1, 300 * MIB) as block:
        block.write(b"x" * (300 * MIB))
        high = peak_bytes()
    forget_peak()
    low = peak_bytes()
    assert high - low > 200 * MIB
    with mmap.mmap(-1, 100 * MIB) as block:
        block.write(b"x" * (100 * MIB))
    assert 80 * MIB < peak_bytes() - low < 250 * MIB
