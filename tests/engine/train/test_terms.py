"""Loss terms through the real model: each against its plain formula on flat sequences, and their sum in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rolltree.engine import TokenTree, UserError, backward, pack
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.stored import Here, StoredTree
from rolltree.engine.methods.selections import PAIRINGS, SELECTIONS
from rolltree.engine.train.terms import PairTerm, Selection, TokenTerm, needed
from rolltree.kernels import Objective

from ..model.test_tree_equals_flat import close, make_models

NLL = Objective(surrogate="nll")
RESPONSES = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 3, 3], [4]]


def group() -> TokenTree:
    tree = TokenTree.from_sequences([1, 2, 3], RESPONSES, advantages=[1.0, -0.5, 0.25, -1.0])
    tree.rewards["reward"] = np.array([1, 0, 1, 0.5], np.float32)
    return tree


def demonstration() -> TokenTree:
    return TokenTree.from_nodes(
        [-1, 0], [Segment.prompt([1, 2]), Segment.make([7, 8, 9], origin=Origin.INJECTED)], [1], [LeafStatus.STOP]
    )


def logprobs(model, tree):
    """Return the log-probs of every response's tokens, by plain Transformers on flat sequences."""
    out = []
    for s in tree.flatten():
        logits = model(torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1]
        out.append(logits.log_softmax(-1).gather(1, torch.tensor(s.response)[:, None])[:, 0])
    return out


def gradients(model):
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def run(terms, trees, given=(), weights=None, max_tokens=1000, in_pieces=False):
    """Loss and gradients of ``terms`` on the tree model."""
    ours, theirs = make_models("qwen3")
    everything = [*trees, *given]
    for term in terms:
        term.prepare(everything)
    weights = weights or [1.0] * len(terms)
    total = 0.0
    losses: dict[str, float] = {}
    for batch in pack(everything, max_tokens=max_tokens, in_pieces=in_pieces):
        on = [t.on(batch, t.normalizer(trees, given), True, w) for t, w in zip(terms, weights, strict=True)]
        out = backward(ours, batch, on)
        total += float(out.loss)
        for name, value in out.losses.items():
            losses[name] = losses.get(name, 0.0) + float(value)
    return total, losses, gradients(ours), theirs


def agree(got, loss, theirs):
    loss.backward()
    assert got[0] == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    for a, b in zip(got[2], gradients(theirs), strict=True):
        close(a, b, 2e-5)


@pytest.mark.parametrize("max_tokens", [1000, 6])
@pytest.mark.parametrize("name", ["rewarded", "best", "reward_weighted"])
def test_leaves_that_are_selected(name, max_tokens):
    """RAFT and its kin: the mean NLL of the tokens of chosen responses; a shared token counts once a response."""
    tree = group()
    got = run([TokenTerm(NLL, "kept", SELECTIONS[name])], [tree], max_tokens=max_tokens, in_pieces=True)
    weight = np.asarray(SELECTIONS[name](tree), np.float64)
    flat = logprobs(got[3], tree)
    count = sum(len(r) for r, w in zip(RESPONSES, weight, strict=True) if w)
    agree(got, -sum(w * lp.sum() for w, lp in zip(weight, flat, strict=True)) / count, got[3])


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_tokens_that_are_selected(aggregation):
    def odd(tree):
        return (tree.token_id % 2 == 1) * 0.5

    tree = group()
    got = run([TokenTerm(Objective(surrogate="nll", aggregation=aggregation), "odd", odd)], [tree])
    loss, tokens, leaves = torch.zeros(()), 0, 0
    for ids, lp in zip(RESPONSES, logprobs(got[3], tree), strict=True):
        chosen = torch.tensor([i % 2 == 1 for i in ids])
        if chosen.any():
            part = -0.5 * lp[chosen].sum()
            loss = loss + (part if aggregation == "token_mean" else part / chosen.sum())
            tokens, leaves = tokens + int(chosen.sum()), leaves + 1
    agree(got, loss / (tokens if aggregation == "token_mean" else leaves), got[3])


def test_demonstrations_are_no_part_of_the_policy_loss():
    tree, given = group(), demonstration()
    alone = run([TokenTerm(Objective.preset("grpo"))], [tree])
    beside = run([TokenTerm(Objective.preset("grpo"))], [tree], [given])
    assert alone[0] == pytest.approx(beside[0], rel=1e-6)
    for a, b in zip(alone[2], beside[2], strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_several_terms_in_one_pass(max_tokens):
    """Policy, NLL of demonstrations, NLL of the best response, entropy and a preference loss: the sum of each alone."""
    tree, given = group(), demonstration()
    terms = [
        TokenTerm(Objective.preset("grpo")),
        TokenTerm(NLL, "teach", SELECTIONS["injected"]),
        TokenTerm(NLL, "raft", SELECTIONS["best"]),
        TokenTerm(Objective(surrogate="nll", pos_weight=0.0, entropy_coef=0.3), "calm"),
        PairTerm(PAIRINGS["best_and_worst"], "rank", {"kind": "simpo", "beta": 2.0}),
    ]
    weights = [1.0, 0.5, 0.25, 0.1, 0.7]
    together = run(terms, [tree], [given], weights, max_tokens, in_pieces=True)
    total, grads = 0.0, None
    for term, weight in zip(terms, weights, strict=True):
        loss, losses, alone, _ = run([term], [tree], [given], [weight])
        assert together[1][term.name] == pytest.approx(losses[term.name], rel=1e-5, abs=1e-6)
        total += loss
        grads = alone if grads is None else [a + b for a, b in zip(grads, alone, strict=True)]
    assert together[0] == pytest.approx(total, rel=1e-5)
    for a, b in zip(together[2], grads, strict=True):
        close(a, b, 5e-5)


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_dpo_on_the_leaves_of_a_tree(max_tokens):
    tree = group()
    reference = np.random.default_rng(0).normal(-4, 1, tree.num_tokens)
    tree.set("ref_logprob", reference)
    got = run(
        [PairTerm(PAIRINGS["every_unequal"], "dpo", {"beta": 0.4})], [tree], max_tokens=max_tokens, in_pieces=True
    )
    flat = [
        (lp - torch.tensor(tree.ref_logprob[tree.response_rows(i)])).sum()
        for i, lp in enumerate(logprobs(got[3], tree))
    ]
    pairs = [(i, j) for i in range(4) for j in range(4) if tree.rewards["reward"][i] > tree.rewards["reward"][j]]
    assert len(pairs) == 5
    agree(got, -sum(logsigmoid(0.4 * (flat[i] - flat[j])) for i, j in pairs) / len(pairs), got[3])


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_distillation_and_kl_on_a_tree(max_tokens):
    """Reverse KL to a teacher by its gradient, and the policy gradient with the estimator k3 of KL to a reference."""
    tree = group()
    for seed, column in enumerate(("teacher_logprob", "ref_logprob")):
        tree.set(column, np.random.default_rng(seed).normal(-4, 1, tree.num_tokens))
    tokens = sum(map(len, RESPONSES))

    def other(leaf, column):
        return torch.tensor(getattr(tree, column)[tree.response_rows(leaf)])

    got = run([TokenTerm(Objective.preset("opd"))], [tree], max_tokens=max_tokens, in_pieces=True)
    flat = enumerate(logprobs(got[3], tree))
    assert Objective.preset("opd").aggregation == "token_mean"
    agree(got, sum(((lp.detach() - other(i, "teacher_logprob")) * lp).sum() for i, lp in flat) / tokens, got[3])

    objective = Objective.preset("dapo", kl_coef=0.3)
    got = run([TokenTerm(objective)], [tree], max_tokens=max_tokens, in_pieces=True)
    loss = 0.0
    for i, lp in enumerate(logprobs(got[3], tree)):
        d = other(i, "ref_logprob") - lp
        loss = loss + (-tree.advantage[i] * (lp - lp.detach()).exp() + 0.3 * (d.exp() - d - 1)).sum() / tokens
    agree(got, loss, got[3])


def test_pairs_need_whole_trees():
    tree = group()
    term = PairTerm(PAIRINGS["best_and_worst"], "rank", {"kind": "simpo"})
    term.prepare([tree])
    batch = pack([tree], max_tokens=8)[0]
    with pytest.raises(ValueError, match="whole trees"):
        term.on(batch, 1.0, True, 1.0)


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"loss term 'few'.*needs"):
        TokenTerm(NLL, "few", lambda tree: [1.0, 2.0]).prepare([group()])
    with pytest.raises(UserError, match=r"leaves outside 0\.\.3"):
        PairTerm(lambda tree: [(0, 4)]).prepare([group()])


def without(responses: Sequence[int]) -> Selection:
    return lambda tree: ~np.isin(np.arange(tree.num_leaves), responses)


def first_two(tree: TokenTree) -> np.ndarray:
    return (tree.position < 5) & (tree.position > 2)


@pytest.mark.slow(but=27)
@pytest.mark.check(but=16)
@pytest.mark.parametrize("max_tokens", [1000, 6])
@pytest.mark.parametrize("aggregation", ["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize(
    ("options", "select", "tokens"),
    [
        ({}, None, (11, 8)),  # of the second response nothing has a gradient, of the third the last two tokens
        ({"kl_coef": 0.1}, None, (11, 11)),
        ({"entropy_coef": 0.01}, without([1]), (11, 10)),
        ({}, first_two, (11, 6)),
        ({"ratio_level": "sequence"}, None, (11, 10)),  # a mean over the whole response
        ({"neg_weight": 0.0}, None, (11, 7)),
    ],
)
def test_what_no_term_reads_leaves_the_trees(options, select, tokens, aggregation, max_tokens):
    tree = group()
    tree.set("path_advantage", [1, 1, 0, 1, 0, 0, 0, 0.5, -1, 0.25, 0, 0, -1])
    tree.set("behaviour_logprob", np.full(tree.num_tokens, -2.0))
    tree.set("ref_logprob", np.full(tree.num_tokens, -2.5))
    term = TokenTerm(Objective(aggregation=aggregation, **options), "actor", select, length_limit=7)
    whole = run([term], [tree], max_tokens=max_tokens, in_pieces=True)
    parts = needed([tree], [term])
    assert (tree.num_tokens, sum(part.num_tokens for part in parts)) == tokens
    ours, _ = make_models("qwen3")
    loss = 0.0
    for batch in pack(parts, max_tokens=max_tokens, in_pieces=True):
        loss += float(backward(ours, batch, [term.on(batch, term.normalizer([tree]), True, 1.0)]).loss)
    assert loss == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    for a, b in zip(gradients(ours), whole[2], strict=True):
        close(a, b, 2e-5)


@pytest.mark.parametrize(
    "options", [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"neg_weight": 0.0}, {"pos_weight": 0.0}], ids=str
)
def test_a_term_knows_by_leaves_whether_it_reads_a_tree(options):
    """Responses without credit, and without a token in the loss; a stored tree is not fetched for it."""
    term, random, seen = TokenTerm(Objective(**options)), np.random.default_rng(0), set()
    for _ in range(40):
        masks = [np.full(len(response), random.random() < 0.5) for response in RESPONSES]
        credit = random.choice([-1.0, 0.0, 0.0, 1.0], 4)
        tree = TokenTree.from_sequences([1, 2, 3], RESPONSES, advantages=credit, loss_masks=masks)
        stored = StoredTree.of(tree)
        stored.place(Here(None))  # nothing can be fetched
        expected = bool(term.extent(tree).any())
        assert term.has_gradient(stored) == term.has_gradient(tree) == expected
        seen.add(expected)
    assert seen == {False, True}


@pytest.mark.parametrize(
    "objective", [Objective(aggregation="batch_token_mean"), Objective(entropy_share=0.2)], ids=["batch", "choice"]
)
def test_a_loss_that_reads_the_batch_keeps_it(objective):
    tree = group()
    tree.set("advantage", [0, 0, 0, 1])
    assert needed([tree], [TokenTerm(objective)]) == [tree]
    assert needed([tree], [PairTerm(PAIRINGS["best_and_worst"])]) == [tree]
    assert needed([tree], [TokenTerm(Objective())])[0].num_leaves == 1


def test_two_terms_that_share_their_weights_keep_responses_whole():
    tree = group()
    tree.set("path_advantage", [1, 1, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, -1])
    tree.set("behaviour_logprob", np.full(tree.num_tokens, -2.0))
    terms = [TokenTerm(Objective(aggregation="seq_mean_token_mean"), name) for name in ("actor", "other")]
    whole = run(terms, [tree])
    parts = needed([tree], terms)
    assert parts[0].num_leaves == 3
    ours, _ = make_models("qwen3")
    for batch in pack(parts, max_tokens=1000):
        backward(ours, batch, [term.on(batch, term.normalizer([tree]), True, 1.0) for term in terms])
    for a, b in zip(gradients(ours), whole[2], strict=True):
        close(a, b, 2e-5)
