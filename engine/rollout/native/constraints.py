"""Biases and grammars of requests, added to the logits of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..branch import Branch
from ..sampling_params import SamplingParams
from .rows import RowTable

Array = npt.NDArray[Any]
REMEMBERED = 64  # parameters whose biases are kept on the device


class Constraints:
    """Applies the constraints of requests, and keeps the biases of those seen last.

    Args:
        vocabulary: number of tokens.
        device: of the logits.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self._device = vocabulary, device
        self._biases: dict[int, tuple[SamplingParams, Tensor]] = {}

    def apply(
        self,
        logits: Tensor,  # [E, V] fp32
        rows: RowTable,
        slots: Array,  # [E] int64
        offset: Array,  # [E] int64
        token: Array,  # [E] int64, the token before each sample
        constrained: Array,  # [<= E] int64
        why: Array,  # [E] object
    ) -> None:
        """Add biases to the rows ``constrained`` of the logits, in place; rows with the same parameters together. If
        that fails, the row's logits become NaN and ``why`` gets the reason."""
        alike: dict[int, tuple[SamplingParams, list[int]]] = {}
        mask = np.zeros(0, np.float32)  # mask of the previous row
        for i in constrained.tolist():
            branch = rows.branch[slots[i]]
            assert branch is not None
            params = branch.request.params
            alike.setdefault(id(params), (params, []))[1].append(i)
            if params.prefix_allowed_tokens_fn is None:
                continue
            if offset[i] and not (len(mask) and mask[token[i]] == 0):
                mask = mask[:0]  # the grammar forbids the draft before this sample, which is therefore never used
                continue
            try:
                draft = token[i - offset[i] + 1 : i + 1] if offset[i] else token[:0]
                mask = self._grammar_mask(branch, rows, int(slots[i]), draft)
                logits[i] += self._to_device(mask)
            except (Exception, SystemExit) as error:  # a grammar of the user's: only the branch fails
                why[i], mask = f"prefix_allowed_tokens_fn raised {type(error).__name__}: {error}", mask[:0]
                logits[i] = torch.nan
        for params, rows_alike in alike.values():
            try:
                logits[self._to_device(np.array(rows_alike))] += self._bias(params)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # they were changed after the check
                for i in rows_alike:
                    why[i] = f"its biases: {type(error).__name__}: {error}"
                    logits[i] = torch.nan

    def _bias(self, params: SamplingParams) -> Tensor:  # [V] float32
        if id(params) not in self._biases:
            if len(self._biases) >= REMEMBERED:
                self._biases.clear()
            self._biases[id(params)] = params, self._to_device(self._fixed_bias(params))
        return self._biases[id(params)][1]

    def _grammar_mask(self, branch: Branch, rows: RowTable, slot: int, draft: Array) -> Array:  # [V] float32
        allowed_after = branch.request.params.prefix_allowed_tokens_fn
        assert allowed_after is not None
        above = branch.node if branch.node.sealed else branch.node.parent
        path = above.column("token") if above else np.zeros(0, np.int32)
        fill = 0 if branch.node.sealed else int(rows.fill[slot])
        sampled = rows.records["token"][slot, :fill]
        response = np.concatenate([path, sampled, draft.astype(np.int32)])[len(branch.request.prompt) :]
        mask = np.full(self.vocabulary, -np.inf, np.float32)
        allowed = np.asarray(allowed_after(response), np.int64)
        if len(allowed) and (allowed.min() < 0 or allowed.max() >= self.vocabulary):
            raise ValueError(f"it names tokens outside the model's vocabulary of {self.vocabulary}")
        mask[allowed] = 0
        return mask

    def _fixed_bias(self, params: SamplingParams) -> Array:  # [V] float32
        bias = np.zeros(self.vocabulary, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0
        bias[list(params.logit_bias)] += list(params.logit_bias.values())
        return bias

    def _to_device(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)
