"""Tokens and texts that end responses and segments; tokens are looked up for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...chat.ends import end_token_ids
from ...data.segment import Origin
from ..branch import Branch, Request
from ..completions import tail_of, text_of
from .rows import RowTable

Array = npt.NDArray[Any]
GO_ON, END_SEGMENT, END_RESPONSE = 0, 1, 2


class Stops:
    """Decides which samples end a response (parameters and model) or a segment (the request's program)."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.eos = end_token_ids(tokenizer, model.generation_config, model.config.get_text_config())
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self._number_of: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        self._tables = np.zeros((16, self._vocabulary), np.int8)

    def table(self, request: Request, rows: RowTable) -> int:
        """Return the number of the request's table of tokens. Tables that no row of ``rows`` uses are recycled."""
        ends = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else self.eos)
        key = frozenset(ends), frozenset(request.program.segment_stop_token_ids)
        if key not in self._number_of:
            row = np.zeros((1, self._vocabulary), np.int8)
            row[0, self._inside(key[0])] = END_RESPONSE
            row[0, self._inside(key[1])] = END_SEGMENT  # takes precedence: a program may continue after end-of-sequence
            self._number_of[key] = self._free_table(rows)
            self._tables[self._number_of[key]] = row
        return self._number_of[key]

    def _free_table(self, rows: RowTable) -> int:
        if len(self._number_of) == len(self._tables):
            used = {int(rows.stop_table[slot]) for slot, branch in enumerate(rows.branch) if branch is not None}
            self._number_of = {key: number for key, number in self._number_of.items() if number in used}
        if len(self._number_of) == len(self._tables):
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
        return min(set(range(len(self._tables))) - set(self._number_of.values()))

    def tokens(self, tables: Array, token: Array) -> Array:  # [E] int64, [E] int64 -> [E] int8
        """Return `GO_ON`, `END_SEGMENT` or `END_RESPONSE` for each token by its row's table."""
        return self._tables[tables, token]

    def text(self, rows: RowTable, branch: Branch, new: Array) -> tuple[int, str] | None:
        """Return what the tokens ``new`` [n] of a response end by completing a stop text, and that text; else None."""
        slot, request = branch.slot, branch.request
        # a text that ended an earlier segment stays in the response and does not end another segment
        hit = self._found(rows, slot, request.program.segment_stop, int(rows.segment_tokens[slot]), new)
        if hit is not None:
            return END_SEGMENT, hit
        hit = self._found(rows, slot, request.params.stop, int(rows.length[slot]), new)
        return None if hit is None else (END_RESPONSE, hit)

    def _found(self, rows: RowTable, slot: int, stops: Sequence[str], before: int, new: Array) -> str | None:
        if not stops or self._tokenizer is None:
            return None
        longest = tail_of(stops)
        tail = np.concatenate([_last_sampled(rows, slot, min(before, max(longest - len(new), 0))), new[-longest:]])
        text = text_of(self._tokenizer, tail)
        return next((stop for stop in stops if stop in text), None)

    def _inside(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if 0 <= token < self._vocabulary]


def _branch(rows: RowTable, slot: int) -> Branch:
    branch = rows.branch[slot]
    assert branch is not None
    return branch


def _last_sampled(rows: RowTable, slot: int, most: int) -> Array:
    """Return up to ``most`` last tokens of the response, no further back than the last token that was not sampled."""
    parts = [rows.records["token"][slot, : rows.fill[slot]][-most:] if most else np.zeros(0, np.int32)]
    node = _branch(rows, slot).node.parent
    while (missing := most - sum(map(len, parts))) > 0 and node is not None and node.origin is Origin.SAMPLED:
        parts.append(node.records["token"][-missing:])
        node = node.parent
    return np.concatenate(parts[::-1])
