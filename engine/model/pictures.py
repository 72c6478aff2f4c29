"""Pictures in a decoder's input: the vision tower runs outside of the decoder's call, its output replaces embeddings.

A decoder is called with ``inputs_embeds``, with as many rows of positions as it takes, and, for Qwen3-VL, with the
tower's intermediate features that are added after its first layers ("DeepStack", Meng et al. 2024, arXiv 2406.04334).
The tower never sees the arguments or the context of a tree, so its own attention is computed as Transformers does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.columns import Array
from ..data.media import FIRST_ID, Picture


class Family(NamedTuple):
    """The way in which models of one type take pictures."""

    grid: bool = False
    """Rotary positions have three rows, and a picture's lie on its grid (M-RoPE)."""
    both_ways: Literal["all", "sliding"] | None = None
    """The layers in which the rows of a picture attend to each other in both directions: all, or those with a sliding
    window."""
    tiles: bool = False
    """``get_image_features`` takes pictures as the tiles of one sample, ``[1, pictures, ...]``."""
    types: str | None = None
    """Name of the model's argument that marks the rows of pictures by 1."""
    mark: str = "{picture}"
    """The text that chat templates write for a picture."""
    framed: str | None = None
    """The text that the model's own processor puts in place of the mark: the placeholder between other tokens."""


_GRID = Family(grid=True, types="mm_token_type_ids")
FAMILIES = {
    "qwen2_5_vl": _GRID,
    "qwen3_vl": _GRID,
    "qwen3_5": _GRID,
    "gemma3": Family(both_ways="all", types="token_type_ids", mark="{begin}", framed="\n\n{begin}{picture}{end}\n\n"),
    "gemma4": Family(both_ways="sliding", types="mm_token_type_ids", framed="{begin}{picture}{end}"),
    "smolvlm": Family(tiles=True, framed="<fake_token_around_image><global-img>{picture}<fake_token_around_image>"),
}
"""The families whose pictures can be computed, by ``model_type``."""


class Features(NamedTuple):
    """The tower's output for the distinct pictures of a batch, ``P`` rows together."""

    embedding: Tensor  # [P, H], in place of the embeddings
    deeper: tuple[Tensor, ...]  # [P, H] each, added after the decoder's first layers


def family_of(model: nn.Module) -> Family:
    """Return the family of ``model``.

    Raises:
        ValueError: pictures of such models cannot be computed.
    """
    inner: Any = _inner(model)
    family = FAMILIES.get(inner.config.model_type)
    if family is None or not hasattr(inner, "get_image_features"):
        raise ValueError(
            f"{type(inner).__name__} takes no pictures, or not in a way that is supported; models that do are of the "
            f"types {', '.join(FAMILIES)}."
        )
    return family


def both_ways(model: nn.Module) -> Literal["all", "sliding"] | None:
    """Return the layers of ``model`` in which the rows of a picture attend to each other in both directions.

    Gemma 4 has models of both kinds, told apart by ``use_bidirectional_attention`` of its text configuration.
    """
    config: Any = _inner(model).config
    if config.model_type == "gemma4" and config.get_text_config().use_bidirectional_attention != "vision":
        return None
    return FAMILIES[config.model_type].both_ways if config.model_type in FAMILIES else None


def not_touching(model: nn.Module, touching: bool) -> None:
    """Check the pictures of a sequence, for a model in which their rows attend to each other in both directions.

    Raises:
        ValueError: two follow one another with no token between, which Transformers computes as one picture.
    """
    if touching:
        raise ValueError(
            f"Two pictures follow one another with no token between, and {type(_inner(model)).__name__} lets all their "
            "rows attend to each other; put the tokens between that begin and end a picture."
        )


def tower_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters outside of the decoder and its head, if the model is one that takes pictures."""
    inner: Any = _inner(model)
    if not hasattr(inner, "get_image_features") or inner.get_decoder() is inner:
        return
    text = {id(p) for part in (inner.get_decoder(), inner.get_output_embeddings()) for p in part.parameters()}
    yield from ((name, p) for name, p in model.named_parameters() if id(p) not in text)


def encode(model: nn.Module, inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> Features:
    """Run the vision tower on pictures.

    Args:
        inputs: arguments of the model's ``get_image_features``, picture after picture.
        sizes: rows that each picture takes.

    Raises:
        ValueError: the model takes no pictures, or the tower returns another number of rows.
    """
    arguments = (
        {name: values.unsqueeze(0) for name, values in inputs.items()} if family_of(model).tiles else dict(inputs)
    )
    out = _inner(model).get_image_features(**arguments, return_dict=True)
    levels = [_flat(level) for level in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]
    if any(len(level) != sum(sizes) for level in levels):
        raise ValueError(
            f"The vision tower returned {len(levels[0])} rows for {len(sizes)} pictures of {sum(sizes)} rows; make the "
            "pictures with the model's own processor. A picture of zeros alone counts as padding."
        )
    return Features(levels[0], tuple(levels[1:]))


def _flat(level: Tensor | Sequence[Tensor]) -> Tensor:  # [P, H]
    return level.flatten(0, -2) if isinstance(level, Tensor) else torch.cat(list(level))


def embedded(
    decoder: Any,
    ids: Tensor,  # [N] int64
    row: Tensor,  # [n] int64
    source: Tensor,  # [n] int64
    features: Features,
) -> dict[str, Any]:
    """Return the arguments of ``decoder`` that stand for ``input_ids`` where rows ``row`` are of pictures.

    Args:
        ids: of all rows; those of pictures lie above the vocabulary.
        source: the row of ``features`` that each row of a picture takes.
    """
    words = decoder.get_input_embeddings()(ids.masked_fill(ids >= FIRST_ID, 0))
    first = features.embedding.index_select(0, source).to(words.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": words.index_copy(0, row, first)[None]}
    if getattr(decoder, "hidden_size_per_layer_input", 0):  # of Gemma 4, in which a picture's rows count as padding
        padded = ids.masked_fill(ids >= FIRST_ID, decoder.config.pad_token_id)
        inputs["per_layer_inputs"] = decoder.get_per_layer_inputs(padded[None], None)
    if features.deeper:
        here = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, row, True)
        inputs["visual_pos_masks"] = here[None]
        inputs["deepstack_visual_embeds"] = [level.index_select(0, source) for level in features.deeper]
    return inputs


def rotary_input(depth: Tensor, rotary: Tensor) -> Tensor:  # [N], [3, N] -> [4, 1, N]
    """Return ``position_ids`` of a decoder with M-RoPE: the depth, which masks are made from, then the positions."""
    return torch.cat([depth[None], rotary])[:, None]


def own_inputs(model: nn.Module, ids: Array, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the arguments of the model's own forward for one sequence with pictures, with its placeholders.

    Args:
        ids: ``[S]`` token ids of the sequence.
        pictures: among which are those of the sequence.
    """
    family, inner = family_of(model), _inner(model)
    device = inner.get_output_embeddings().weight.device
    marked = ids >= FIRST_ID
    plain = torch.from_numpy(np.where(marked, placeholder(model), ids).astype(np.int64)).to(device)
    by_id = {picture.first_id: picture for picture in pictures}
    inside = [by_id[token] for token in ids[marked].tolist() if token in by_id]
    inputs: dict[str, Any] = {"input_ids": plain[None]}
    for name in inside[0].inputs if inside else ():
        values = torch.from_numpy(np.concatenate([picture.inputs[name] for picture in inside])).to(device)
        inputs[name] = values[None] if family.tiles else values
    if family.types is not None:
        inputs[family.types] = torch.from_numpy(marked.astype(np.int64)).to(device)[None]
    return inputs


def placeholder(model: nn.Module) -> int:
    """Return the token id that stands for a picture in the model's prompts."""
    return int(_inner(model).config.image_token_id)


def placeholders(model: nn.Module) -> tuple[int, ...]:
    """Return the token ids that stand for pictures, videos and sounds; none if the model takes no pictures.

    They are no text: a sequence that holds one without a picture is none that the model was made for.
    """
    return placeholders_of(_inner(model).config)


def placeholders_of(config: Any) -> tuple[int, ...]:
    """Return the same of a model's configuration."""
    if config.model_type not in FAMILIES:
        return ()
    named = (getattr(config, f"{name}_token_id", None) for name in ("image", "video", "audio"))
    vocabulary = config.get_text_config().vocab_size
    return tuple(dict.fromkeys(token for token in named if token is not None and 0 <= token < vocabulary))


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
