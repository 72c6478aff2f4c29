"""Rollout programs by name."""

from __future__ import annotations

import inspect
from typing import Any

from .arpo import ARPO
from .eptree import CURE, EPTree
from .flat import Flat
from .hints import HintLadder
from .latr import LATR
from .mcts import MCTS
from .program import (
    WHOLE,
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
from .s_grpo import SGRPO
from .spo import SPOChain, SPOTree
from .tools import ToolTurns
from .treepo import TreePO

PROGRAMS: dict[str, type[RolloutProgram]] = {
    "flat": Flat,
    "treepo": TreePO,
    "spo_tree": SPOTree,
    "spo_chain": SPOChain,
    "eptree": EPTree,
    "cure": CURE,
    "latr": LATR,
    "s_grpo": SGRPO,
    "hints": HintLadder,
    "mcts": MCTS,
    "tools": ToolTurns,
    "arpo": ARPO,
}


NEEDED = inspect.Parameter.empty
"""Stands for the default of an option that has none."""


def make_program(name: str, **options: Any) -> RolloutProgram:
    """The program called ``name``.

    Raises:
        ValueError: no program or no option of that name, one missing, or an option's value makes no sense.
    """
    if name not in PROGRAMS:
        raise ValueError(f"There is no rollout program '{name}'; choose one of {', '.join(PROGRAMS)}.")
    known = program_options(PROGRAMS[name])
    if unknown := sorted(set(options) - set(known)):
        takes = ", ".join(known) or "none"
        raise ValueError(f"The rollout program '{name}' has no option '{unknown[0]}'; it takes: {takes}.")
    needed = [option for option, default in known.items() if default is NEEDED]
    if missing := [option for option in needed if option not in options]:
        raise ValueError(f"The rollout program '{name}' needs the option '{missing[0]}'.")
    return PROGRAMS[name](**options)


def program_options(program: type[RolloutProgram]) -> dict[str, Any]:
    """Names and defaults (`NEEDED` where there is none); a program that takes any takes those of its parent too."""
    found: dict[str, Any] = {}
    for cls in program.__mro__:
        parameters = inspect.signature(cls).parameters.values() if issubclass(cls, RolloutProgram) else []
        for p in parameters:
            if p.kind is not inspect.Parameter.VAR_KEYWORD:
                found.setdefault(p.name, p.default)
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


__all__ = [
    "ARPO",
    "CURE",
    "LATR",
    "MCTS",
    "NEEDED",
    "PROGRAMS",
    "SGRPO",
    "WHOLE",
    "Action",
    "BranchId",
    "Call",
    "EPTree",
    "Finish",
    "Flat",
    "Fork",
    "Given",
    "GroupState",
    "HintLadder",
    "Prune",
    "Rewind",
    "RolloutProgram",
    "SPOChain",
    "SPOTree",
    "SegmentReport",
    "ToolTurns",
    "TreePO",
    "make_program",
    "program_options",
]
