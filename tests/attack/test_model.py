"""The attack on a model's log-probs and loss over trees: what is wrong is refused by name, whatever the cut."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from rolltree.engine import TokenTree, TreeBatch, batch_logprob, batch_loss, pack
from rolltree.kernels import Objective, linear_logprob, logprob_from_logits

from ..support.arguments import refusal
from ..support.serving import model

NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, -1.0, "1", True, None, 1j, [1.0]]
OBJECTS: list[Any] = [None, 3, "x", {}, object()]


def batch(**options: Any) -> TreeBatch:
    tree = TokenTree.from_sequences(
        [1, 2, 3], [[4, 5, 6], [4, 7]], advantages=[1.0, -0.5], behaviour_logprobs=[[-1.0] * 3, [-1.0] * 2]
    )
    (packed,) = pack([tree], **{"max_tokens": 20} | options)
    return packed


WHOLE, PIECES = batch(), batch(max_tokens=4, in_pieces=True)
M = len(WHOLE.target)
RIGHT = torch.full((M,), -0.5)
OF_TARGETS: list[Any] = [
    RIGHT[:-1], RIGHT[:, None], RIGHT.tolist(), RIGHT.long(), RIGHT > 0, RIGHT.to("meta"), RIGHT.to(torch.complex64), 3,
    RIGHT.clone().requires_grad_(),
]  # fmt: skip
LOSS: dict[str, list[Any]] = {
    "model": OBJECTS, "batch": [*OBJECTS, WHOLE.trees[0]], "objective": [*OBJECTS, "dapo"], "normalizer": NUMBERS,
    "temperature": [*NUMBERS, 0.0, 0, torch.ones(2)], "old_logprob": [*OF_TARGETS, "unknown", {}],
    "ref_logprob": OF_TARGETS, "router_share": [math.nan, math.inf, "1", None, 1j],
}  # fmt: skip
LOGPROB: dict[str, list[Any]] = {
    "model": OBJECTS, "batch": [*OBJECTS, WHOLE.trees[0]], "temperature": [*NUMBERS, 0.0, 0, torch.ones(2)],
    "want": ["entropy", ["entropies"], 3, None, [3], [["entropy"]]],
}  # fmt: skip


@pytest.fixture(scope="module")
def net() -> Any:
    made = model()
    made.set_attn_implementation("rolltree")
    return made


@pytest.mark.parametrize("name", LOSS)
def test_a_wrong_loss_is_refused(net: Any, name: str) -> None:
    objective = Objective.preset("dapo", kl_coef=0.1)
    right = {"model": net, "batch": WHOLE, "objective": objective, "normalizer": 5.0, "ref_logprob": RIGHT}
    assert batch_loss(**right).loss.isfinite()
    for bad in LOSS[name]:
        message = refusal(lambda: batch_loss(**right | {name: bad}))  # noqa: B023
        assert name in message, message


@pytest.mark.parametrize("name", LOGPROB)
@pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "in pieces"])
def test_wrong_log_probs_are_refused(net: Any, name: str, cut: TreeBatch) -> None:
    assert batch_logprob(net, cut).logprob.isfinite().all()
    for bad in LOGPROB[name]:
        message = refusal(lambda: batch_logprob(**{"model": net, "batch": cut, name: bad}))  # noqa: B023
        assert name in message, message


def test_wrong_wants_of_ops_are_refused() -> None:
    x, target = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    for want in LOGPROB["want"]:
        for call in (linear_logprob, partial(logprob_from_logits, target=target)):
            given = {"weight": x, "target": target} if call is linear_logprob else {}
            assert "want" in refusal(lambda: call(x, want=want, **given))  # noqa: B023
