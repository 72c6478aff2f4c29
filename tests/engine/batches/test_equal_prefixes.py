"""Leaves that were sampled apart and begin alike: one tree, with all that was said of each leaf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rolltree.engine import TokenTree, batch_loss, pack
from rolltree.engine.batches.equal_prefixes import share_equal_prefixes
from rolltree.engine.data.segment import LeafStatus, Segment

from ..data.test_tree import check_laws, groups
from ..model.test_tree_equals_flat import close, make_models
from ..model.test_tree_objectives import LEVELS, conversations


def apart(prompt, responses, logprobs, masks, advantages) -> TokenTree:
    """Every response a node of its own, as a program that forks the prompt makes them."""
    segments = [
        Segment.make(r, loss_mask=m, origin=1, behaviour_logprob=lp, policy_version=3)
        for r, lp, m in zip(responses, logprobs, masks, strict=True)
    ]
    tree = TokenTree.from_nodes(
        [-1, *[0] * len(segments)],
        [Segment.make(prompt, behaviour_logprob=np.nan), *segments],
        list(range(1, len(segments) + 1)),
        [LeafStatus.STOP] * len(segments),
    )
    tree.set("advantage", advantages)
    tree.set("group", np.arange(len(responses)))
    tree.set("value_target", np.arange(tree.response_length.sum()))
    tree.rewards["reward"] = np.arange(len(responses), dtype=np.float32)
    tree.meta["source"] = "here"
    return tree


@pytest.mark.slow
@settings(max_examples=70, deadline=None)
@given(groups())
def test_it_is_the_tree_of_the_sequences(group):
    responses, logprobs, masks = group
    logprobs = logprobs or [[-1.0] * len(r) for r in responses]
    advantages = np.linspace(-1, 1, len(responses))
    before = apart([7, 8], responses, logprobs, masks, advantages)
    shared = share_equal_prefixes(before)
    merged = TokenTree.from_sequences(
        [7, 8], responses, advantages=advantages, behaviour_logprobs=logprobs, loss_masks=masks, policy_version=3
    )
    assert shared.num_tokens == merged.num_tokens <= before.num_tokens
    for one, other, third in zip(shared.flatten(), before.flatten(), merged.flatten(), strict=True):
        for a, b in ((one, other), (one, third)):
            assert (a.prompt, a.response, a.advantage, a.status) == (b.prompt, b.response, b.advantage, b.status)
            for name in ("behaviour_logprob", "loss_mask", "policy_version"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in ("group", "value_target", "advantage", "status"):
        np.testing.assert_array_equal(shared.columns[name], before.columns[name])
    assert shared.rewards.keys() == {"reward"}
    assert shared.meta == {"source": "here"}
    assert shared.loss_tokens == before.loss_tokens
    check_laws(shared)
    assert share_equal_prefixes(shared) is shared


def pair(**differs) -> TokenTree:
    """Two equal responses but for the second one's column, at its second token."""
    made = []
    for second in (False, True):
        columns = {
            "behaviour_logprob": [-1.0] * 3,
            "policy_version": [3] * 3,
            "loss_mask": [True] * 3,
            "origin": [1] * 3,
        }
        for name, value in differs.items() if second else ():
            columns[name][1] = value
        made.append(Segment.make([1, 2, 1], **columns))
    return TokenTree.from_nodes([-1, 0, 0], [Segment.make([5]), *made], [1, 2], [LeafStatus.STOP] * 2)


@pytest.mark.parametrize(
    "differs",
    [
        {"behaviour_logprob": float(np.nextafter(np.float32(-1), np.float32(0)))},
        {"policy_version": 4},
        {"loss_mask": False},
        {"origin": 2},
    ],
    ids=lambda d: next(iter(d)),
)
def test_tokens_that_differ_stay_apart_from_there_on(differs):
    assert share_equal_prefixes(pair()).num_tokens == 1 + 3
    assert share_equal_prefixes(pair(**differs)).num_tokens == 1 + 1 + 2 + 2


@pytest.mark.parametrize(("name", "per"), [("node_advantage", "node"), ("token_advantage", "token")])
def test_credit_of_tokens_decides_and_credit_of_nodes_forbids(name, per):
    tree = pair()
    tree.set(name, np.arange(tree.num_nodes if per == "node" else tree.num_tokens))
    assert share_equal_prefixes(tree).num_tokens == tree.num_tokens == 7


def test_prompts_within_the_tree_stay_prompts():
    """Turns of conversations, whose prompts are longer than the root: nothing more is shared, nothing is lost."""
    tree = conversations(0)
    assert share_equal_prefixes(tree) is tree


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "segment"])
def test_loss_gradients_and_metrics_stay(level):
    """Leaves of both signs on one token, with ratios beyond the clip."""
    model, _ = make_models("qwen3")
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 97, 6).tolist()
    responses = [stem[: 2 + i % 5] + rng.integers(0, 97, 1 + i % 3).tolist() for i in range(8)]
    responses[3] = list(responses[2])  # twice the same
    hashed = lambda ids: [float(np.sin(97 * t + i)) - 4.5 for i, t in enumerate(ids)]  # noqa: E731
    masks = [[(t + i) % 7 != 0 for i, t in enumerate(r)] for r in responses]
    before = apart([3, 4, 5], responses, [hashed(r) for r in responses], masks, rng.normal(size=8))
    shared = share_equal_prefixes(before)
    assert shared.num_tokens < 0.7 * before.num_tokens
    found = []
    for tree in (before, shared):
        (batch,) = pack([tree], max_tokens=1000)
        out = batch_loss(model, batch, LEVELS[level], normalizer=5.0, ref_logprob=batch.behaviour_logprob)
        out.loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found.append((out.loss.detach(), grads, out.metrics))
    (loss, grads, metrics), (shared_loss, shared_grads, shared_metrics) = found
    torch.testing.assert_close(shared_loss, loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(shared_grads, grads, strict=True):
        assert b.abs().max() > 0
        close(a, b, 2e-5)
    assert shared_metrics.keys() == metrics.keys()
    for name, (value, count) in metrics.items():
        torch.testing.assert_close(torch.as_tensor(shared_metrics[name][1]), torch.as_tensor(count), msg=name)
        torch.testing.assert_close(
            torch.as_tensor(shared_metrics[name][0]), torch.as_tensor(value), rtol=1e-4, atol=1e-4
        )
