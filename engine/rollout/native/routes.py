"""The experts that computed each key of the KV cache, for a mixture of experts whose routes are recorded.

Routes are kept by slot, as keys are, so a prompt whose keys are found in the cache has the routes with which they were
computed. A branch collects those of its path where it stops sampling: then every key of the path is held. A token that
is computed again later, after preemption or a change of the weights, keeps the routes of the first time, under which
the tokens after it were sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..branch import Node

if TYPE_CHECKING:
    from ._host import KvTree

Array = npt.NDArray[Any]


class RouteCache:
    """Routes by slot of the KV cache."""

    def __init__(self, pages: int, page_size: int) -> None:
        self._size = pages, page_size
        self.pages: Tensor | None = None  # [P, page, layers, k] int16, made at the first step

    def write(self, slots: Tensor, routes: Tensor) -> None:  # [N] int64, [N, layers, k] int16
        """Store the routes of a step's rows."""
        if self.pages is None:
            self.pages = routes.new_full((*self._size, *routes.shape[1:]), -1)
        self.pages.flatten(0, 1).index_copy_(0, slots, routes)

    def collect(self, tree: KvTree, kv: int, node: Node) -> None:
        """Give the nodes on a path the routes that they lack.

        Args:
            kv: KV node that ends the path; all its keys are held.
            node: the last node of the path.
        """
        end = tree.end(kv)
        slots = None
        for n in node.path():
            recorded = n.start + len(n.routes)
            until = (
                min(n.start + len(n.records), end) if n.sealed else end
            )  # an open node's tokens are in the row table
            if recorded < until and self.pages is not None:
                slots = path_slots(tree, kv) if slots is None else slots
                at = torch.from_numpy(slots[recorded:until]).to(self.pages.device)
                new = self.pages.flatten(0, 1).index_select(0, at).cpu().numpy()
                n.routes = np.concatenate([n.routes, new]) if len(n.routes) else new

    def free(self) -> None:
        """Free the memory; no key may be held."""
        self.pages = None


def path_slots(tree: KvTree, kv: int) -> Array:  # [end] int64
    """Return the slots of all keys on the path to a KV node."""
    indptr, page_ids, offsets, lengths, *_ = tree.plan(np.array([kv]), np.array([1]))
    slots = []
    for i, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        at = offset + np.arange(length)
        pages = page_ids[indptr[i] : indptr[i + 1]].astype(np.int64)
        slots.append(pages[at // tree.page_size] * tree.page_size + at % tree.page_size)
    return np.concatenate(slots)
