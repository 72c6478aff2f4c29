"""Rollout programs by name."""

from __future__ import annotations

import inspect
from typing import Any

from .flat import Flat
from .program import (
    Action,
    BranchId,
    Call,
    Finish,
    Fork,
    Given,
    GroupState,
    Prune,
    Rewind,
    RolloutProgram,
    SegmentReport,
)
from .treepo import TreePO

PROGRAMS: dict[str, type[RolloutProgram]] = {"flat": Flat, "treepo": TreePO}


def make_program(name: str, **options: Any) -> RolloutProgram:
    """The program called ``name``.

    Raises:
        ValueError: no program or no option of that name, or an option's value makes no sense.
    """
    if name not in PROGRAMS:
        raise ValueError(f"There is no rollout program '{name}'; choose one of {', '.join(PROGRAMS)}.")
    known = inspect.signature(PROGRAMS[name]).parameters
    if unknown := sorted(set(options) - set(known)):
        takes = ", ".join(known) or "none"
        raise ValueError(f"The rollout program '{name}' has no option '{unknown[0]}'; it takes: {takes}.")
    return PROGRAMS[name](**options)


__all__ = [
    "PROGRAMS",
    "Action",
    "BranchId",
    "Call",
    "Finish",
    "Flat",
    "Fork",
    "Given",
    "GroupState",
    "Prune",
    "Rewind",
    "RolloutProgram",
    "SegmentReport",
    "TreePO",
    "make_program",
]
