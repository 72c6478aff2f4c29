"""Keeps freed host memory in the process, for the next step."""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to 1 GiB of free memory, and place blocks of up to 32 MiB on its heap.

    A training step on a CPU frees some hundred megabytes and allocates them again. By default malloc returns them to
    the kernel in between, and every page then costs a fault (5 % of a step of examples/arithmetic_cpu.toml).

    Returns:
        True if the C library accepted both settings, False if it is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(MMAP_THRESHOLD, 32 << 20) and mallopt(TRIM_THRESHOLD, 1 << 30))
    return False
