"""Checkpointed layers keep their attention, have the gradients of layers that keep everything, and are as many as
memory asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rolltree.engine import TokenTree, batch_loss, pack, skip_check
from rolltree.engine.model import routes
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.train import checkpointing
from rolltree.engine.train.checkpointing import (
    checkpoint_layers,
    checkpointed_share,
    checkpointing_layers,
    keeps_attention,
    layers_to_checkpoint,
)
from rolltree.kernels import Objective
from rolltree.kernels.tree_attention import op

from ...kernels.on_device import needs_known_order
from ..model.test_tree_equals_flat import make_models


def gradients(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of a step on a tree, and how often attention was computed."""
    tree = TokenTree.from_sequences([5, 6, 7], [[8, 9], [3, 4, 2]], advantages=[1.0, -1.0])
    (batch,) = pack([tree], max_tokens=64)
    calls: list[int] = []
    choose = op._choose

    def counted(table: Any, q: torch.Tensor) -> Any:
        calls.append(table is op._FORWARD)
        return choose(table, q)

    with monkeypatch.context() as patch:
        patch.setattr(op, "_choose", counted)
        batch_loss(model, batch, Objective(), normalizer=3, old_logprob=None).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(calls)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", None),
        pytest.param("qwen3", make_invariant, marks=needs_known_order),
        ("gemma2-window-softcap", None),
        ("qwen3-moe", None),
        ("qwen3-moe", routes.install),
    ],
)
def test_attention_is_computed_once(family: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of layers whose class passes on routes of experts, from then on in the whole process."""
    found = []
    for kept in (None, "attention", "nothing"):
        model = make_models(family)[0].train()
        if change is not None:
            change(model)
        if kept == "attention":
            checkpoint_layers(model)
        elif kept == "nothing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        skip_check(model)  # whose forwards would be counted
        assert keeps_attention(model) == (kept == "attention")
        assert checkpointed_share(model) == (kept is not None)
        found.append((gradients(model, monkeypatch), len(checkpointing_layers(model))))
    ((plain, once), layers), ((saving, still_once), _), ((_, twice), _) = found
    assert once == still_once == layers
    assert twice == 2 * layers
    assert len(plain) == len(saving)
    for got, want in zip(saving, plain, strict=True):
        assert torch.equal(got, want)


def test_as_many_layers_as_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_models("qwen3")[0].train()
    layers = checkpointing_layers(model)
    assert len(layers) == 2
    width = model.config.hidden_size
    one = sum(m.in_features + m.out_features for m in layers[0].modules() if isinstance(m, torch.nn.Linear)) + 4 * width
    for free, count in ((8 * one, 0), (8 * one - 1, 1), (4 * (one + 3 * width), 1), (4 * (one + 3 * width) - 1, 2)):
        assert layers_to_checkpoint(layers, 1, free, 4) == count
        monkeypatch.setattr(checkpointing, "_free_memory", lambda model, free=free: 100 * free)
        checkpoint_layers(model, 100)
        assert checkpointed_share(model) == count / 2
        assert [layer.gradient_checkpointing for layer in layers] == [True] * count + [False] * (2 - count)
    assert layers_to_checkpoint(layers, 1, -5, 4) == 2  # none is free
