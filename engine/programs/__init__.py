"""Rollout programs by name."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..parts.resolve import resolve
from .arpo import ARPO
from .environment import EnvironmentTurns, Observation
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
    Reward,
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
    "environment": EnvironmentTurns,
    "arpo": ARPO,
}


def make_program(name: str, **options: Any) -> RolloutProgram:
    """The program called ``name``, or the class that ``file.py:Class`` names.

    Raises:
        UserError: no program or no option of that name, one missing, or an option's value makes no sense.
    """
    program = resolve("rollout.program", name, options, known=PROGRAMS)
    if not isinstance(program, RolloutProgram):
        raise UserError(
            f"rollout.program = '{name}' must be a class derived from rolltree.engine.programs.RolloutProgram."
        )
    return program


__all__ = [
    "ARPO",
    "CURE",
    "LATR",
    "MCTS",
    "PROGRAMS",
    "SGRPO",
    "WHOLE",
    "Action",
    "BranchId",
    "Call",
    "EPTree",
    "EnvironmentTurns",
    "Finish",
    "Flat",
    "Fork",
    "Given",
    "GroupState",
    "HintLadder",
    "Observation",
    "Prune",
    "Reward",
    "Rewind",
    "RolloutProgram",
    "SPOChain",
    "SPOTree",
    "SegmentReport",
    "ToolTurns",
    "TreePO",
    "make_program",
]
