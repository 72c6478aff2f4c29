"""Ends of responses that are texts: found in the decoded tail of what each branch sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from .branch import Branch
from .rows import RowTable

Array = npt.NDArray[Any]


class StopStrings:
    """Which branches' responses have just come to hold one of ``stop``."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        # A token is at least a byte of the text; the tail may begin within a character, which then does not decode.
        self._tail = max(len(text.encode()) for text in stop) + 4

    def found(self, rows: RowTable, slots: Array) -> Array:  # [E] int64 -> [E] bool
        tails = []
        for slot in slots.tolist():
            branch = rows.branch[slot]
            assert branch is not None
            tails.append(self._last_tokens(rows, slot, branch))
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return np.array([any(stop in text for stop in self._stop) for text in texts], np.bool_)

    def _last_tokens(self, rows: RowTable, slot: int, branch: Branch) -> Array:
        """The last response tokens; those before the branch's node began lie in its ancestors."""
        parts = [rows.tokens[slot, : rows.fill[slot]]]
        wanted = min(self._tail, int(rows.length[slot])) - len(parts[0])
        node = branch.node.parent
        while wanted > 0 and node is not None:
            parts.append(node.tokens[-wanted:])
            wanted -= len(node.tokens)
            node = node.parent
        return np.concatenate(parts[::-1])[-self._tail :]
