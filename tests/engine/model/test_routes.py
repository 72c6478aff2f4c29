"""Recorded routes of mixtures of experts, replayed on trees, against plain Transformers with routers by formula."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rolltree.engine import UserError, batch_loss, shard
from rolltree.engine.batches.pack import pack
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.model.decoder import unchecked_logprob
from rolltree.engine.model.loss import backward
from rolltree.engine.model.routes import ROUTERS, Routed, install
from rolltree.kernels import Objective, Term

from ...support.moe_models import FAMILIES, Given, flat, make, routers, trees_with_routes
from ...support.recurrent_models import gradients, weights, worst

EXACT = 2e-5  # of log-probs, and relative of a gradient


def replayed(model: Any, trees: list[Any], **options: Any) -> list[Tensor]:
    """Log-probs of each response, leaf after leaf of each tree."""
    found: dict[tuple[int, int], Tensor] = {}
    for batch in pack(trees, **{"max_tokens": 4096, "replay_routes": True, **options}):
        values = batch.to_leaves(unchecked_logprob(model, batch).logprob)
        for tree, leaves, some in zip(batch.tree_index, batch.leaf_index, values, strict=True):
            found |= {(tree, int(leaf)): v for leaf, v in zip(leaves, some, strict=True)}
    return [found[key] for key in sorted(found)]


QUICK = ("qwen3_moe", "qwen3_next", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
EVERY = [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]


@pytest.mark.check(but=2)
@pytest.mark.parametrize("family", EVERY)
def test_replayed_routes_give_the_log_probs_and_gradients_of_a_router_that_was_told_them(family):
    model = make(family)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    own = install(model)
    assert own == Routed(len(routers(model)), 3, 8)
    trees = trees_with_routes(*own)
    want = flat(plain, Given(family, plain), trees)
    got = replayed(model, trees)
    by = weights(want)
    for values in (want, got):
        sum((v * w).sum() for v, w in zip(values, by, strict=True)).backward()
    want, got = [v.detach() for v in want], [v.detach() for v in got]
    assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) < EXACT
    expected, found = gradients(plain), gradients(model)
    assert worst(expected, found)[0] < EXACT, worst(expected, found)
    by_itself = replayed(model, trees, replay_routes=False)
    assert max(float((a - b).abs().max()) for a, b in zip(by_itself, want, strict=True)) > 0.1


@pytest.fixture(scope="module")
def qwen() -> Any:
    return make("qwen3_moe")


@pytest.fixture(scope="module")
def trees(qwen: Any) -> list[TokenTree]:
    made = trees_with_routes(*install(qwen))
    for tree in made:
        tree.set("advantage", np.linspace(-1, 1, tree.num_leaves))
        tree.set("origin", np.where(np.arange(tree.num_tokens) < tree.prompt_length, 0, 1))
        tree.set("behaviour_logprob", -3.0)
    return made


@pytest.fixture(scope="module")
def whole(qwen: Any, trees: list[TokenTree]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs and gradients of the trees in one batch."""
    values = replayed(qwen, trees)
    sum((v * w).sum() for v, w in zip(values, weights(values), strict=True)).backward()
    return [v.detach() for v in values], gradients(qwen)


@pytest.mark.parametrize("how", ["flat", "split by leaves", "alone", "checkpointed"])
def test_it_does_not_matter_how_trees_are_packed(how: str, qwen: Any, trees: list[TokenTree], whole: Any) -> None:
    options: dict[str, Any] = {"flat": {"flat": True}, "split by leaves": {"max_tokens": 40}}.get(how, {})
    if how == "checkpointed":
        qwen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        qwen.train()
    try:
        parts = [[tree] for tree in trees] if how == "alone" else [trees]
        values = [v for part in parts for v in replayed(qwen, part, **options)]
        sum((v * w).sum() for v, w in zip(values, weights(values), strict=True)).backward()
    finally:
        qwen.gradient_checkpointing_disable()
        qwen.eval()
    assert max(float((a.detach() - b).abs().max()) for a, b in zip(values, whole[0], strict=True)) < EXACT
    assert worst(whole[1], gradients(qwen))[0] < EXACT


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tree_in_pieces_has_the_same_gradients(checkpointed: bool, qwen: Any, trees: list[TokenTree]) -> None:
    objective = Objective()
    found = []
    for most in (4096, 12):
        (batch,) = pack(trees[:1], max_tokens=most, in_pieces=True, replay_routes=True)
        assert bool(batch.pieces) == (most == 12)
        if batch.pieces and checkpointed:
            qwen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            qwen.train()
        try:
            backward(qwen, batch, [Term(batch.fields(objective, old_logprob="behaviour"), objective, 10.0)])
        finally:
            qwen.gradient_checkpointing_disable()
            qwen.eval()
        found.append(gradients(qwen))
    assert worst(*found)[0] < EXACT


def test_batch_loss_replays_what_the_batch_holds_and_nothing_else(qwen: Any, trees: list[TokenTree]) -> None:
    (routed,), (free,) = (pack(trees, max_tokens=4096, replay_routes=on) for on in (True, False))
    losses = [
        float(batch_loss(qwen, batch, Objective(), normalizer=10.0).loss.detach())
        for batch in (routed, free, routed.without_routes())
    ]
    assert abs(losses[0] - losses[1]) > 1e-3
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)


def test_unknown_routes_are_the_routers_own(qwen: Any, trees: list[TokenTree]) -> None:
    unknown = trees[0].without_leaves(np.zeros(trees[0].num_leaves, bool))
    assert unknown is not None
    unknown.set("routes", np.full(unknown.routes.shape, -1))
    got, own = replayed(qwen, [unknown]), replayed(qwen, [unknown], replay_routes=False)
    assert all(torch.equal(a, b) for a, b in zip(got, own, strict=True))


def test_routes_of_another_model_are_refused(qwen: Any, trees: list[TokenTree]) -> None:
    (batch,) = pack(trees, max_tokens=4096, replay_routes=True)
    other = make("qwen3_moe", num_hidden_layers=2)
    with pytest.raises(ValueError, match="in each of 3 layers, and Qwen3MoeForCausalLM has 2 layers with 3 of 8"):
        unchecked_logprob(other, batch)
    with pytest.raises(UserError, match="has no mixture of experts"):
        unchecked_logprob(make("qwen3"), batch)


def test_a_router_that_does_not_choose_by_topk_is_an_error(qwen: Any, trees: list[TokenTree], monkeypatch: Any) -> None:
    (batch,) = pack(trees, max_tokens=4096, replay_routes=True)
    monkeypatch.setattr(torch, "topk", lambda scores, k, dim: scores.sort(dim, descending=True))
    with pytest.raises(RuntimeError, match="Qwen3MoeTopKRouter did not choose its experts by topk"):
        unchecked_logprob(qwen, batch)


@pytest.mark.slow
def test_every_known_router_is_tested() -> None:
    assert {type(r).__name__ for family in FAMILIES for r in routers(make(family))} == ROUTERS


def test_a_sharded_model_replays(qwen: Any, trees: list[TokenTree], whole: Any) -> None:
    sharded = copy.deepcopy(qwen)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        shard(sharded)
        values = [v.detach() for v in replayed(sharded, trees)]
    finally:
        dist.destroy_process_group()
    assert max(float((a - b).abs().max()) for a, b in zip(values, whole[0], strict=True)) < EXACT
