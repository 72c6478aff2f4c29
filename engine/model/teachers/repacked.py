"""A model's values of some trees of a batch, or of these trees with other prompts, in a batch of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...batches.batch import TreeBatch
from ...batches.pack import pack
from ...data.tree import TokenTree


def of_trees(batch: TreeBatch, trees: Sequence[TokenTree], compute: Callable[[TreeBatch], Tensor]) -> list[Tensor]:
    """Return the values ``[targets, ...]`` of each of ``trees``: trees of ``batch``, perhaps with other prompts.

    Unless ``batch`` is in pieces ``compute`` is called once, for no tree too: ranks that share a model wait for each
    other in every call.

    Args:
        compute: returns values ``[M, ...]`` of a batch, which is in the host's memory, and in pieces of its size where
            ``batch`` is in pieces.
    """
    if not trees:
        compute(pack([TokenTree.from_sequences([0], [[0]])], max_tokens=2)[0])
        return []
    counts = [tree.num_tokens - tree.prompt_length for tree in trees]
    longest = max(int(tree.path_length.max()) for tree in trees)
    most = max((p.end - p.begin for p in batch.pieces), default=longest * sum(tree.num_leaves for tree in trees))
    parts: dict[int, Tensor] = {}
    for other in pack(trees, max_tokens=most, in_pieces=bool(batch.pieces), flat=batch.padded is not None):
        values = compute(other)
        parts |= zip(other.tree_index, values.split([counts[i] for i in other.tree_index]), strict=True)
    return [parts[i] for i in range(len(trees))]
