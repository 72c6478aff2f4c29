"""Ends the OpenMP threads of a thread that has computed and will not go on, so that another one's are quick."""

from __future__ import annotations

import contextlib
import ctypes

SOFT = 1  # omp_pause_soft of omp_pause_resource_t, OpenMP 5.0, section 3.2.43


def release_threads() -> bool:
    """End the OpenMP threads that belong to the calling thread; its next parallel operation starts them again.

    On a CPU, PyTorch computes with a team of threads for each thread that calls it, as many as there are cores, and a
    team stays as long as the thread that it belongs to. While all teams of a process have more threads than there are
    cores, GNU's OpenMP lets every idle one sleep at once, where it would otherwise wait actively for the next
    operation (`gomp_managed_threads` in libgomp's ``wait.h``), and the kernel has to wake it thousands of times a step.

    A process that has computed calls it before it forks: a fork has none of the threads, and the library crashes or
    hangs where it is to end them there.

    Returns:
        True if they have ended, False if the OpenMP library has no such function.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return bool(ctypes.CDLL(None).omp_pause_resource_all(SOFT) == 0)
    return False
