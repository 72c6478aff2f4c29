"""Log-probs, losses and gradients of the data of a request: equal prefixes are computed once.

The model reads rows, one for each distinct prefix of the inputs (`TokenTree.forest`, `pack`). A target is a position of
one datum, so its loss never mixes with another datum's; it only shares the row that predicts it. Results and gradients
are those of each datum alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import Term, linear_logprob, linear_terms_loss, policy_loss

from ..batches.batch import TreeBatch
from ..batches.device import to_device
from ..batches.pack import pack
from ..data.media import FIRST_ID
from ..data.tree import TokenTree
from ..model.decoder import decode
from ..model.head import Head, head
from .faults import FaultError
from .losses import AnyTerm, Loss
from .wire import Array, Datum

MOST_ROWS = 8192
"""Rows of a micro-batch; one datum may be longer."""
MOST_TARGETS = 1 << 20
"""Targets of a request: positions, or position and id where a position has several ids."""


@dataclass(frozen=True)
class Share:
    """A micro-batch: some data of a request, with ``M`` targets in their order."""

    batch: TreeBatch
    data: list[int]  # indices in the request
    row: Tensor  # [M] int64, the row that predicts the target
    target: Tensor  # [M] int64


@dataclass(frozen=True)
class Scored:
    """The result of a micro-batch."""

    loss: float
    logprobs: list[Array]  # of each datum of the share, in the shape of its targets


def shares(data: Sequence[Datum], most_rows: int = MOST_ROWS) -> list[Share]:
    """Divide data into micro-batches of trees.

    Raises:
        FaultError: there are more than `MOST_TARGETS` targets, or two images have equal ids by chance.
    """
    count = sum(datum.target.size for datum in data)
    if count > MOST_TARGETS:
        raise FaultError(f"The request has {count} targets, more than {MOST_TARGETS}; send fewer data at once.")
    begins = [int((d.tokens >= FIRST_ID).nonzero()[0][-1]) + 1 if d.pictures else 1 for d in data]
    try:  # a tree's loss, which is not used here, has no rows of pictures
        trees, members = TokenTree.forest(
            [d.tokens[:begin].tolist() for d, begin in zip(data, begins, strict=True)],
            [d.tokens[begin:].tolist() for d, begin in zip(data, begins, strict=True)],
            pictures=[picture for d in data for picture in d.pictures],
        )
    except ValueError as wrong:
        raise FaultError(str(wrong)) from None
    longest = max(len(datum.tokens) for datum in data)
    return [_share(batch, members, data) for batch in pack(trees, max_tokens=max(most_rows, longest))]


def _share(batch: TreeBatch, members: Sequence[Array], data: Sequence[Datum]) -> Share:
    which: list[int] = []
    rows: list[Array] = []
    first = 0  # row of the tree's first token: no siblings of it begin alike, so every token is a row
    for tree, index, leaves in zip(batch.trees, batch.tree_index, batch.leaf_index, strict=True):
        for leaf, original in enumerate(leaves):
            which.append(int(members[index][original]))
            path = first + tree.path_rows(leaf)
            target = data[which[-1]].target
            rows.append(path if target.ndim == 1 else np.repeat(path, target.shape[1]))
        first += tree.num_tokens
    targets = [data[i].target.reshape(-1) for i in which]
    return Share(batch, which, *(torch.from_numpy(np.concatenate(parts).astype(np.int64)) for parts in (rows, targets)))


def score(model: PreTrainedModel, share: Share, loss: Loss, data: Sequence[Datum]) -> Scored:
    """Return loss and log-probs of a micro-batch without gradients.

    Raises:
        FaultError: the loss is not finite, or a custom one fails.
    """
    of_share, device = [data[i] for i in share.data], model.device
    term: AnyTerm = to_device(loss.term(of_share), device)
    with torch.no_grad():
        hidden = decode(model, share.batch.to(device)).hidden
        logprob = _logprob(hidden, head(model), share.row.to(device), share.target.to(device))
        if isinstance(term, Term):
            value = policy_loss(logprob, term.fields, term.objective, normalizer=term.normalizer).loss
        else:
            value = term.loss(logprob).loss
    return Scored(_finite(value), _of_data(logprob, of_share))


def differentiate(
    model: PreTrainedModel, share: Share, loss: Loss, data: Sequence[Datum], parameters: Sequence[Tensor]
) -> tuple[Scored, list[Tensor]]:
    """Return loss and log-probs of a micro-batch, and the gradient of each parameter.

    Targets without a gradient never reach the products of the backward; they are scored for the result alone.

    Raises:
        FaultError: the loss is not finite, or a custom one fails.
    """
    of_share, device = [data[i] for i in share.data], model.device
    term: AnyTerm = to_device(loss.term(of_share), device)
    row, target = share.row.to(device), share.target.to(device)
    hidden, lm_head = decode(model, share.batch.to(device)).hidden, head(model)
    out = linear_terms_loss(hidden, lm_head.weight, target, [term], row=row, **lm_head.options())
    value = _finite(out.loss)
    assert out.logprob is not None
    logprob = out.logprob
    rest = torch.isnan(logprob).nonzero()[:, 0]  # those that the term does not need
    if len(rest):
        with torch.no_grad():
            logprob = logprob.index_copy(0, rest, _logprob(hidden.detach(), lm_head, row[rest], target[rest]))
    gradients = [torch.zeros_like(p) for p in parameters]
    if out.loss.requires_grad:
        computed = torch.autograd.grad(out.loss, parameters, allow_unused=True)
        gradients = [zero if g is None else g for zero, g in zip(gradients, computed, strict=True)]
    return Scored(value, _of_data(logprob, of_share)), gradients


def _logprob(hidden: Tensor, lm_head: Head, row: Tensor, target: Tensor) -> Tensor:  # [T, H], [M], [M] -> [M]
    rows, index = row.unique(return_inverse=True)
    return linear_logprob(hidden.index_select(0, rows), lm_head.weight, target, row=index, **lm_head.options()).logprob


def _finite(loss: Tensor) -> float:
    value = float(loss.detach())
    if not np.isfinite(value):
        raise FaultError("The loss is not finite, so the request has no gradient; look at its log-probs and weights.")
    return value


def _of_data(logprob: Tensor, data: Sequence[Datum]) -> list[Array]:
    values = logprob.detach().float().cpu().numpy()
    ends = np.cumsum([datum.target.size for datum in data])
    return [part.reshape(datum.target.shape) for part, datum in zip(np.split(values, ends[:-1]), data, strict=True)]
