"""Objectives of every level and aggregation on packed trees: the flat batch's loss, gradients and metrics.

The flat side is plain transformers on padded sequences and `policy_loss` on flat fields, which tests/kernels holds
against independent formulas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, TreeBatch, backward, batch_logprob, batch_loss, pack
from rolltree.kernels import Objective, PolicyFields, Term, policy_loss

from ...support.thinned import every, thinned
from .test_tree_equals_flat import TEMPERATURE, close, flat_logprobs, make_models, random_tree

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
LEVELS = {
    "token": Objective.preset("ppo", eps_low=0.1, eps_high=0.2, entropy_coef=0.02, kl_coef=0.05),
    "dual clip": Objective.preset("dual_clip"),
    "segment": Objective.preset("ppo", ratio_level="segment", eps_low=0.05, eps_high=0.05),
    "sequence": Objective.preset("gspo", eps_low=0.02, eps_high=0.03),
    "sequence, masked": Objective.preset("ppo", mismatch="mask", mismatch_level="geometric", mismatch_cap=1.05),
}


def conversations(seed: int, rollouts: int = 4, turns: int = 3) -> TokenTree:
    """Every turn a sample of its own: the whole conversation so far is its prompt, one answer its response."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 97, 5).tolist()
    prompts, responses = [], []
    for _ in range(rollouts):
        context = list(system)
        for _ in range(turns):
            response = rng.integers(0, 97, rng.integers(1, 6)).tolist()
            prompts.append(list(context))
            responses.append(response)
            context += response + rng.integers(0, 97, 2).tolist()
    return TokenTree.from_sequences(
        prompts,
        responses,
        advantages=rng.normal(size=len(responses)),
        behaviour_logprobs=[rng.normal(-4, 1, len(r)) for r in responses],
        loss_masks=[rng.random(len(r)) < 0.9 for r in responses],
    )


class Errors(NamedTuple):
    """Errors of the tree against the flat batch: norms of differences over norms, metrics as they are."""

    logprob: float
    loss: float
    gradient: float  # of the worst parameter
    metric: float  # of the worst metric's mean


def compare(
    ours: Any, theirs: Any, trees: list[TokenTree], objective: Objective, *, max_tokens: int = 100_000
) -> Errors:
    batches = pack(trees, max_tokens=max_tokens)
    parameters = list(ours.parameters())
    total, metrics = torch.zeros(()), {}
    old_of, ref_of, value_of = {}, {}, {}
    for batch in batches:
        now = batch_logprob(ours, batch, temperature=TEMPERATURE).logprob.detach()
        hashed = torch.frac(torch.sin(now.double() * 1e4) * 1e4)  # the same shift wherever the same token is
        old, ref = (now + 0.4 * hashed).float(), (now - 0.3 * hashed).float()
        out = batch_loss(
            ours, batch, objective, normalizer=7.0, temperature=TEMPERATURE, old_logprob=old, ref_logprob=ref
        )
        out.loss.backward()
        total = total + out.loss.detach()
        for name, (value, count) in out.metrics.items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + value, before[1] + count)
        for where, values in ((old_of, old), (ref_of, ref), (value_of, now)):
            for index, leaves, kept in zip(batch.tree_index, batch.to_leaves(values), batch.leaf_index, strict=True):
                where.update({(index, int(leaf)): v for leaf, v in zip(kept, leaves, strict=True)})
    grads = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None

    mine: list[torch.Tensor] = []
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in ("logprob", "entropy", "old", "ref", "mask", "node")}
    behaviour, lengths, advantages = [], [], []
    for index, tree in enumerate(trees):
        logprobs, entropies = flat_logprobs(theirs, tree)
        node = np.repeat(np.arange(tree.num_nodes), tree.length)
        for leaf, (sequence, logprob, entropy) in enumerate(zip(tree.flatten(), logprobs, entropies, strict=True)):
            close(value_of[index, leaf], logprob)
            mine.append(value_of[index, leaf])
            nodes = torch.from_numpy(node[tree.response_rows(leaf)])
            values = (logprob, entropy, old_of[index, leaf], ref_of[index, leaf], torch.from_numpy(sequence.loss_mask))
            for name, value in zip(columns, (*values, nodes + 10_000 * len(lengths)), strict=True):
                columns[name].append(value)
            behaviour.append(torch.from_numpy(sequence.behaviour_logprob))
            lengths.append(len(logprob))
            advantages.append(sequence.advantage)
    flat = {name: torch.cat(parts) for name, parts in columns.items()}
    fields = PolicyFields.flat(
        torch.tensor(advantages),
        old_logprob=flat["old"],
        ref_logprob=flat["ref"],
        behaviour_logprob=None if torch.cat(behaviour).isnan().all() else torch.cat(behaviour),
        mask=flat["mask"],
        segment=flat["node"] if objective.ratio_level == "segment" else None,
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)]),
    )
    want = policy_loss(flat["logprob"], fields, objective, normalizer=7.0, entropy=flat["entropy"])
    for p in theirs.parameters():
        p.grad = None
    want.loss.backward()
    torch.testing.assert_close(total, want.loss.detach(), rtol=1e-5, atol=1e-6)  # terms of both signs cancel
    for (name, p), grad in zip(theirs.named_parameters(), grads, strict=True):
        assert grad.abs().max() > 0, name
        close(grad, p.grad, 2e-5)
    assert metrics.keys() == want.metrics.keys()
    means = [
        abs(float(metrics[name][0] / metrics[name][1]) - float(value / count))
        for name, (value, count) in want.metrics.items()
        if count
    ]
    exact = flat["logprob"].detach()
    errors = Errors(
        float((torch.cat(mine) - exact).norm() / exact.norm()),
        float((total - want.loss.detach()).abs()),
        max(float((g - p.grad).norm() / p.grad.norm()) for g, p in zip(grads, theirs.parameters(), strict=True)),
        max(means),
    )
    for name, (value, count) in want.metrics.items():
        torch.testing.assert_close(
            torch.tensor([float(x) for x in metrics[name]]),
            torch.tensor([float(value), float(count)]),
            rtol=1e-4,
            atol=max(1e-4, 1e-6 * float(count)),  # sums of differences of log-probs, each of which is rounded
            msg=lambda text, name=name: f"{name}: {text}",
        )
    return errors


@pytest.mark.slow(but=11)
@pytest.mark.check(but=4)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_and_aggregation(level: str, aggregation: str) -> None:
    ours, theirs = make_models("qwen3")
    objective = LEVELS[level]
    compare(ours, theirs, [random_tree(3, 4, 25), random_tree(4, 1, 3)], replace(objective, aggregation=aggregation))


@pytest.mark.check(but=3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("max_tokens", [100_000, 45])
def test_conversations_flattened_by_turn(level: str, max_tokens: int) -> None:
    ours, theirs = make_models("llama")
    trees = [conversations(0), conversations(1)]
    assert sum(t.num_tokens for t in trees) < 0.6 * sum(t.logical_tokens for t in trees)
    compare(ours, theirs, trees, LEVELS[level], max_tokens=max_tokens)


def test_summed_advantages_would_be_wrong() -> None:
    """Leaves of opposite sign share a token whose ratio is clipped for one and not for the other."""
    ours, theirs = make_models("qwen3")
    tree = TokenTree.from_sequences([1, 2], [[5, 6, 7], [5, 6, 8]], advantages=[1.0, -0.75])
    objective = Objective.preset("ppo", eps_low=0.1, eps_high=0.1, aggregation="token_sum")
    compare(ours, theirs, [tree], objective)
    (batch,) = pack([tree], max_tokens=100)
    now = batch_logprob(ours, batch, temperature=TEMPERATURE).logprob.detach()
    old = now - 0.5  # every ratio is e^0.5: above the clip, so positive advantages have no gradient
    fields = batch.fields(objective, old_logprob=old)
    exact = policy_loss(now, fields, objective, normalizer=1.0).loss
    summed = fields.adv_pos + fields.adv_neg
    shortcut = policy_loss(now, PolicyFields.flat(summed, old_logprob=old), objective, normalizer=1.0).loss
    ratio, high = float(np.exp(0.5)), 1.1
    # tokens 5 and 6 are shared, 7 is the good leaf's, 8 the bad leaf's
    by_hand = -3 * 1.0 * high + 3 * 0.75 * ratio
    assert float(exact) == pytest.approx(by_hand, rel=1e-5)
    assert float(shortcut) == pytest.approx(-2 * 0.25 * high - 1.0 * high + 0.75 * ratio, rel=1e-5)
    assert abs(float(shortcut) - by_hand) > 0.5


def gradients(model: Any, batches: list[TreeBatch], objective: Objective) -> tuple[list[torch.Tensor], Any, Any]:
    """Gradients, loss and metrics of all batches, with old and reference log-probs near the model's own."""
    for p in model.parameters():
        p.grad = None
    loss, metrics = torch.zeros(()), {}
    for batch in batches:
        with torch.no_grad():
            now = batch_logprob(model, batch, temperature=TEMPERATURE).logprob
        hashed = torch.frac(torch.sin((now * 1e3).round().double()) * 1e4)
        shifts = {"old_logprob": (now + 0.4 * hashed).float(), "ref_logprob": (now - 0.3 * hashed).float()}
        terms = [Term(batch.fields(objective, **shifts), objective, 7.0)]
        out = backward(model, batch, terms, temperature=TEMPERATURE)
        loss = loss + out.loss
        for name, values in out.metrics.items():
            metrics[name] = tuple(a + b for a, b in zip(metrics.get(name, (0.0, 0.0)), values, strict=True))
    return [p.grad.clone() for p in model.parameters()], loss, metrics


CUT = [("qwen3", 20, level) for level in LEVELS]  # where trees are cut, and how a layer attends, no level knows
CUT += [("qwen3", 61, level) for level in ("token", "sequence")]
CUT += [("gemma2-window-softcap", 33, level) for level in ("dual clip", "segment", "sequence, masked")]


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(("name", "max_tokens", "level"), thinned(CUT, every(2)))
def test_pieces_of_a_tree_add_up(name: str, max_tokens: int, level: str) -> None:
    """Some paths are longer than the budget; with activation checkpointing, and trees of several depths."""
    model, _ = make_models(name)
    objective = LEVELS[level]
    trees = [random_tree(11, 5, 40), conversations(2), random_tree(12, 1, 2)]
    assert max(int(t.path_length.max()) for t in trees) > 20
    want, loss, metrics = gradients(model, pack(trees, max_tokens=100_000), objective)
    batches = pack(trees, max_tokens=max_tokens, in_pieces=True)
    assert sum(len(b.pieces) for b in batches) >= 3
    assert all(p.end - p.begin <= max_tokens for b in batches for p in b.pieces)
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        got, piece_loss, piece_metrics = gradients(model, batches, objective)
        torch.testing.assert_close(piece_loss, loss, rtol=1e-5, atol=1e-6)
        for (key, _), mine, whole in zip(model.named_parameters(), got, want, strict=True):
            assert (mine - whole).norm() <= 2e-5 * whole.norm(), key
        for key, values in metrics.items():
            torch.testing.assert_close(
                torch.stack([v.double() for v in piece_metrics[key]]),
                torch.stack([v.double() for v in values]),
                rtol=1e-4,
                atol=1e-4,
                msg=f"{key}: {piece_metrics[key]} {values}",
            )


def test_a_batch_of_pieces_is_refused_where_it_would_be_computed_at_once() -> None:
    model, _ = make_models("qwen3")
    (batch,) = pack([random_tree(11, 5, 40)], max_tokens=30, in_pieces=True)
    with pytest.raises(ValueError, match="in pieces; use backward"):
        batch_loss(model, batch, LEVELS["token"], normalizer=1.0, old_logprob=None)


EDGES = {
    "one token, empty response": ([3], [[]]),
    "empty among others": ([3, 4], [[], [5], [5, 6]]),
    "all empty": ([3, 4], [[], []]),
    "one leaf": ([3, 4], [[5, 6, 7]]),
    "duplicates": ([3], [[5, 6], [5, 6], [5, 6]]),
    "prefixes of one another": ([3], [[5], [5, 6], [5, 6, 7]]),
}


@pytest.mark.slow(but=15)
@pytest.mark.check(but=7)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, level: str) -> None:
    """The loss is the flat batch's where there is something to learn, else a zero that backward takes."""
    prompt, responses = EDGES[edge]
    logprobs = [[-2.0] * len(r) for r in responses]
    advantages = [1.0, -0.5, 0.25][: len(responses)]
    tree = TokenTree.from_sequences(prompt, responses, advantages=advantages, behaviour_logprobs=logprobs)
    ours, theirs = make_models("qwen3")
    if any(responses):
        compare(ours, theirs, [tree], LEVELS[level])
        return
    (batch,) = pack([tree], max_tokens=10)
    nothing = torch.zeros(0)
    out = batch_loss(ours, batch, LEVELS[level], normalizer=1.0, old_logprob=nothing, ref_logprob=nothing)
    out.loss.backward()
    assert float(out.loss) == 0
    assert not any(p.grad.any() for p in ours.parameters() if p.grad is not None)
    assert all(len(values) == 0 for values in batch.to_leaves(batch_logprob(ours, batch).logprob)[0])


@pytest.mark.slow
def test_ten_thousand_leaves() -> None:
    rng = np.random.default_rng(0)
    responses = [rng.integers(0, 97, 2).tolist() for _ in range(10_000)]
    tree = TokenTree.from_sequences([1, 2, 3], responses, advantages=rng.normal(size=10_000).tolist())
    ours, theirs = make_models("qwen3")
    compare(ours, theirs, [tree], LEVELS["token"])
    compare(ours, theirs, [tree], LEVELS["sequence"], max_tokens=4000)
