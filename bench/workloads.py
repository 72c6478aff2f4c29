"""Trees of rollouts in shapes that occur in training, with random tokens, and pretrained models to run on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.engine import TokenTree
from rolltree.engine.data.segment import LeafStatus, Segment

VOCABULARY = 1024  # of the token ids; every model has a larger one


def _ids(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, n).astype(np.int32)


def pretrained(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of a directory as Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)


def vocabulary_of(path: Path) -> int:
    """Return the size of a pretrained model's vocabulary."""
    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)


def group(prompt: int, response: int, n: int) -> TokenTree:
    """Return ``n`` responses of ``response`` tokens to one prompt."""
    rng = np.random.default_rng(0)
    responses = list(rng.integers(0, VOCABULARY, (n, response)))
    return TokenTree.from_sequences(_ids(rng, prompt).tolist(), responses, advantages=rng.normal(size=n).tolist())


def segments(prompt: int, segment: int, depth: int, width: int) -> TokenTree:
    """Return a tree as TreePO makes it: every segment branches in two until there are ``width`` paths, ``depth``
    segments deep."""
    rng = np.random.default_rng(0)
    parents, parts = [-1], [Segment.prompt(_ids(rng, prompt))]
    front = [0]
    for _ in range(depth):
        each = 2 if 2 * len(front) <= width else 1
        front_after = []
        for node in front:
            for _ in range(each):
                parents.append(node)
                parts.append(Segment.sampled(_ids(rng, segment), np.full(segment, -1.0)))
                front_after.append(len(parents) - 1)
        front = front_after
    tree = TokenTree.from_nodes(parents, parts, front, [LeafStatus.STOP] * len(front))
    tree.advantage[:] = rng.normal(size=len(front))
    return tree


def agent(prompt: int, response: int, observation: int, turns: int, n: int) -> TokenTree:
    """Return ``n`` conversations; each turn is a sample whose prompt is everything before it."""
    rng = np.random.default_rng(0)
    prompts: list[Any] = []
    responses: list[Any] = []
    first = _ids(rng, prompt)
    for _ in range(n):
        said = first
        for _ in range(turns):
            answer = _ids(rng, response)
            prompts.append(said)
            responses.append(answer)
            said = np.concatenate([said, answer, _ids(rng, observation)])
    return TokenTree.from_sequences(prompts, responses, advantages=rng.normal(size=len(responses)).tolist())


def visible_pairs(tree: TokenTree) -> int:
    """Return the number of (row, key) pairs that attention computes for the tree."""
    return int(tree.position.sum(dtype=np.int64)) + tree.num_tokens


def flat_pairs(tree: TokenTree) -> int:
    """Return the number of (row, key) pairs of the leaves' paths, each computed separately."""
    length = tree.path_length.astype(np.int64)
    return int((length * (length + 1) // 2).sum())


def by_shape(tree: TokenTree, max_tokens: int) -> Iterator[list[int]]:
    """Yield batches without padding: leaves of equal prompt and response length, ``max_tokens`` together at most."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for leaf, shape in enumerate(zip(tree.leaf_prompt.tolist(), tree.response_length.tolist(), strict=True)):
        shapes.setdefault(shape, []).append(leaf)
    for (prompt, response), leaves in shapes.items():
        most = max(1, max_tokens // (prompt + response))
        yield from (leaves[i : i + most] for i in range(0, len(leaves), most))
