"""Checks once that a model computes packed trees as it computes flat sequences.

`tree_error` compares on real rollouts, before training. `check_model` compares on random tokens, at the first use of a
model, with the model's own forward and logits. A model that passed is not checked again, whatever its weights become in
training; another model is, also one of the same class, as it has other weights and maybe hooks.

A mixture of experts is compared under equal routes: the second forward replays the experts that the first one chose.
Where experts are nearly equal, each forward chooses others by rounding alone, and log-probs differ that are right.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from ..batches.batch import TreeBatch
from ..batches.pack import pack
from ..batches.rows import distinct_rows
from ..data.tree import TokenTree
from . import attention
from .decoder import unchecked_logprob
from .invariant.install import is_invariant
from .pictures import own_inputs
from .routes import Record, Replay, asking

Array = npt.NDArray[Any]
MOST_TOKENS = 4096  # in the flat sample
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
REDUCED = 0.1  # for bf16 and fp16, whose rounding changes log-probs by some hundredths


@torch.no_grad()
def tree_error(model: PreTrainedModel, trees: Sequence[TokenTree]) -> float | None:
    """Return the mean absolute difference (nats) between log-probs computed as a tree and as a flat batch.

    The sample is a few leaves of the smallest tree with shared tokens, so the check costs about two small forwards.

    Returns:
        None if no tree has shared tokens, or only trees with paths too long for a cheap check.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``.
    """
    sample = _sample(trees)
    if sample is None:
        return None
    with _evaluating(model):
        return _tree_error(model, sample)


def _tree_error(model: PreTrainedModel, sample: TokenTree) -> float | None:
    (packed,) = pack([sample], max_tokens=sample.num_tokens, device=model.device)
    leaves, routes = _logprobs_and_routes(model, packed)
    (shared,) = leaves
    most = int(sample.path_length.max())
    total, count = 0.0, 0
    if sample.pictures:  # positions and features by the model's own forward, not by ours again
        by_model = own_logprobs(model, sample, routes)
        differences = torch.cat([(a - b).abs() for a, b in zip(by_model, shared, strict=True)])
        return float(differences.mean()) if len(differences) else None
    for batch in pack([sample], max_tokens=max(most, MOST_TOKENS), device=model.device, flat=True):
        batch = _as_computed(model, batch)
        order = [int(leaf) for (leaf,) in batch.leaf_index]
        with _replayed(model, routes, order, padded=batch.padded is not None):
            alone = batch.to_leaves(unchecked_logprob(model, batch).logprob)
        for leaf, (values,) in zip(batch.leaf_index, alone, strict=True):
            difference = (values - shared[int(leaf[0])]).abs()
            total, count = total + float(difference.sum()), count + len(values)
    return total / count if count else None


def trees_fit(error: float | None, dtype: torch.dtype) -> bool:
    """Return True if an error of :func:`tree_error` can be explained by rounding; NaN cannot."""
    return error is None or (math.isfinite(error) and error <= TOLERANCE.get(dtype, REDUCED))


def _sample(trees: Sequence[TokenTree]) -> TokenTree | None:
    for tree in sorted(trees, key=lambda t: t.num_tokens):
        order = np.argsort(tree.path_length, kind="stable")
        few = order[np.cumsum(tree.path_length[order]) <= MOST_TOKENS]
        if len(few) >= 2 and tree.logical_tokens > tree.num_tokens:
            kept = np.ones(tree.num_leaves, bool)
            kept[few] = False
            return tree.without_leaves(kept)
    return None


_passed: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, torch.dtype]]] = weakref.WeakKeyDictionary()
"""The attention and precision with which a model passed."""
_skipped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def skip_check(model: nn.Module) -> None:
    """Let no later call check ``model`` (:func:`check_model`)."""
    _skipped.add(model)


def check_model(model: PreTrainedModel) -> None:
    """Check that log-probs of a small random tree are those of its sequences under the model's own forward.

    Costs two small forwards at the first call with a model, and a look-up once it has passed, even if its weights have
    changed. With another attention than "rolltree" only the fused head is compared. A model on the meta device or
    sharded by FSDP2 is not checked.

    Raises:
        ValueError: they are not; :func:`skip_check` lets the model pass nevertheless.
    """
    implementation, precision = model.config._attn_implementation, _precision(model)
    passed = _passed.setdefault(model, set())
    if (implementation, precision) in passed or model in _skipped:
        return
    if any(p.is_meta or isinstance(p, DTensor) for p in model.parameters()):
        return
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    where = "on packed trees" if implementation == attention.NAME else "by the fused head"
    with _evaluating(model):
        try:
            error = _own_error(model, implementation == attention.NAME)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as why:  # of code not made for it
            said = " ".join(str(why).split())[:300].rstrip(".") or type(why).__name__
            raise ValueError(
                f"{type(inner).__name__} cannot be computed {where} ({said}); train it on plain sequences by its "
                "own forward."
            ) from why
    if not trees_fit(error, precision):
        raise ValueError(
            f"{type(inner).__name__} gives other log-probs {where} than under its own forward (mean difference "
            f"{error:.3g}); train it on plain sequences by its own forward, or call skip_check(model)."
        )
    passed.add((implementation, precision))


@torch.no_grad()
def _own_error(model: PreTrainedModel, trees: bool) -> float:
    usual = usual_tokens(model.config)
    draw = np.random.default_rng(0)
    trunk, *branches = (usual[draw.integers(len(usual), size=n)].tolist() for n in (4, 9, 7, 5, 11, 3))
    first, second, third, fourth, fifth = branches
    tree = TokenTree.from_sequences(
        trunk, [first + second, first + third, fourth, fourth[:5] + fifth, fourth[:5] + second + third]
    )
    (batch,) = pack([tree], max_tokens=4096, device=model.device, flat=not trees)
    leaves, routes = _logprobs_and_routes(model, batch)
    got = {
        int(i): v
        for which, of_tree in zip(batch.leaf_index, leaves, strict=True)
        for i, v in zip(which, of_tree, strict=True)
    }
    by_model = own_logprobs(model, tree, routes)
    return float(torch.cat([(by_model[i] - values).abs() for i, values in got.items()]).mean())


def _logprobs_and_routes(
    model: PreTrainedModel, batch: TreeBatch
) -> tuple[list[list[Tensor]], dict[int, Tensor]]:  # [n] each, [S, layers, k] each
    """Return the log-probs of each leaf's response, and the routes of each leaf's path, by the leaf's index; none for a
    model whose routers cannot be asked."""
    batch, record = _as_computed(model, batch), Record()
    with asking(model, record):
        logprobs = batch.to_leaves(unchecked_logprob(model, batch).logprob)
    routes: dict[int, Tensor] = {}
    if not record.empty:
        rows = record.routes()[batch.place]
        for tree, leaves in zip(batch.trees, batch.leaf_index, strict=True):
            row = distinct_rows(tree).of_token
            routes |= {int(leaf): rows[row[tree.path_rows(i)]] for i, leaf in enumerate(leaves)}
            rows = rows[int(row.max()) + 1 :]
    return logprobs, routes


def _as_computed(model: PreTrainedModel, batch: TreeBatch) -> TreeBatch:
    """Return ``batch`` with its rows at the places where the model computes them (`decode`)."""
    if batch.padded is None or not is_invariant(model):
        return batch
    return replace(batch, padded=None, place=torch.arange(batch.num_tokens, device=batch.place.device))


def _replayed(
    model: nn.Module, routes: Mapping[int, Tensor], leaves: Sequence[int], *, padded: bool
) -> AbstractContextManager[None]:
    """Replay the routes of ``leaves`` within the block, which computes them in this order, ``padded`` or in one row."""
    if not routes:
        return nullcontext()
    rows = [routes[leaf] for leaf in leaves]
    return asking(model, Replay(pad_sequence(rows, True, -1).flatten(0, 1) if padded else torch.cat(rows)))


def usual_tokens(config: PreTrainedConfig) -> Array:  # [n] int64
    """Return the tokens of a model's vocabulary without those that its configuration gives a meaning of their own."""
    special = {v for n, v in vars(config).items() if n.endswith(("token_id", "token_index")) and isinstance(v, int)}
    return np.setdiff1d(np.arange(config.get_text_config().vocab_size), list(special))


@torch.no_grad()
def sampled_error(model: PreTrainedModel, trees: Sequence[TokenTree]) -> float:
    """Return the mean absolute difference (nats) between the log-probs that a sampler recorded, at temperature 1, and
    those that ``model`` computes for the same tokens on plain sequences, with the routes that it recorded."""
    routed = any("routes" in tree.columns for tree in trees)
    longest = max(int(tree.path_length.max()) for tree in trees)
    recorded, computed = [], []
    with _evaluating(model):
        for batch in pack(
            trees, max_tokens=max(longest, MOST_TOKENS), device=model.device, flat=True, replay_routes=routed
        ):
            values = batch.to_leaves(unchecked_logprob(model, batch).logprob)
            for part, leaves in zip(batch.trees, values, strict=True):
                for leaf, logprob in enumerate(leaves):
                    rows = part.response_rows(leaf)
                    sampled = part.loss_mask[rows]
                    recorded.append(part.behaviour_logprob[rows][sampled])
                    computed.append(logprob.float().cpu().numpy()[sampled])
    return float(np.abs(np.concatenate(recorded) - np.concatenate(computed)).mean())


def own_logprobs(
    model: PreTrainedModel,
    tree: TokenTree,
    routes: Mapping[int, Tensor] = MappingProxyType({}),  # [S, layers, k] each
) -> list[Tensor]:  # [n] each
    """Return the log-probs of each leaf's response under the model's own forward on padded sequences.

    With pictures it runs once a leaf, since some models take pictures by sample.

    Args:
        routes: the experts to replay, by leaf; without any the model chooses.
    """
    if tree.pictures:
        logprobs = []
        for leaf in range(tree.num_leaves):
            with _replayed(model, routes, [leaf], padded=True):
                logprobs.append(_own_logprobs_with_pictures(model, tree, leaf))
        return logprobs
    leaves = list(tree.flatten())
    paths = [leaf.prompt + leaf.response for leaf in leaves]
    ids, mask = torch.zeros(2, len(paths), max(map(len, paths)), dtype=torch.long)
    for i, path in enumerate(paths):
        ids[i, : len(path)], mask[i, : len(path)] = torch.tensor(path), 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    with _replayed(model, routes, range(tree.num_leaves), padded=True):
        logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    logprob = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    spans = [slice(len(leaf.prompt) - 1, len(path) - 1) for leaf, path in zip(leaves, paths, strict=True)]
    return [values[span] for values, span in zip(logprob, spans, strict=True)]


def _own_logprobs_with_pictures(model: PreTrainedModel, tree: TokenTree, leaf: int) -> Tensor:  # [n]
    path = tree.token_id[tree.path_rows(leaf)]
    inputs = own_inputs(model, path, tree.pictures)
    logits: Tensor = model(**inputs, use_cache=False).logits[0].float()
    targets = inputs["input_ids"][0, int(tree.leaf_prompt[leaf]) :]
    return logits[int(tree.leaf_prompt[leaf]) - 1 : -1].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _precision(model: PreTrainedModel) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules of the model into evaluation within the block."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
