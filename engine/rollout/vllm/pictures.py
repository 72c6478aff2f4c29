"""Prompts with pictures as vLLM takes them: already processed, so that vLLM writes no placeholders of its own.

A tree holds a picture's rows exactly once. vLLM gets as many placeholders in their place, the pixels that the trainer's
tower gets, and the hash of their content, under which it keeps keys and the tower's output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from ...data.columns import Array
from ...data.media import FIRST_ID, PromptMedia
from ...model.pictures import FAMILIES

INPUTS = {"pixel_values", "image_grid_thw"}
"""Inputs of the pictures of models with M-RoPE, which are those that are passed to vLLM."""


def check_pictures(index: int, media: PromptMedia, model_config: Any) -> None:
    """Check that vLLM computes the pictures of prompt ``index`` as the trainer does.

    Args:
        model_config: vLLM's ``ModelConfig``.

    Raises:
        ValueError: the model takes no pictures or not in this way, they were made for another one, vLLM's tower makes
            another number of rows, or vLLM is told to normalise pixels once more.
    """
    if getattr(model_config.multimodal_config, "mm_device_do_normalize", None):
        raise ValueError(
            "With mm_device_do_normalize vLLM normalises the pixels that the trainer's processor has normalised; leave "
            "it out of the engine's options."
        )
    config = model_config.hf_config
    family = FAMILIES.get(config.model_type)
    if family is None or not family.grid:
        families = ", ".join(name for name, other in FAMILIES.items() if other.grid)
        raise ValueError(
            f"Prompt {index} has pictures, which VllmEngine takes for models of the types {families}; this one is of "
            f"type {config.model_type}; use the native engine."
        )
    merged = int(config.vision_config.spatial_merge_size) ** 2
    for picture in media.pictures:
        if picture.grid is None or set(picture.inputs) != INPUTS:
            raise ValueError(
                f"Prompt {index} has pictures that were made for another model than a {config.model_type}; make them "
                "with its processor."
            )
        if (rows := int(np.prod(picture.inputs["image_grid_thw"])) // merged) != picture.rows:
            raise ValueError(
                f"Prompt {index} has a picture of {picture.rows} rows, for which vLLM's tower makes {rows}; make it "
                "with the model's own processor."
            )


def prompt_of(tokens: Array, media: PromptMedia | None, placeholder: int) -> TokensPrompt | MultiModalInput:
    """Return the prompt of a request of vLLM.

    Args:
        tokens: ``[S]`` token ids, a prompt's and those of a response.
        media: the pictures of the prompt.
        placeholder: token id of a picture's rows.
    """
    if media is None:
        return TokensPrompt(prompt_token_ids=tokens.tolist())
    grids = [torch.from_numpy(picture.inputs["image_grid_thw"]) for _, _, picture in media.spans]
    pixels = [torch.from_numpy(picture.inputs["pixel_values"]) for _, _, picture in media.spans]
    grid = torch.cat(grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs: Any = {"pixel_values": torch.cat(pixels), "image_grid_thw": grid}
    return mm_input(
        np.where(tokens >= FIRST_ID, placeholder, tokens).tolist(),
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [picture.digest for _, _, picture in media.spans]},
        {"image": [PlaceholderRange(offset=begin, length=end - begin) for begin, end, _ in media.spans]},
    )
