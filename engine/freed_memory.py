"""Freed memory of the host, kept for the next step."""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to 1 GiB that is free, and blocks of up to 32 MiB on its heap.

    A step on a CPU frees some hundred megabytes and asks for them again; malloc gives them back to the kernel in
    between, and every page then costs a fault (5 % of a step of examples/arithmetic_cpu.toml).

    Returns:
        Whether this process has such a malloc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(MMAP_THRESHOLD, 32 << 20) and mallopt(TRIM_THRESHOLD, 1 << 30))
    return False
