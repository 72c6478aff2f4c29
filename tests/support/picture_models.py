"""Tiny vision-language models of random weights, random pictures, trees with them, and plain Transformers on paths.

Nothing here uses how the engine places pictures: a picture's rows are put back to placeholders, and Transformers' own
forward gets the pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from rolltree.engine.data.media import Picture, expand
from rolltree.engine.data.tree import TokenTree

VOCABULARY, IMAGE, WORDS = 128, 120, 100
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, attention_dropout=0.0, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
GRID_TOWER = dict(
    depth=3, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, temporal_patch_size=1,
    spatial_merge_size=2, out_hidden_size=32,
)  # fmt: skip
SQUARE_TOWER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)
IDS = dict(image_token_id=IMAGE, tie_word_embeddings=False)
GRID_IDS = dict(**IDS, video_token_id=123, vision_start_token_id=121, vision_end_token_id=122)


def _grid_picture(draw: np.random.Generator) -> Picture:
    high, wide = (2 * int(n) for n in draw.integers(1, 4, 2))
    pixels = draw.normal(size=(high * wide, 3 * GRID_TOWER["patch_size"] ** 2)).astype(np.float32)
    inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, high, wide]])}
    return Picture.of(inputs, high * wide // 4, (1, high // 2, wide // 2))


def _square_picture(rows: int, mask: bool) -> Callable[[np.random.Generator], Picture]:
    def draw_one(draw: np.random.Generator) -> Picture:
        inputs: dict[str, Any] = {"pixel_values": draw.normal(size=(1, 3, 16, 16)).astype(np.float32)}
        if mask:  # the lower part of the tile is padding
            inputs["pixel_attention_mask"] = np.ones((1, 16, 16), np.int64)
            inputs["pixel_attention_mask"][:, 4 * int(draw.integers(2, 5)) :] = 0
        return Picture.of(inputs, rows)

    return draw_one


def _patched_picture(draw: np.random.Generator) -> Picture:
    """A picture of 1 to 2 by 2 to 3 squares of four patches each, after which padding follows."""
    high, wide = 2 * int(draw.integers(1, 3)), 2 * int(draw.integers(2, 4))
    count, most = high * wide, 24
    pixels = np.zeros((1, most, 3 * GRID_TOWER["patch_size"] ** 2), np.float32)
    pixels[0, :count] = draw.random(size=(count, pixels.shape[2]))
    places = np.full((1, most, 2), -1)
    places[0, :count] = np.indices((high, wide))[::-1].reshape(2, -1).T
    return Picture.of({"pixel_values": pixels, "image_position_ids": places}, count // 4)


@dataclass(frozen=True)
class Kind:
    cls: Any
    config: Any
    picture: Callable[[np.random.Generator], Picture]
    types: str | None = None
    tiles: bool = False


KINDS = {
    "qwen2_5_vl": Kind(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(
            text_config={**TEXT, "head_dim": 8, "rope_parameters": {**ROTARY, "mrope_section": [2, 1, 1]}},
            vision_config={**GRID_TOWER, "window_size": 8, "fullatt_block_indexes": [2]},
            **GRID_IDS,
        ),
        _grid_picture,
        "mm_token_type_ids",
    ),
    "qwen3_vl": Kind(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": ROTARY},
            vision_config={**GRID_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            **GRID_IDS,
        ),
        _grid_picture,
        "mm_token_type_ids",
    ),
    "qwen3_5": Kind(
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config={
                **TEXT,
                "rope_parameters": {**ROTARY, "partial_rotary_factor": 1.0},
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            vision_config={**GRID_TOWER, "num_position_embeddings": 64},
            **GRID_IDS,
        ),
        _grid_picture,
        "mm_token_type_ids",
    ),
    "gemma3": Kind(
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config={
                **TEXT,
                "query_pre_attn_scalar": 16,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            vision_config=SQUARE_TOWER,
            mm_tokens_per_image=4,
            boi_token_id=121,
            eoi_token_id=122,
            **IDS,
        ),
        _square_picture(4, mask=False),
        "token_type_ids",
    ),
    "gemma4": Kind(
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config={
                **TEXT,
                "pad_token_id": 99,
                "num_hidden_layers": 5,
                "num_kv_shared_layers": 2,
                "sliding_window": 7,
                "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
                "use_bidirectional_attention": "vision",
            },
            vision_config={
                **{k: v for k, v in SQUARE_TOWER.items() if k != "image_size"},
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": GRID_TOWER["patch_size"],
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            video_token_id=123,
            boi_token_id=121,
            eoi_token_id=122,
            boa_token_id=124,
            eoa_token_index=125,
            audio_token_id=126,
            **IDS,
        ),
        _patched_picture,
        "mm_token_type_ids",
    ),
    "smolvlm": Kind(
        SmolVLMForConditionalGeneration,
        SmolVLMConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config=SQUARE_TOWER,
            scale_factor=2,
            pad_token_id=0,
            **IDS,
        ),
        _square_picture(4, mask=True),
        tiles=True,
    ),
}


def make_models(name: str) -> tuple[Any, Any]:
    """Return the same weights under tree attention and under plain Transformers."""
    kind = KINDS[name]
    torch.manual_seed(0)
    theirs = kind.cls(copy.deepcopy(kind.config)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim > 1:  # so that attention is far from even, and positions count
                torch.nn.init.normal_(p, std=p.flatten(1).shape[1] ** -0.5)
    theirs.set_attn_implementation("sdpa")
    ours = kind.cls(copy.deepcopy(kind.config)).eval()
    ours.load_state_dict(theirs.state_dict())
    ours.set_attn_implementation("rolltree")
    return ours, theirs


def words(draw: np.random.Generator, count: int) -> list[int]:
    return draw.integers(3, WORDS, count).tolist()


def prompt_with(pictures: Sequence[Picture], draw: np.random.Generator) -> list[int]:
    """Return text with ``pictures`` at random places."""
    ids = words(draw, int(draw.integers(1, 4)))
    for _ in pictures:
        ids += [IMAGE, *words(draw, int(draw.integers(1, 4)))]
    return expand(ids, pictures, IMAGE)


def random_tree(name: str, draw: np.random.Generator, pictures: int, leaves: int) -> TokenTree:
    """Return a tree of random depth: each response follows an earlier one up to a random point."""
    shown = [KINDS[name].picture(draw) for _ in range(pictures)]
    responses: list[list[int]] = []
    for i in range(leaves):
        before = responses[int(draw.integers(i))] if i and draw.random() < 0.8 else []
        responses.append(before[: int(draw.integers(len(before) + 1))] + words(draw, int(draw.integers(1, 6))))
    return TokenTree.from_sequences(
        prompt_with(shown, draw), responses, advantages=draw.normal(size=leaves), pictures=shown
    )


def conversation(name: str, draw: np.random.Generator) -> TokenTree:
    """Return a tree whose later prompts hold the earlier ones, their answers and a second picture, one of two."""
    first, *seconds = (KINDS[name].picture(draw) for _ in range(3))
    opening, answers = prompt_with([first], draw), [words(draw, 3), words(draw, 2)]
    turns = [opening + answers[0] + prompt_with([second], draw) for second in seconds]
    return TokenTree.from_sequences(
        [opening, opening, *turns, turns[0]],
        [*answers, words(draw, 4), words(draw, 3), words(draw, 5)],
        advantages=draw.normal(size=5),
        pictures=[first, *seconds],
    )


def plain_inputs(name: str, sequence: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the arguments of Transformers' own forward for a sequence, with its placeholders and the pixels."""
    kind, ids = KINDS[name], np.array(sequence)
    marked = ids >= VOCABULARY
    shown, at = [], 0
    while at < len(ids):
        if marked[at]:
            (picture,) = (p for p in pictures if p.ids[0] == ids[at])
            shown.append(picture)
            at += picture.rows - 1
        at += 1
    inputs: dict[str, Any] = {key: [p.inputs[key] for p in shown] for key in (shown[0].inputs if shown else ())}
    inputs = {key: torch.from_numpy(np.concatenate(values)) for key, values in inputs.items()}
    if kind.tiles:
        inputs = {key: values[None] for key, values in inputs.items()}
    if kind.types:
        inputs[kind.types] = torch.from_numpy(marked.astype(np.int64))[None]
    return inputs | {"input_ids": torch.from_numpy(np.where(marked, IMAGE, ids))[None]}


def plain_logprobs(model: Any, name: str, tree: TokenTree) -> list[Tensor]:
    """Return the log-probs of each leaf's response by Transformers' own forward of one sequence."""
    found = []
    for leaf in tree.flatten():
        inputs = plain_inputs(name, leaf.prompt + leaf.response, tree.pictures)
        logits = model(**inputs, use_cache=False).logits[0]
        begin = len(leaf.prompt)
        found.append(logits[begin - 1 : -1].log_softmax(-1).gather(1, torch.tensor(leaf.response)[:, None])[:, 0])
    return found
