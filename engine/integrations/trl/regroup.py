"""Sorts the sequences of an update by prompt, so that micro-batches contain whole groups.

TRL shuffles the sequences of a generation before it cuts them into micro-batches, so the completions of a prompt are
spread over several micro-batches and share little in each. The order within one update does not change its sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MicroBatch = dict[str, Any]


def matters(trainer: Any) -> bool:
    """Return True if the loss of an update depends on the composition of its micro-batches."""
    means = getattr(trainer, "loss_type", None) == "bnpo" or trainer.aux_loss_enabled
    of_entropy = getattr(trainer, "entropy_coef", 0) != 0 or getattr(trainer, "use_adaptive_entropy", False)
    return means or of_entropy or getattr(trainer, "top_entropy_quantile", 1.0) < 1


def regroup(batches: list[MicroBatch], update: int) -> list[MicroBatch]:
    """Return micro-batches with the same sequences, those of one prompt adjacent.

    Args:
        batches: micro-batches of a generation, in the order of training.
        update: number of micro-batches that an update accumulates.
    """
    if len(batches) % update and update % len(batches):
        return batches  # an update begins or ends within a generation
    width = min(update, len(batches))
    windows = [batches[i : i + width] for i in range(0, len(batches), width)]
    return [batch for window in windows for batch in _in_order(window)]


def _in_order(window: list[MicroBatch]) -> list[MicroBatch]:
    if len(window) == 1:
        return window
    sizes = [len(batch["prompt_ids"]) for batch in window]
    _, group = torch.cat([batch["prompt_ids"] for batch in window]).unique(dim=0, return_inverse=True)
    place = torch.arange(len(group), device=group.device)
    first = place.new_full((len(group),), len(group)).scatter_reduce(0, group, place, "amin")
    order = torch.sort(first[group], stable=True).indices.split(sizes)
    merged = {name: _together([batch[name] for batch in window]) for name in window[0]}
    return [
        {name: value[some] if isinstance(value, Tensor) and value.dim() else value for name, value in merged.items()}
        for some in order
    ]


def _together(values: list[Any]) -> Any:
    first = values[0]
    return torch.cat(values) if isinstance(first, Tensor) and first.dim() else first
