"""Sorts the sequences of an update by prompt, so that micro-batches contain whole groups.

TRL shuffles the sequences of a generation before it cuts them into micro-batches, so the completions of a prompt are
spread over several micro-batches and share little in each. The order within one update does not change its sum.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

MicroBatch = dict[str, Any]


def matters(trainer: Any) -> bool:
    """Return True if the loss of an update depends on the composition of its micro-batches."""
    means = getattr(trainer, "loss_type", None) == "bnpo" or trainer.aux_loss_enabled
    return (
        means or getattr(trainer, "_entropy_bonus_enabled", False) or getattr(trainer, "top_entropy_quantile", 1.0) < 1
    )


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
    window = [split_pixel_values_by_grid(batch) for batch in window]
    sizes = [len(batch["prompt_ids"]) for batch in window]
    _, group = torch.cat([_prompts(batch) for batch in window]).unique(dim=0, return_inverse=True)
    place = torch.arange(len(group), device=group.device)
    first = place.new_full((len(group),), len(group)).scatter_reduce(0, group, place, "amin")
    order = torch.sort(first[group], stable=True).indices.split(sizes)
    merged = {name: _together([batch[name] for batch in window]) for name in window[0]}
    return [
        unsplit_pixel_values_by_grid({name: _chosen(value, places) for name, value in merged.items()})
        for places in order
    ]


def _prompts(batch: MicroBatch) -> Tensor:  # [B, P] or [B, P + 1]
    """Return what tells prompts apart: their token ids and, as placeholders are all alike, a hash of their pictures."""
    ids: Tensor = batch["prompt_ids"]
    if not isinstance(batch.get("pixel_values"), list):
        return ids
    hashes = [
        int.from_bytes(blake2b(pixels.float().cpu().numpy().tobytes(), digest_size=7).digest())
        for pixels in batch["pixel_values"]
    ]
    return torch.cat([ids, torch.tensor(hashes, device=ids.device)[:, None]], 1)


def _together(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):  # an entry a sample
        return [entry for value in values for entry in value]
    return torch.cat(values) if isinstance(first, Tensor) and first.dim() else first


def _chosen(value: Any, places: Tensor) -> Any:
    if isinstance(value, list):
        return [value[i] for i in places.tolist()]
    return value[places] if isinstance(value, Tensor) and value.dim() else value
