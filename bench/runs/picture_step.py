"""A whole training step on responses to one prompt with a picture: as a tree, and flat by plain Transformers.

A flat batch holds the picture's rows once a response. Its vision tower runs on every copy, as in the batches of
trainers that repeat prompts, or once, with its output repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rolltree.engine import TokenTree, batch_loss, pack
from rolltree.engine.data.media import FIRST_ID, Picture
from rolltree.engine.model.pictures import tower_parameters
from rolltree.kernels import Objective

from ..runner import Bench, Calls, Case
from .tree_step import FLAT, on_policy, step_of

VOCABULARY = 1024
WORDS = VOCABULARY - 8  # the last ids stand for pictures
PATCH = 4  # pixels


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    picture: Picture
    tree: TokenTree


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the cases: a picture of ``rows`` rows, ``text`` tokens of prompt, and ``n`` responses."""
    for rows, text, response, n in [(64, 16, 16, 4)] if quick else [(256, 32, 32, 8), (256, 32, 128, 8)]:
        for trained in (False, True):
            yield Case(
                f"picture of {rows} + {text} + {n}x{response}, tower {'trained' if trained else 'frozen'} float32",
                partial(_inputs, device, rows, text, response, n, trained=trained),
            )


def _inputs(device: torch.device, rows: int, text: int, response: int, n: int, *, trained: bool) -> Inputs:
    model = _qwen3_vl(device)
    for _, parameter in tower_parameters(model):
        parameter.requires_grad_(trained)
    rng = np.random.default_rng(0)
    side = int(rows**0.5)
    patches = {"pixel_values": rng.normal(size=(4 * rows, 3 * PATCH**2)).astype(np.float32)}
    patches["image_grid_thw"] = np.array([[1, 2 * side, 2 * side]])
    picture = Picture.of(patches, rows, (1, side, side))
    prompt = [*picture.ids, *rng.integers(0, WORDS, text).tolist()]
    responses = rng.integers(0, WORDS, (n, response)).tolist()
    tree = TokenTree.from_sequences(prompt, responses, advantages=rng.normal(size=n).tolist(), pictures=[picture])
    return Inputs(model, picture, tree)


def _qwen3_vl(device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "out_hidden_size": 256,
            "num_position_embeddings": 1024,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )
    return Qwen3VLForConditionalGeneration(config).to(device).train()


def tree(x: Inputs) -> Calls:
    model = _own(x, "rolltree")
    batches = pack([x.tree], max_tokens=x.tree.num_tokens, device=model.device)
    objective, normalizer = Objective(), int(x.tree.loss_length.sum())
    return step_of(
        model,
        lambda: (batch_loss(model, b, objective, normalizer=normalizer, old_logprob=None).loss for b in batches),
    )


def flat(x: Inputs, *, once: bool = False) -> Calls:
    """Time a trainer without trees: all responses as one batch, each with the picture; the head on the responses only.

    Args:
        once: the tower runs on one copy of the picture, and its output is repeated.
    """
    model, sequences = _own(x, "sdpa"), x.tree.flatten()
    n, response = len(sequences), len(sequences[0].response)
    ids = torch.tensor([s.prompt + s.response for s in sequences], device=model.device)
    shown = ids >= FIRST_ID
    inputs = {
        "input_ids": ids.masked_fill(shown, model.config.image_token_id),
        "mm_token_type_ids": shown.long(),
        **{
            name: torch.from_numpy(np.concatenate([values] * n)).to(model.device)
            for name, values in x.picture.inputs.items()
        },
    }
    advantage = torch.tensor([s.advantage for s in sequences], device=model.device).repeat_interleave(response)
    target, normalizer = ids[:, -response:].flatten(), int(x.tree.loss_length.sum())
    if once:
        model.model.get_image_features = _encoded_once(model.model.get_image_features, n)

    def losses() -> Iterator[Tensor]:
        logits = model(**inputs, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
        logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="none")
        yield on_policy(logprob, advantage, normalizer)

    return step_of(model, losses)


def _encoded_once(encode: Any, n: int) -> Any:
    """Return a function in place of ``encode`` that runs it on the first of ``n`` equal pictures."""

    def first(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        out = encode(pixel_values[: len(pixel_values) // n], image_grid_thw[:1], **options)
        out.pooler_output = list(out.pooler_output) * n
        out.deepstack_features = [list(level) * n for level in out.deepstack_features]
        return out

    return first


def _own(x: Inputs, attention: str) -> Any:
    model: Any = copy.deepcopy(x.model)
    model.set_attn_implementation(attention)
    return model


BENCH = Bench(
    op="picture_step",
    directions=("step",),
    cases=cases,
    providers={
        "rolltree, tree": tree,
        FLAT: flat,
        "flat, transformers sdpa, pictures encoded once": partial(flat, once=True),
    },
    speedup_over=FLAT,
)
