"""Ranks of a process group on this machine, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """``work(rank, *args)`` in processes: forked, as imports take longer than most work, where there is no CUDA, which
    cannot be used in what is forked."""
    mp.start_processes(work, args, ranks, start_method="spawn" if torch.cuda.is_available() else "fork")
