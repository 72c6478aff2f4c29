"""Rollout programs: each steers how one prompt's responses branch, pause for tools and end.

The engine samples segments of responses and reports each that ends; the program answers with actions (fork, rewind,
append, prune, call a tool, reward), and the engine carries them out before its next step. `PROGRAMS` holds them by the
name in ``rollout.program``; ``file.py:Class`` names a user's own.

Read ``program`` first (reports, actions and the base class), then ``flat`` and ``spo`` (the shortest programs),
``treepo`` and ``mcts`` (searches), ``tools`` (text tools), and ``environment`` with ``conversation`` (chat turns).
`rolltree methods` prints the first paragraph of each class's docstring.
"""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..parts.resolve import resolve
from .again import Annealed, PlanExecute, TryAgain
from .agent import AgentCalls, CallContext
from .arpo import ARPO
from .demonstrated import DemoPrefix, Foresee
from .early_stop import EarlyStop
from .environment import EnvironmentTurns, Observation
from .eptree import CURE, EPTree
from .flat import Flat
from .generate_then_verify import GenerateThenVerify
from .hints import HintLadder
from .latr import LATR
from .mcts import MCTS
from .prefix_value_probe import PrefixValueProbe
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
from .varied import GreedyBaseline, ManyTemperatures

PROGRAMS: dict[str, type[RolloutProgram]] = {
    "flat": Flat,
    "treepo": TreePO,
    "spo_tree": SPOTree,
    "spo_chain": SPOChain,
    "eptree": EPTree,
    "cure": CURE,
    "latr": LATR,
    "s_grpo": SGRPO,
    "prefix_value_probe": PrefixValueProbe,
    "hints": HintLadder,
    "mcts": MCTS,
    "tools": ToolTurns,
    "environment": EnvironmentTurns,
    "agent": AgentCalls,
    "arpo": ARPO,
    "generate_then_verify": GenerateThenVerify,
    "demo_prefix": DemoPrefix,
    "foresee": Foresee,
    "early_stop": EarlyStop,
    "try_again": TryAgain,
    "plan_execute": PlanExecute,
    "annealed": Annealed,
    "many_temperatures": ManyTemperatures,
    "greedy_baseline": GreedyBaseline,
}


def make_program(name: str, **options: Any) -> RolloutProgram:
    """Make the program called ``name``, or an instance of the class that ``file.py:Class`` names.

    Raises:
        UserError: the program or an option does not exist, an option is missing, or its value is out of range.
    """
    program = resolve("rollout.program", name, options, parts=PROGRAMS)
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
    "AgentCalls",
    "Annealed",
    "BranchId",
    "Call",
    "CallContext",
    "DemoPrefix",
    "EPTree",
    "EarlyStop",
    "EnvironmentTurns",
    "Finish",
    "Flat",
    "Foresee",
    "Fork",
    "GenerateThenVerify",
    "Given",
    "GreedyBaseline",
    "GroupState",
    "HintLadder",
    "ManyTemperatures",
    "Observation",
    "PlanExecute",
    "PrefixValueProbe",
    "Prune",
    "Reward",
    "Rewind",
    "RolloutProgram",
    "SPOChain",
    "SPOTree",
    "SegmentReport",
    "ToolTurns",
    "TreePO",
    "TryAgain",
    "make_program",
]
