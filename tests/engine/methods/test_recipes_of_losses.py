"""Recipes whose losses relate the responses of a group, or weigh given and refined responses, against formulas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rolltree.engine import UserError
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.methods.group_losses import Pacs, Ranking, Regression
from rolltree.engine.methods.groups import More, critique
from rolltree.kernels import PathIndex, PolicyFields

from ...support.real_step import Steps, leaves_of, plain_logprobs, plain_model
from .problem_runs import clipped, marked, norm


def same_gradient(steps: Steps, loss_of: Callable[[Any], torch.Tensor], update: int, tolerance: float = 5e-3) -> None:
    """Check an update's gradient alone: the run's metric of the loss is the first term's."""
    model = plain_model(steps, steps.updates[update])
    loss_of(model).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    size = torch.stack([g.norm() for g in expected.values()]).norm()
    off = torch.stack([(steps.updates[update].gradient[name] - g).norm() for name, g in expected.items()]).norm()
    assert size > 0, "the formula itself has no gradient, so nothing was compared"
    assert off <= tolerance * size, f"gradient off by {off / size:.2e} of its norm"


def rewards_of(tree: TokenTree) -> np.ndarray:
    return tree.rewards["reward"].astype(np.float64)


def base_of(steps: Steps, update: int, name: str) -> Any:
    """Return the model that log-probs are compared with: before the step's updates, or before the run."""
    per_step = len(steps.updates) // (2 if name == "copg" else 1)
    first = 0 if name == "copg" else update - update % per_step
    return plain_model(steps, steps.updates[first])


# -- losses of groups --------------------------------------------------------------------------------------------------


def regression(tree: TokenTree, S: list[torch.Tensor], D: list[torch.Tensor], name: str) -> torch.Tensor:
    R = rewards_of(tree)
    A = norm(R) if name == "reg_grpo" else R - R.mean()
    mean = torch.stack(D).mean()
    return torch.stack([(float(A[i]) - 0.5 * (D[i] - mean)) ** 2 for i in range(len(R))]).sum()


def pacs(tree: TokenTree, S: list[torch.Tensor], D: list[torch.Tensor], name: str) -> torch.Tensor:
    found = torch.zeros(())
    for i, R in enumerate(rewards_of(tree)):
        psi = D[i] - torch.stack([D[j] for j in range(len(D)) if j != i]).mean()
        found = found - float(R) * torch.sigmoid(psi).log() - float(1 - R) * (1 - torch.sigmoid(psi)).log()
    return found


def ranking(tree: TokenTree, S: list[torch.Tensor], D: list[torch.Tensor], name: str) -> torch.Tensor:
    R, p = rewards_of(tree), [s / int(n) for s, n in zip(S, tree.response_length, strict=True)]
    found = -S[int(R.argmax())]
    for i in range(len(R)):
        for j in range(len(R)):
            if R[i] < R[j] and p[i] > p[j]:
                found = found + p[i] - p[j]
    return found


LOSSES = {"reg_grpo": regression, "copg": regression, "pacs": pacs, "rrhf": ranking}


@pytest.mark.parametrize("name", marked(*LOSSES))
def test_a_loss_of_groups_has_the_gradient_of_its_formula(step_of, name):
    steps = step_of(name)
    update = len(steps.updates) - 1  # in the first update log-ratios are 0; copg's is in the second step
    base, trees = base_of(steps, update, name), steps.updates[update].trees

    def loss(model):
        found = torch.zeros(())
        for tree in trees:
            lp = [plain_logprobs(model, tree, leaf) for leaf in range(tree.num_leaves)]
            with torch.no_grad():
                old = [plain_logprobs(base, tree, leaf) for leaf in range(tree.num_leaves)]
            D = [(a - b).sum() for a, b in zip(lp, old, strict=True)]
            found = found + LOSSES[name](tree, [a.sum() for a in lp], D, name)
        return found / (len(trees) if name == "rrhf" else sum(tree.num_leaves for tree in trees))

    same_gradient(steps, loss, update)
    assert any(np.ptp(tree.rewards["reward"]) > 0 for tree in trees)


@pytest.mark.methods
def test_copg_contrasts_every_pair_of_a_group(step_of):
    """The gradient of the regression is that of the pairs: -(2 beta / n) sum ((R_a - R_b) - beta (D_a - D_b)) (S_a -
    S_b), over the number of responses."""
    steps = step_of("copg")
    update = len(steps.updates) - 1
    base, trees = base_of(steps, update, "copg"), steps.updates[update].trees

    def loss(model):
        found = torch.zeros(())
        for tree in trees:
            S = [plain_logprobs(model, tree, leaf).sum() for leaf in range(tree.num_leaves)]
            with torch.no_grad():
                ref = [plain_logprobs(base, tree, leaf).sum() for leaf in range(tree.num_leaves)]
            R = rewards_of(tree)
            for a in range(len(R)):
                for b in range(a):
                    gap = float(R[a] - R[b]) - 0.5 * (S[a] - ref[a] - S[b] + ref[b]).detach()
                    found = found - 2 * 0.5 / len(R) * gap * (S[a] - S[b])
        return found / sum(tree.num_leaves for tree in trees)

    same_gradient(steps, loss, update)


LENGTHS, GROUPS = [3, 1, 2, 4, 2], [4, 4, 4, 7, 7]
A_OF, R_OF = [1.0, -0.5, -0.5, 0.8, -0.8], [1.0, 0.0, 0.5, 1.0, 1.0]
BEST = [1.0, 0, 0, 1.0, 0]


def flat_paths() -> PathIndex:
    end = torch.tensor(LENGTHS).cumsum(0)
    return PathIndex(
        target_end=torch.repeat_interleave(end, torch.tensor(LENGTHS)),
        leaf_target=end - 1,
        leaf_length=torch.tensor(LENGTHS),
        leaf_weight=None,
        leaf_advantage=torch.tensor(A_OF, dtype=torch.float64),
    )


@pytest.mark.parametrize("name", ["regression old", "regression reference", "pacs", "ranking"])
def test_a_loss_of_two_groups_is_that_of_the_formula(name):
    lp, old, ref = torch.randn(3, sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(len(lp), dtype=torch.float64)
    fields = PolicyFields(adv_pos=none, adv_neg=none, weight=none + 1, old_logprob=old, ref_logprob=ref)
    columns = {
        "of_group": torch.tensor(GROUPS), "verdict": torch.tensor(R_OF, dtype=torch.float64),
        "best_of_group": torch.tensor(BEST, dtype=torch.float64),
    }  # fmt: skip
    make = {"pacs": lambda: Pacs(0.7), "ranking": Ranking}.get(name, lambda: Regression(0.3, name.split()[-1]))
    given = {"logprob": lp, "fields": fields, "columns": columns, "paths": flat_paths()}
    part = make()
    found, _ = part.loss(**{k: v for k, v in given.items() if k in inspect.signature(part.loss).parameters})

    cuts = torch.tensor(LENGTHS).cumsum(0)[:-1]
    base = ref if name.endswith("reference") else old
    D = [float(x.sum()) for x in (lp - base).tensor_split(cuts)]
    p = [float(x.mean()) for x in lp.tensor_split(cuts)]
    want = 0.0
    for members in ([0, 1, 2], [3, 4]):
        mean = sum(D[i] for i in members) / len(members)
        for i in members:
            if name.startswith("regression"):
                want += (A_OF[i] - 0.3 * (D[i] - mean)) ** 2
            elif name == "pacs":
                psi = 0.7 * (D[i] - sum(D[j] for j in members if j != i) / (len(members) - 1))
                q = 1 / (1 + math.exp(-psi))
                want -= R_OF[i] * math.log(q) + (1 - R_OF[i]) * math.log(1 - q)
            else:
                want += sum(max(0.0, p[i] - p[j]) for j in members if R_OF[i] < R_OF[j])
                want -= BEST[i] * LENGTHS[i] * p[i]
    assert float(found) == pytest.approx(want, rel=1e-9)


def test_the_first_of_the_highest_reward_is_imitated():
    tree = TokenTree.from_sequences([1], [[3], [2], [4]], behaviour_logprobs=[[-1.0]] * 3)
    tree.rewards["reward"] = np.array([0, 1, 1], np.float32)
    other = TokenTree.from_sequences([1], [[3], [2]], behaviour_logprobs=[[-1.0]] * 2)
    other.rewards |= {"reward": np.array([0, 5], np.float32), "verifier": np.array([1, 0], np.float32)}
    part = Ranking()
    part.prepare([tree, other])
    assert tree.columns["best_of_group"].tolist() == [0, 1, 0]
    assert other.columns["best_of_group"].tolist() == [1, 0]  # by the verdict, not by the shaped reward
    assert [set(t.columns["of_group"].tolist()) for t in (tree, other)] == [{0}, {1}]
    assert part.normalizer([tree, other]) == 2


def test_what_losses_of_groups_cannot_take_is_said():
    for options in ({"beta": 0.0}, {"base": "teacher"}):
        with pytest.raises(ValueError, match="needs beta above 0 and a `base` of 'old' or 'reference'"):
            Regression(**options)
    tree = TokenTree.from_sequences([1], [[2], [3]], behaviour_logprobs=[[-1.0], [-1.0]])
    tree.rewards["reward"] = np.array([0.0, 1.5], np.float32)
    with pytest.raises(ValueError, match="needs rewards within"):
        Pacs().prepare([tree])


# -- pairs of a tree search --------------------------------------------------------------------------------------------


def pairs_of(tree: TokenTree) -> set[tuple[int, int]]:
    """Return the pairs of responses that part at a node, from the paths themselves."""
    R, paths = rewards_of(tree), []
    for node in tree.leaf_node.tolist():
        path = [node]
        while tree.parent[path[0]] >= 0:
            path.insert(0, int(tree.parent[path[0]]))
        paths.append(path)
    found = set()
    for node in range(tree.num_nodes):
        below: dict[int, list[int]] = {}
        for leaf, path in enumerate(paths):
            if node in path[:-1]:
                below.setdefault(path[path.index(node) + 1], []).append(leaf)
        if len(below) > 1:
            value = {child: np.mean(R[leaves]) for child, leaves in below.items()}
            best, worst = max(value, key=value.__getitem__), min(value, key=value.__getitem__)
            if value[best] > value[worst]:
                found.add((max(below[best], key=R.__getitem__), min(below[worst], key=R.__getitem__)))
    return found


@pytest.mark.methods
def test_itool_prefers_the_better_step_of_a_search(step_of):
    steps = step_of("itool")
    base, trees = base_of(steps, 1, "itool"), steps.updates[1].trees
    pairs = [(tree, *pair) for tree in trees for pair in sorted(pairs_of(tree))]
    assert len(pairs) > 2

    def total(model, tree, leaf):
        return plain_logprobs(model, tree, leaf).sum()

    def loss(model):
        found = []
        for tree, w, l in pairs:
            with torch.no_grad():
                ref = total(base, tree, w) - total(base, tree, l)
            found.append(-logsigmoid(0.1 * (total(model, tree, w) - total(model, tree, l) - ref)))
        return torch.stack(found).mean()

    same_gradient(steps, loss, 1)
    seen = {int(tree.num_leaves) for tree in trees}
    assert seen != {1}
    assert any(tree.num_nodes > tree.num_leaves + 1 for tree in trees), "no tree branches below the prompt"


# -- given, refined and observed responses -----------------------------------------------------------------------------


@pytest.mark.methods
def test_rl_plus_mixes_the_denominator_of_given_tokens(step_of):
    steps = step_of("rl_plus")
    start, trees = base_of(steps, 1, "rl_plus"), steps.updates[1].trees
    given = [(t, k) for t, k in leaves_of(trees) if (t.origin[t.response_rows(k)] == Origin.INJECTED).all()]
    own = [(t, k) for t, k in leaves_of(trees) if (t.origin[t.response_rows(k)] == Origin.SAMPLED).all()]
    assert len(given) == len(trees)
    assert len(given) + len(own) == len(leaves_of(trees))

    def loss(model):
        outer, inner = [], []
        for tree, leaf in [*given, *own]:
            A, lp = float(norm(rewards_of(tree))[leaf]), plain_logprobs(model, tree, leaf)
            with torch.no_grad():
                old = plain_logprobs(start, tree, leaf)
            if (tree, leaf) in own:
                inner.append(clipped(lp, old, A).mean())
            else:
                p = lp.exp()
                outer.append(-(A * (1 - p.detach()) ** 2 if A > 0 else A) * 2 * p / (old.exp() + 1))
        return torch.stack(inner).mean() + torch.cat(outer).mean()

    same_gradient(steps, loss, 1)


def refined(steps: Steps) -> list[TokenTree]:
    """Return the trees with a refinement, and check that they are trained under the plain prompt."""
    for tree in steps.trees:
        plain = steps.orchestrator.tokenizer(tree.meta["prompt_text"])["input_ids"]
        assert tree.token_id[: tree.prompt_length].tolist() == plain
    return [tree for tree in steps.trees if tree.other_prompt.any()]


@pytest.mark.methods
def test_right_refinements_join_a_group(step_of):
    steps = step_of("critique_grpo")
    with_some = refined(steps)
    assert with_some
    for tree in with_some:
        assert (tree.other_prompt == 0).sum() == 4
        assert (tree.rewards["reward"][tree.other_prompt == 0] < 1).any()
        assert (tree.rewards["reward"][tree.other_prompt == 1] >= 1).all()
        np.testing.assert_allclose(tree.advantage, norm(rewards_of(tree)), atol=1e-5)

    def old(tree, leaf):
        return torch.from_numpy(tree.behaviour_logprob[tree.response_rows(leaf)])

    def loss(model):
        own, other = [], []
        for tree, leaf in leaves_of(steps.updates[1].trees):
            A, lp = float(norm(rewards_of(tree))[leaf]), plain_logprobs(model, tree, leaf)
            if tree.other_prompt[leaf]:
                other.append(-A * lp.exp() / (lp.exp() + 0.1))
            elif np.ptp(tree.rewards["reward"]) > 0:
                own.append(clipped(lp, old(tree, leaf), A).mean())
        return torch.stack(own).mean() + (torch.cat(other).mean() if other else 0)

    assert any(tree.other_prompt.any() for tree in steps.updates[1].trees)
    same_gradient(steps, loss, 1)


@pytest.mark.methods
def test_rltf_sd_learns_second_attempts_alone(step_of):
    steps = step_of("rltf_sd")
    with_some = refined(steps)
    assert with_some
    assert all((tree.other_prompt == 1).all() and tree.num_leaves == 4 for tree in with_some)
    assert all((t.rewards["reward"] >= 1).all() for t in steps.trees if not t.other_prompt.any())
    seen = [tree for tree in steps.trees if np.ptp(tree.rewards["reward"]) > 0]

    def loss(model):
        found = []
        for tree, leaf in leaves_of(seen):
            old = torch.from_numpy(tree.behaviour_logprob[tree.response_rows(leaf)])
            A = float(norm(rewards_of(tree))[leaf])
            found.append(clipped(plain_logprobs(model, tree, leaf), old, A).mean())
        return torch.stack(found).mean()

    same_gradient(steps, loss, 0)


@pytest.mark.methods
def test_cog_rethinker_imitates_right_refinements(step_of):
    steps = step_of("cog_rethinker")
    with_some = refined(steps)
    assert with_some
    assert all((tree.rewards["reward"][tree.other_prompt == 0] < 1).all() for tree in with_some)
    update = next(k for k, u in enumerate(steps.updates) if any(tree.other_prompt.any() for tree in u.trees))
    trees = steps.updates[update].trees

    def loss(model):
        own, other = [], []
        for tree, leaf in leaves_of(trees):
            lp, R = plain_logprobs(model, tree, leaf), rewards_of(tree)
            if tree.other_prompt[leaf]:
                other.append(-lp)
            elif np.ptp(R) > 0:
                old = torch.from_numpy(tree.behaviour_logprob[tree.response_rows(leaf)])
                own.append(clipped(lp, old, float(norm(R)[leaf])).mean())
        return torch.stack(own).mean() + torch.cat(other).mean()

    same_gradient(steps, loss, update)


def test_the_problem_comes_back_with_its_worst_attempt():
    tree = TokenTree.from_sequences([1], [[2], [3], [4]], behaviour_logprobs=[[-1.0]] * 3)
    tree.meta |= {"attempt": 0, "problem": "1 + {draft}"}
    tree.rewards["reward"] = np.array([1, 0, 0.5], np.float32)
    answer = critique(tree, ["a", "b", "c"], template="{prompt} not {draft}!")
    assert answer == More(3, "1 + {draft} not b!")
    assert critique(tree, ["a", "b", "c"], failed=True) is None
    tree.rewards["reward"][:] = 1
    assert critique(tree, ["a", "b", "c"]) is None
    for options in ({"keep": "all"}, {"template": "{prompt}"}):
        with pytest.raises(UserError, match="needs a `keep` of"):
            critique(tree, ["a", "b", "c"], **options)


@pytest.mark.methods
def test_rltf_fm_foretells_observations(step_of):
    steps = step_of("rltf_fm")
    start, trees = base_of(steps, 1, "rltf_fm"), steps.updates[1].trees
    told = 0

    def loss(model):
        nonlocal told
        acted, heard = [], []
        for tree, leaf in leaves_of(trees):
            origin = torch.from_numpy(tree.origin[tree.response_rows(leaf)].astype(np.int64))
            lp, R = plain_logprobs(model, tree, leaf), rewards_of(tree)
            heard.append(-lp[origin == int(Origin.OBSERVATION)])
            told += int((origin == int(Origin.OBSERVATION)).sum())
            if np.ptp(R) > 0:
                with torch.no_grad():
                    old = plain_logprobs(start, tree, leaf)
                acted.append(clipped(lp, old, float(norm(R)[leaf]))[origin == int(Origin.SAMPLED)].mean())
        return torch.stack(acted).mean() + 0.1 * torch.cat(heard).mean()

    same_gradient(steps, loss, 1)
    assert told > 4
