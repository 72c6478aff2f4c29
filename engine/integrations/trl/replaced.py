"""The methods of TRL's trainers that rolltree replaces or relies on, and the search for versions that are not TRL's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

GROUPS = (GRPOTrainer, RLOOTrainer)
GKD = "trl.experimental.gkd.gkd_trainer"


def overridden() -> tuple[type, ...]:
    """Return TRL's classes whose methods are replaced; the experimental one only where it was imported, which warns."""
    module = sys.modules.get(GKD)
    return (*GROUPS, DistillationTrainer, *([] if module is None else [module.GKDTrainer]))


def is_gkd(trainer: Any) -> bool:
    """Return whether ``trainer`` is a `GKDTrainer`."""
    return any(cls in overridden() for cls in type(trainer).__mro__) and isinstance(trainer, SFTTrainer)


class Part(NamedTuple):
    """A part of a step that stays TRL's if one of ``methods`` is not TRL's own."""

    methods: tuple[str, ...]
    warning: str  # with a place for the reason


_SCORE = "_get_per_token_logps_and_entropies"
SCORES = Part((_SCORE,), "Log-probs are TRL's code with rolltree's head, and no trees: %s.")
LOSS = Part(
    ("_compute_loss", "compute_loss", "get_off_policy_mask", "get_gamma_weights", _SCORE),
    "The loss is TRL's code on rolltree's log-probs, and no op together with the head: %s.",
)
DIVERGENCE = Part(
    ("_compute_loss", "compute_loss", "_get_last_hidden_state", "generalized_jsd_loss"),
    "The divergence is TRL's code on hidden states or logits of flat batches: %s.",
)
ORDER = Part(("_prepare_inputs",), "Micro-batches stay in TRL's order, which spreads groups over them: %s.")
COMPLETIONS = Part(("_generate_single_turn",), "Completions are TRL's, not the native engine's: %s.")
BEHAVIOUR = Part(
    ("_generate", "_tool_call_loop", "_generate_and_score_completions"),
    "The native engine's log-probs are left out, as TRL's own sampling has none: %s.",
)
PARTS = (SCORES, LOSS, ORDER, COMPLETIONS, BEHAVIOUR)


def own(trainer: Any, part: Part) -> str | None:
    """Return the reason for which ``part`` stays TRL's, a method that is not TRL's own; None if there is none.

    A method is not TRL's own if the trainer itself has it as an attribute, if it comes from a class between the
    trainer's and TRL's, or if another function has taken its place in TRL's class.
    """
    for name in part.methods:
        if name in vars(trainer):
            return f"this {type(trainer).__name__} has a {name} of its own"
        for cls in type(trainer).__mro__:
            if name not in vars(cls) or (packages := homes(vars(cls)[name])) == {"rolltree"}:
                continue
            if cls not in overridden() or not packages <= {"trl", "torch"}:
                return f"{cls.__name__} has a {name} of its own"
            break
    return None


def homes(function: Any) -> set[str]:
    """Return the packages in which ``function``, and each function that it decorates, are written."""
    return {package(layer) for layer in chain(function)}


def chain(function: Any) -> Iterator[Any]:
    """Yield ``function``, the function that it decorates, and so on."""
    layer = function
    while layer is not None:
        layer = getattr(layer, "__func__", layer)  # of static and of bound methods
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def package(function: Any) -> str:
    """Return the package in which ``function`` is written."""
    written: str = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return written.split(".")[0]
