"""Entry of the op that ends a decoding step, so that the next one can begin without the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .. import dispatch
from . import reference
from .reference import Turns

_BACKENDS: Mapping[str, Callable[..., None]] = {
    "triton": dispatch.imported(__package__, "triton", "advance"),
    "cpu": reference.advance,
    "reference": reference.advance,
}


def advance(turns: Turns, token: Tensor, logprob: Tensor, raw_logprob: Tensor, entropy: Tensor) -> None:
    """Store what a step has drawn, and make its rows those of the next step, in place; waits for nothing.

    Row n gets ``token[n]`` as its input and ``next_slots[turn, n]`` as its slot, ``step`` and the numbers at ``rising``
    grow by one, and so does ``turn``. A row without a token (-1) goes on with token 0. The arguments are not checked.

    Args:
        turns: the state of the rows; ``turn`` below W.
        token: [N] int64, contiguous.
        logprob, raw_logprob, entropy: [N] float32, contiguous.
    """
    dispatch.choose("advance", _BACKENDS, token.device)(turns, token, logprob, raw_logprob, entropy)
