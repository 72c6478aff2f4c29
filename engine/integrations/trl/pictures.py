"""The pictures of a TRL batch, as trees and the native engine take them.

TRL's processors write a placeholder for each of a picture's rows, and keep the pictures of all samples one after
another: ``pixel_values`` by patches, ``image_grid_thw`` by pictures, ``num_images`` by samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ...data.media import Picture

FIELDS = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
"""The names under which TRL keeps pictures of models with rotary positions on a grid."""

Fields = Mapping[str, Any]


def fields_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of pictures among ``inputs``."""
    return {name: inputs[name] for name in FIELDS if inputs.get(name) is not None}


def cut(fields: Fields, begin: int, end: int) -> dict[str, Any]:
    """Return the fields of the samples ``begin`` to ``end``."""
    samples: dict[str, Any] = {}
    if "mm_token_type_ids" in fields:
        samples["mm_token_type_ids"] = fields["mm_token_type_ids"][begin:end]
    if "pixel_values" in fields:
        first, last = (sum(fields["num_images"][:n]) for n in (begin, end))
        patches = fields["image_grid_thw"].prod(1)
        rows = slice(int(patches[:first].sum()), int(patches[:last].sum()))
        samples |= {
            "pixel_values": fields["pixel_values"][rows],
            "image_grid_thw": fields["image_grid_thw"][first:last],
        }
        samples["num_images"] = fields["num_images"][begin:end]
    return samples


def pictures_of(model: PreTrainedModel, fields: Fields) -> list[list[Picture]]:
    """Return the pictures of each sample; empty if there are none at all."""
    if "pixel_values" not in fields:
        return []
    merged = int(model.config.vision_config.spatial_merge_size)
    pixels, grids = _array(fields["pixel_values"]), _array(fields["image_grid_thw"])
    ends = np.cumsum(grids.prod(1))
    every = []
    for grid, begin, end in zip(grids, ends - grids.prod(1), ends, strict=True):
        frames, high, wide = (int(n) for n in grid)
        places = frames, high // merged, wide // merged
        inputs = {"pixel_values": pixels[begin:end], "image_grid_thw": grid[None]}
        every.append(Picture.of(inputs, int(np.prod(places)), places))
    return [every[begin:end] for begin, end in pairwise(accumulate(fields["num_images"], initial=0))]


def _array(values: Any) -> Any:
    if isinstance(values, Tensor):
        return (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
    return np.asarray(values)
