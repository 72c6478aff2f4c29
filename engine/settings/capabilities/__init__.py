"""The table of things that do not go together: a row for each two, and the stage of a run at which it is decided.

`TrainConfig` refuses by the rows of keys when it is read. `rolltree train`, with ``--dry-run`` too, refuses by the
others when the parts are made or the models are loaded that they are about. docs/configuration.md shows the table.
"""

from __future__ import annotations

from .agents import AGENTS
from .data import DATA
from .learning import LEARNING, TRAINING
from .made import MODELS, OF_ROLES, PARTS, Model, Part
from .processes import PROCESSES
from .rewards import REWARDS
from .row import Row, refuse

OF_KEYS = (*DATA, *REWARDS, *LEARNING, *PROCESSES, *AGENTS)
"""Rows of keys alone, in the order in which their sentences are told."""
STAGES = {
    "when the configuration is read": OF_KEYS,
    "when a training begins": TRAINING,
    "when a part is made": PARTS,
    "when a model is loaded": MODELS,
}
"""All rows, by the stage at which they are decided."""

__all__ = ["MODELS", "OF_KEYS", "OF_ROLES", "PARTS", "STAGES", "TRAINING", "Model", "Part", "Row", "refuse"]
