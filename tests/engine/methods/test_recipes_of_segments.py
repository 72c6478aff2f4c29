"""Recipes for segments of responses: probes at their ends, plans, temperatures, and losses of their own."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from rolltree.engine.data.tree import TokenTree

from ...support.real_step import along, check_gradient, leaves_of, plain_logprobs, plain_model
from .problem_runs import clipped, given_part, norm

# -- probes ------------------------------------------------------------------------------------------------------------


def probed(tree) -> tuple[list[int], dict[tuple[int, ...], float]]:
    """Return the responses that are trained on, and the mean reward of the probes of each prefix: of the token ids
    before the text that asks for an answer."""
    chains, means = [], dict[tuple[int, ...], list[float]]()
    for leaf in range(tree.num_leaves):
        tokens = tree.token_id[tree.response_rows(leaf)].tolist()
        given = given_part(tree, leaf)[1]
        if given.any():
            means.setdefault(tuple(tokens[: given.argmax()]), []).append(float(tree.rewards["reward"][leaf]))
        else:
            chains.append(leaf)
    return chains, {prefix: float(np.mean(values)) for prefix, values in means.items()}


@pytest.mark.methods
@pytest.mark.parametrize("name", ["mrt", "mrt/seen"])
def test_mrt_adds_the_rise_of_forced_answers(step_of, name):
    steps = step_of(name)
    places, rises = 0, set()
    for tree in steps.judged:
        chains, J = probed(tree)
        assert len(chains) == 3
        assert tree.trained.tolist() == [leaf in chains for leaf in range(tree.num_leaves)]
        R, bonus, first = tree.rewards["reward"].astype(np.float64)[chains], [], np.cumsum(tree.response_length)
        for leaf in chains:
            tokens = tree.token_id[tree.response_rows(leaf)].tolist()
            cuts = [cut for cut in range(0, len(tokens), 3) if tuple(tokens[:cut]) in J]
            assert cuts == [cut for cut in range(0, len(tokens), 3) if cut + 1 < 10]  # no room for an answer later
            rise = np.zeros(len(tokens))
            for begin, end in pairwise(cuts):
                rise[begin:end] = J[tuple(tokens[:end])] - J[tuple(tokens[:begin])]
                rises.add(rise[begin])
            bonus.append(rise)
            places += len(cuts)
        if name == "mrt":
            for leaf, A, rise in zip(chains, norm(R), bonus, strict=True):
                got = tree.path_advantage[first[leaf] - len(rise) : first[leaf]]
                np.testing.assert_allclose(got, A + 0.2 * rise, atol=1e-5)
        else:
            S = R + 0.2 * np.array([rise[::3].sum() for rise in bonus])
            np.testing.assert_allclose(tree.advantage[chains], norm(S), atol=1e-5)
    assert places > 20
    assert len(rises) > 2


@pytest.mark.methods
@pytest.mark.parametrize("name", ["mrt", "eight_x"])
def test_probes_are_in_no_gradient(step_of, name):
    steps = step_of(name)
    start = plain_model(steps, steps.updates[0])
    for number, update in enumerate(steps.updates):
        assert all(tree.trained.all() for tree in update.trees)

        def loss(model, trees=update.trees):
            means, every = [], []
            for tree in trees:
                for leaf in range(tree.num_leaves):
                    lp = plain_logprobs(model, tree, leaf)
                    with torch.no_grad():
                        old = plain_logprobs(start, tree, leaf)
                    if name == "mrt":
                        ends = np.cumsum(tree.response_length)
                        A = torch.from_numpy(tree.path_advantage[ends[leaf] - len(lp) : ends[leaf]].copy())
                        r = (lp - old).exp()
                        means.append(-torch.minimum(r * A, r.clamp(0.8, 1.2) * A).mean())
                    else:
                        node = np.repeat(np.arange(tree.num_nodes), tree.length)[tree.response_rows(leaf)]
                        every.append(-torch.from_numpy(tree.node_advantage[node].copy()) * lp)
            return torch.stack(means).mean() if means else torch.cat(every).mean()

        check_gradient(steps, loss, update=number, tolerance=5e-3)


@pytest.mark.methods
def test_8x_gives_each_step_the_rise_of_its_continuations(step_of):
    steps = step_of("eight_x")
    cuts, rises = 0, set()
    for tree in steps.judged:
        R, chains = tree.rewards["reward"].astype(np.float64), np.flatnonzero(tree.trained).tolist()
        trained = np.concatenate([tree.response_rows(leaf) for leaf in chains])
        others = [tree.response_rows(int(leaf)) for leaf in np.flatnonzero(~tree.trained)]
        begins = [tuple(row for row in other if row in trained) for other in others]  # what they continue
        assert not any(given_part(tree, leaf)[0] for leaf in range(tree.num_leaves))
        decode = steps.orchestrator.tokenizer.decode
        for leaf in chains:
            rows = tree.response_rows(leaf)
            tokens = tree.token_id[rows].tolist()
            es = [decode(tokens[:i]).count("e") for i in range(len(tokens) + 1)]  # a token may hold more than the e
            ends = [i for i in range(1, len(tokens)) if es[i] > es[i - 1]]
            V = {len(tokens): R[leaf]}
            for cut in [0, *ends]:
                mine = R[~tree.trained][[begin == tuple(rows[:cut]) for begin in begins]]
                assert len(mine) == 2
                V[cut] = float(np.mean(mine))
            node = np.repeat(np.arange(tree.num_nodes), tree.length)[rows]
            for begin, end in pairwise(sorted(V)):
                np.testing.assert_allclose(tree.node_advantage[node[begin:end]], V[end] - V[begin], atol=1e-6)
                rises.add(V[end] - V[begin])
            cuts += len(ends)
    assert cuts > 3
    assert len(rises) > 2


# -- plans and temperatures --------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_e2c_gives_credit_to_plans_and_executions(step_of):
    trees = step_of("e2c").trees
    planned = 0
    for tree in trees:
        R = tree.rewards["reward"].astype(np.float64)
        below = [[] for _ in range(tree.num_nodes)]
        for leaf, node in enumerate(tree.leaf_node.tolist()):
            while node >= 0:
                below[node].append(R[leaf])
                node = int(tree.parent[node])
        children = {k: [c for c in range(1, tree.num_nodes) if tree.parent[c] == k] for k in range(tree.num_nodes)}
        assert len(children[0]) == 4
        for k, some in children.items():
            if some:
                V = np.array([np.mean(below[c]) for c in some])
                want = norm(V) if len(some) > 1 else np.zeros(1)
                np.testing.assert_allclose(tree.node_advantage[some], want, atol=1e-5)
            if k and len(some) == 2:
                rows = tree.token_id[tree.start[k] : tree.start[k] + tree.length[k]]
                assert "e" in step_of("e2c").orchestrator.tokenizer.decode(rows)
                planned += 1
    assert planned


@pytest.mark.methods
def test_ead_anneals_the_temperature_and_trains_at_it(step_of):
    steps = step_of("ead")
    seen = set()
    for tree, leaf in leaves_of(steps.trees):
        T = along(tree, leaf, "temperature").numpy()
        want = [1.2 if t < 2 else max(2.2 - math.exp((t - t % 2) / 8), 0.5) for t in range(len(T))]
        np.testing.assert_allclose(T, want, rtol=1e-5)
        seen |= set(T.tolist())
    assert len(seen) > 3
    credit = {id(tree): norm(tree.rewards["reward"]) for tree in steps.trees}
    update, start = steps.updates[1], plain_model(steps, steps.updates[0])
    leaves = [(t, leaf) for t, leaf in leaves_of(update.trees) if np.ptp(t.rewards["reward"]) > 0]

    def tempered(model, tree, leaf):
        every = plain_logits(model, tree, leaf) / along(tree, leaf, "temperature")[:, None]
        rows = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))
        return every.log_softmax(-1).gather(1, rows[:, None])[:, 0]

    def loss(model):
        parts = []
        for tree, leaf in leaves:
            with torch.no_grad():
                old = tempered(start, tree, leaf)
            parts.append(clipped(tempered(model, tree, leaf), old, float(credit[id(tree)][leaf])).mean())
        return torch.stack(parts).mean()

    check_gradient(steps, loss, update=1, tolerance=5e-3)


def plain_logits(model, tree: TokenTree, leaf: int) -> torch.Tensor:
    first = int(tree.leaf_prompt[leaf])
    path = torch.from_numpy(tree.token_id[tree.path_rows(leaf)].astype(np.int64))
    return model(input_ids=path[None]).logits[0, first - 1 : -1].float()


# -- spans -------------------------------------------------------------------------------------------------------------


def before(steps, tree, leaf: int, end: str) -> np.ndarray:
    """Tell of each token of a response if some of its text is before ``end``."""
    tokens, decode = tree.token_id[tree.response_rows(leaf)].tolist(), steps.orchestrator.tokenizer.decode
    place = next((i for i in range(len(tokens)) if end in decode(tokens[: i + 1])), len(tokens))
    shares = place < len(tokens) and decode(tokens[place : place + 1]).find(end) > 0
    return np.arange(len(tokens)) < place + shares


@pytest.mark.methods
def test_gtr_clones_thoughts_and_reinforces_actions(step_of):
    steps = step_of("gtr")
    start, both = plain_model(steps, steps.updates[0]), 0
    for number, update in enumerate(steps.updates):

        def loss(model, trees=update.trees):
            policy, thoughts = [], []
            for tree in trees:
                A = norm(tree.rewards["reward"])
                for leaf in range(tree.num_leaves):
                    lp = plain_logprobs(model, tree, leaf)
                    if given_part(tree, leaf)[0]:
                        thoughts.append(-lp[torch.from_numpy(before(steps, tree, leaf, "="))])
                        assert 0 < len(thoughts[-1]) < len(lp)
                        continue
                    with torch.no_grad():
                        old = plain_logprobs(start, tree, leaf)
                    acts = torch.from_numpy(~before(steps, tree, leaf, "e"))
                    if acts.any():
                        policy.append(clipped(lp, old, float(A[leaf]))[acts].mean())
            assert len(thoughts) == len(trees)
            return torch.stack(policy).mean() + torch.cat(thoughts).mean()

        model = plain_model(steps, update)
        loss(model).backward()
        off = sum(float((update.gradient[k] - p.grad).norm() ** 2) for k, p in model.named_parameters())
        assert off <= 25e-6 * sum(float(p.grad.norm() ** 2) for p in model.parameters()), number
        both += any(
            0 < before(steps, tree, leaf, "e").sum() < len(tree.response_rows(leaf))
            for tree in update.trees
            for leaf in range(tree.num_leaves)
            if not given_part(tree, leaf)[0]
        )
    assert both == len(steps.updates), "no response has both kinds of tokens"
