"""The definition of the end of a step, in plain PyTorch; the host does not read the number of the step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turns(NamedTuple):
    """The tensors that change between the W steps of a window of N rows; all on one device and contiguous."""

    vector: Tensor  # [L] int32, the numbers of a step
    rising: Tensor  # [M] int32, places in ``vector`` of numbers that grow by one each step
    turn: Tensor  # [1] int32, number of the present step
    input_ids: Tensor  # [N] int32
    slots: Tensor  # [N] int32, of the rows' keys
    next_slots: Tensor  # [W, N] int32, ``slots`` of the step after each
    step: Tensor  # [N] int64, as in `sample_tokens`
    numbers: Tensor  # [W, 4, N] float32: the token's bits, logprob, raw_logprob and entropy of each step


def advance(turns: Turns, token: Tensor, logprob: Tensor, raw_logprob: Tensor, entropy: Tensor) -> None:
    turn, ids = turns.turn.long(), token.int()
    drawn = torch.stack((ids.view(torch.float32), logprob, raw_logprob, entropy))
    turns.numbers.index_copy_(0, turn, drawn[None])
    turns.input_ids.copy_(ids.clamp(min=0))
    turns.slots.copy_(turns.next_slots.index_select(0, turn)[0])
    turns.step.add_(1)
    rising = turns.rising.long()
    turns.vector.index_put_((rising,), turns.vector[rising] + 1)
    turns.turn.add_(1)
