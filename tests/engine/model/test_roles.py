"""Roles: scores of other weights in columns, and weights that stay, follow or are reset."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, pack
from rolltree.engine.model.roles import Role, swapped
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.critic import Critic
from rolltree.kernels import value_loss

from ..batches.test_equal_prefixes import apart
from .test_tree_equals_flat import close, make_models, random_tree
from .test_tree_objectives import conversations


def other_weights(model):
    torch.manual_seed(7)
    return {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_scores_are_those_of_plain_transformers(max_tokens, flat):
    ours, theirs = make_models("qwen3")
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    weights = other_weights(ours)
    trees = [random_tree(3, 3, 20), random_tree(4, 1, 2), conversations(0)]
    batches = pack(trees, max_tokens=max_tokens, in_pieces=not flat, flat=flat)
    Role("ref_logprob", ours, weights).score(trees, batches, temperature=0.7)
    assert all(torch.equal(before[name], p) for name, p in ours.named_parameters())
    theirs.load_state_dict(weights, strict=False)
    for tree in trees:
        assert np.isnan(tree.ref_logprob[: tree.prompt_length]).all()
        for leaf, s in enumerate(tree.flatten()):
            if not s.response:
                continue
            with torch.no_grad():
                logits = theirs(torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1] / 0.7
            want = logits.log_softmax(-1).gather(1, torch.tensor(s.response)[:, None])[:, 0]
            np.testing.assert_allclose(tree.ref_logprob[tree.response_rows(leaf)], want, atol=2e-5)


def sampled_alike() -> list[TokenTree]:
    """Responses that begin with equal tokens, each a branch of its own with log-probs of its own, and conversations."""
    rng = np.random.default_rng(5)
    trees = []
    for _ in range(3):
        stem = rng.integers(0, 97, 12).tolist()
        responses = [stem[: 4 + i % 9] + rng.integers(0, 97, i % 4).tolist() for i in range(8)]
        logprobs = [rng.normal(-4, 1, len(r)) for r in responses]
        masks = [rng.random(len(r)) < 0.8 for r in responses]
        trees.append(apart(rng.integers(0, 97, 3).tolist(), responses, logprobs, masks, rng.normal(size=8)))
    turns = [s for s in conversations(1).flatten() for _ in range(2)]  # each turn sampled twice alike
    logprobs = [rng.normal(-4, 1, len(s.response)) for s in turns]
    prompts, responses = [s.prompt for s in turns], [s.response for s in turns]
    return [*trees, TokenTree.from_sequences(prompts, responses, behaviour_logprobs=logprobs)]


@pytest.mark.parametrize("kind", ["role", "critic"])
@pytest.mark.parametrize("max_tokens", [10_000, 60, 32])
def test_what_leaves_sampled_alike_is_scored_once(kind, max_tokens):
    """Values of all responses are those of plain sequences, and tokens computed those of distinct prefixes: whole
    trees, many in a batch, pieces of a tree (of a role), or its leaves' parts (of a critic)."""
    ours, theirs = make_models("qwen3")
    trees = sampled_alike()
    batches = pack(trees, max_tokens=max_tokens, in_pieces=kind == "role")
    computed = [batch.num_tokens for batch in batches]
    recorded = [{name: values.copy() for name, values in tree.columns.items()} for tree in trees]
    if kind == "role":
        column = "ref_logprob"
        Role(column, ours).score(trees, batches, temperature=0.7)
    else:
        column, critic = "value", Critic(ours, TrainerConfig())
        torch.nn.init.normal_(ours.value_head.weight, generator=torch.Generator().manual_seed(1))
        critic.score(trees, batches)
    for tree, before in zip(trees, recorded, strict=True):
        assert tree.columns.keys() == before.keys() | {column}
        assert all(np.array_equal(tree.columns[name], values, equal_nan=True) for name, values in before.items())
        assert np.isnan(tree.columns[column][: tree.prompt_length]).all()
        assert not np.isnan(tree.columns[column][tree.prompt_length :]).any()
        for leaf, s in enumerate(tree.flatten()):
            with torch.no_grad():
                out = theirs(torch.tensor([s.prompt + s.response]), output_hidden_states=True)
                if kind == "role":
                    logprob = (out.logits[0, len(s.prompt) - 1 : -1] / 0.7).log_softmax(-1)
                    want = logprob.gather(1, torch.tensor(s.response)[:, None])[:, 0]
                else:
                    want = ours.value_head(out.hidden_states[-1][0, len(s.prompt) - 1 : -1])[:, 0]
            np.testing.assert_allclose(tree.columns[column][tree.response_rows(leaf)], want, atol=2e-5)
    if max_tokens == 10_000 or kind == "role":  # parts of leaves repeat what they need of the others
        prefixes = {(i, *(s.prompt + s.response)[:n]) for i, tree in enumerate(trees) for s in tree.flatten()
                    for n in range(1, len(s.prompt + s.response) + 1)}  # fmt: skip
        assert sum(computed) == len(prefixes) < 0.7 * sum(tree.num_tokens for tree in trees)


def test_swapped_weights_come_back_after_an_error():
    model, _ = make_models("qwen3")
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), swapped(model, other_weights(model)):
        _ = 1 / 0
    assert before == [p.data_ptr() for p in model.parameters()]


def test_weights_stay_follow_or_are_reset():
    model, _ = make_models("qwen3")
    start = Role.snapshot(model)
    stays, resets, follows = (
        Role("ref_logprob", model, Role.snapshot(model), reset_every=n, ema=d)
        for n, d in ((0, None), (2, None), (0, 0.9))
    )
    name = "model.norm.weight"
    expected = start[name].clone()
    for step in range(1, 4):
        with torch.no_grad():
            dict(model.named_parameters())[name].add_(1.0)
        now = dict(model.named_parameters())[name].detach()
        expected = 0.9 * expected + 0.1 * now
        for role in (stays, resets, follows):
            role.follow(model)
        torch.testing.assert_close(stays.weights[name], start[name])
        torch.testing.assert_close(resets.weights[name], start[name] + 2 * (step // 2))
        torch.testing.assert_close(follows.weights[name], expected)


def test_critic_learns_what_a_flat_critic_learns():
    """One update on a tree: the gradient of the value loss over all responses, a shared prefix's value once."""
    ours, theirs = make_models("qwen3")
    tree = TokenTree.from_sequences(
        [1, 2, 3], [[5, 6, 7, 8], [5, 6, 9], [4]], loss_masks=[[1, 1, 0, 1], [1, 1, 1], [1]]
    )
    tree.rewards["reward"] = np.array([1, 0, 0.5], np.float32)
    critic = Critic(ours, TrainerConfig(lr=1e-3, max_grad_norm=1e9), clip=0.2)
    with torch.no_grad():
        critic.model.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        critic.model.value_head.bias.fill_(0.3)
    critic.score([tree], pack([tree], max_tokens=100))
    assert not np.isnan(tree.value[tree.loss_mask]).any()
    targets = np.random.default_rng(2).normal(size=tree.response_length.sum()).astype(np.float32)
    tree.set("value_target", targets)
    old = tree.value[tree.path_tokens] + np.random.default_rng(3).normal(0, 0.4, len(targets)).astype(np.float32)
    shifted = np.zeros(tree.num_tokens, np.float32)
    shifted[tree.path_tokens] = old  # one old value a token, as scored
    tree.set("value", shifted)

    head = torch.nn.Linear(32, 1)
    head.load_state_dict(critic.model.value_head.state_dict())
    values, masks = [], []
    for s in tree.flatten():
        hidden = theirs.model(torch.tensor([s.prompt + s.response])).last_hidden_state[0, len(s.prompt) - 1 : -1]
        values.append(head(hidden)[:, 0])
        masks.append(torch.tensor(s.loss_mask))
    mask = torch.cat(masks)
    old_flat = torch.tensor(tree.value[tree.path_tokens])
    want = value_loss(
        torch.cat(values), torch.tensor(targets), normalizer=float(mask.sum()), old_value=old_flat, clip=0.2, mask=mask
    )
    want.loss.backward()

    grads = {}
    critic.trainer._apply = lambda: grads.update(
        {name: p.grad.clone() for name, p in critic.model.named_parameters() if p.grad is not None}
    )
    metrics = critic.learn(pack([tree], max_tokens=100), tree.loss_tokens)
    assert float(metrics["critic/loss"][0]) == pytest.approx(float(want.loss), rel=1e-5)
    close(grads["value_head.weight"], head.weight.grad, 1e-5)
    reference = dict(theirs.named_parameters())
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        close(grads[name], reference[name].grad, 2e-5)
