"""Recipes that change how responses are sampled: demonstrations, predictions, tries, plans, temperatures."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest
import torch

from rolltree.engine.data.segment import LeafStatus, Origin

from ...support.real_step import along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from .problem_runs import (
    by_step,
    clipped,
    given_part,
    marked,
    norm,
    row_of,
)

# -- demonstrations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked("prefix_rft", "dr_po"))
def test_some_members_begin_with_a_part_of_the_solution(step_of, toml, name):
    steps = step_of(name)
    shares = []
    for tree in steps.trees:
        solution = steps.orchestrator.tokenizer(row_of(tree, toml)["solution"], add_special_tokens=False)["input_ids"]
        begun = [given_part(tree, leaf) for leaf in range(tree.num_leaves)]
        assert sum(bool(ids) for ids, _ in begun) == (1 if name == "prefix_rft" else 2)
        for ids_, given in begun:
            assert ids_ == solution[: len(ids_)]
            assert not ids_ or given[: len(ids_)].all()
            shares += [len(ids_) / len(solution)] if ids_ else []
    assert min(shares) < 0.5 < max(shares)


def test_prefix_rft_trains_on_the_uncertain_tokens_of_the_prefix(step_of):
    steps = step_of("prefix_rft")
    start, tried = plain_model(steps, steps.updates[0]), 0
    for number, update in enumerate(steps.updates):
        credit = {id(tree): norm(tree.rewards["reward"]) for tree in update.trees}
        seen = [tree for tree in update.trees if np.ptp(tree.rewards["reward"]) > 0]
        assert seen

        def loss(model, seen=seen, credit=credit):
            parts = []
            for tree, leaf in leaves_of(seen):
                lp = plain_logprobs(model, tree, leaf, 0.1)
                with torch.no_grad():
                    every = plain_logprobs(start, tree, leaf, 0.1, vocabulary=True)
                    old = plain_logprobs(start, tree, leaf, 0.1)
                entropy = -(every.exp() * every).sum(1).numpy()
                _, given = given_part(tree, leaf)
                places = np.flatnonzero(given)
                counted = ~given
                if len(places):
                    counted[places[np.argsort(-entropy[places])[: max(1, round(0.2 * len(places)))]]] = True
                parts.append(clipped(lp, old, float(credit[id(tree)][leaf]))[torch.from_numpy(counted)].mean())
            return torch.stack(parts).mean()

        check_gradient(steps, loss, update=number, tolerance=5e-3)
        tried += sum(given_part(tree, leaf)[1].sum() for tree, leaf in leaves_of(seen))
    assert tried > 5


@pytest.mark.methods
def test_dr_po_trains_on_no_given_token(step_of):
    for tree in step_of("dr_po").trees:
        assert not tree.loss_mask[tree.origin == Origin.INJECTED].any()
        np.testing.assert_allclose(tree.advantage, norm(tree.rewards["reward"]), atol=1e-5)


@pytest.mark.methods
@pytest.mark.parametrize("name", ["visurf", "ampo", "hpt"])
def test_solutions_join_groups_and_are_trained_on(step_of, toml, name):
    steps = step_of(name)
    end = steps.orchestrator.tokenizer.eos_token_id
    demonstrated = 0
    for tree in steps.trees:
        given = [leaf for leaf in range(tree.num_leaves) if given_part(tree, leaf)[0]]
        sampled = [leaf for leaf in range(tree.num_leaves) if leaf not in given]
        failed = not (tree.rewards["reward"][sampled] >= 1).any()
        assert len(given) == (1 if name == "visurf" or failed else 0)
        assert len(sampled) == {"visurf": 4, "ampo": 2 if failed else 3, "hpt": 3}[name]
        text = steps.orchestrator.tokenizer(row_of(tree, toml)["solution"], add_special_tokens=False)["input_ids"]
        for leaf in given:
            assert given_part(tree, leaf)[0] == [*text, end]
            assert tree.rewards["reward"][leaf] == 1
        demonstrated += len(given)
    assert demonstrated > 1
    start = plain_model(steps, steps.updates[0])
    for number, update in enumerate(steps.updates):
        trees = update.trees

        def loss(model, trees=trees):
            policy, given = [], []
            for tree, leaf in leaves_of(trees):
                aided = any(given_part(tree, k)[0] for k in range(tree.num_leaves))
                R = tree.rewards["reward"].astype(np.float64)
                lp = plain_logprobs(model, tree, leaf)
                with torch.no_grad():
                    old = plain_logprobs(start, tree, leaf)
                if name == "hpt" and given_part(tree, leaf)[0]:
                    given.append(-lp)
                elif (name != "hpt" or not aided) and np.ptp(R) > 0:
                    policy.append(clipped(lp, old, float(norm(R)[leaf])).mean())
            both = torch.stack(policy).mean()
            return both + torch.cat(given).mean() if given else both

        model = plain_model(steps, update)
        loss(model).backward()
        off = sum(float((update.gradient[k] - p.grad).norm() ** 2) for k, p in model.named_parameters())
        assert off <= 25e-6 * sum(float(p.grad.norm() ** 2) for p in model.parameters()), number


@pytest.mark.methods
def test_igrpo_trains_on_the_second_group_alone(step_of, toml):
    steps = step_of("igrpo")
    decode = steps.orchestrator.tokenizer.decode
    drafts = set()
    assert len(steps.trees) == 6
    for tree in steps.trees:
        prompt = decode(tree.token_id[: tree.prompt_length])
        found = re.fullmatch(r"(\d+ \+ 3 =) after (.*)\n", prompt, re.DOTALL)
        assert found is not None
        assert found[1] == row_of(tree, toml)["prompt"]
        drafts.add(found[2])
        assert tree.num_leaves == 4
        assert tree.meta["attempt"] == 1
    assert len(drafts) > 1
    assert any(drafts)


@pytest.mark.methods
def test_the_swarm_trains_on_groups_of_another_policy(toml, tmp_path):
    """Old log-probs are this policy's at the start of the step, not those of the policy that sampled."""
    flat = ("--rollout.n=4", "--trainer.lr=0.02", "--trainer.prompts_per_step=6", "--trainer.self_check=false")
    unset = ("rollout.program", "rollout.program_options", "algorithm.advantage")
    other = take_steps(toml, tmp_path / "other", *flat, "--seed=9", "--trainer.steps=2", unset=unset)
    file = other.orchestrator.options.directory / "rollouts" / "step_000002.parquet"
    mine = ("--recipe=sapo_swarm", f"--replay.paths=['{file}']")
    steps = take_steps(toml, tmp_path / "mine", *flat, *mine, unset=unset)
    assert sum("replayed" in tree.meta for tree in steps.trees) == 3
    assert len(steps.trees) == 6
    start, drift = plain_model(steps, steps.updates[0]), 0.0
    for number, update in enumerate(steps.updates):
        seen = [tree for tree in update.trees if np.ptp(tree.rewards["reward"]) > 0]
        assert any("replayed" in tree.meta for tree in seen)

        def loss(model, seen=seen):
            parts = []
            for tree, leaf in leaves_of(seen):
                with torch.no_grad():
                    old = plain_logprobs(start, tree, leaf)
                A = float(norm(tree.rewards["reward"])[leaf])
                parts.append(clipped(plain_logprobs(model, tree, leaf), old, A).mean())
            return torch.stack(parts).mean()

        check_gradient(steps, loss, update=number, tolerance=5e-3)
        for tree, leaf in leaves_of([tree for tree in seen if "replayed" in tree.meta]):
            with torch.no_grad():
                off = plain_logprobs(start, tree, leaf) - along(tree, leaf, "behaviour_logprob")
            drift = max(drift, float(off.abs().max()))
    assert drift > 0.1, "the other policy is this one"


# -- predictions -------------------------------------------------------------------------------------------------------


def test_masa_rewards_foresight(step_of):
    steps = step_of("masa")
    end = steps.orchestrator.tokenizer.eos_token_id
    decode = functools.partial(steps.orchestrator.tokenizer.decode, skip_special_tokens=True)
    sizes, cut, cut_tokens, foreseen = set(), 0, 0, 0
    for tree in steps.judged:
        asked = np.array([bool(given_part(tree, leaf)[0]) for leaf in range(tree.num_leaves)])
        assert asked.sum() == 2
        given, want = tree.rewards["verifier"].astype(np.float64), tree.rewards["verifier"].astype(np.float64).copy()
        p, said_shares, said_lengths = (given[~asked] == 1).mean(), [], []
        m = tree.response_length[~asked][given[~asked] == 1].mean() if p else None
        for leaf in np.flatnonzero(asked):
            ids_, where = given_part(tree, leaf)
            assert decode(ids_) == "? "
            rows = tree.response_rows(leaf)
            said = re.findall(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", decode(tree.token_id[rows[~where]]))
            q = float(said[0][0]) / (100 if said[0][1] else 1) if said else None
            want[leaf] = 0 if q is None or q > 1 else 1 - abs(q - p)
            said_shares += [] if q is None or q > 1 else [q]
            length = float(said[1][0]) if len(said) > 1 and not said[1][1] and float(said[1][0]) else None
            said_lengths += [] if length is None else [length]
            if m is not None:
                want[leaf] = (want[leaf] + (0 if length is None else max(0, 1 - abs(length - m) / m))) / 2
        rest = np.flatnonzero(~asked)[1:]
        if said_lengths:
            most = max(1, round(2.0 * np.mean(said_lengths)))
            assert (tree.response_length[rest] <= most).all()
            ended = tree.token_id[[tree.response_rows(int(leaf))[-1] for leaf in rest]] == end
            at_most = (tree.response_length[rest] == most) & (most < 10) & ~ended
            cut, cut_tokens = cut + at_most.sum(), cut_tokens + most * at_most.sum()
            assert (tree.status[rest[at_most]] == LeafStatus.LENGTH).all()
            foreseen += 1
        closed = bool(said_shares) and np.mean(said_shares) in (0.0, 1.0)
        assert tree.num_leaves == (3 if closed else 8)  # one response and two predictions, or all
        sizes.add(tree.num_leaves)
        np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-6)
        A = np.zeros(tree.num_leaves)
        A[asked], A[~asked] = norm(want[asked]), norm(want[~asked])
        np.testing.assert_allclose(tree.advantage, A, atol=2e-5)
    assert sizes == {3, 8}
    assert foreseen > 2
    assert cut > 1
    assert [row["rollout/cut"] for row in steps.rows] == [cut]
    assert [row["rollout/cut_tokens"] for row in steps.rows] == [cut_tokens]


@pytest.mark.methods
def test_v_0_samples_what_is_uncertain(step_of, toml):
    trees = step_of("v_0").trees
    assert {row_of(tree, toml)["prior"] for tree in trees} == {0.25, 0.5, 0.75, 0.9}
    for tree in trees:
        p = row_of(tree, toml)["prior"]
        fits = [n for n in range(2, 7) if 1 - p**n - (1 - p) ** n >= 0.9]
        assert tree.num_leaves == (min(fits) if fits else 6)
    assert {tree.num_leaves for tree in trees} == {5, 6}


def test_v_05_fuses_the_prediction_and_asks_for_more(step_of, toml):
    steps = step_of("v_05")
    sizes = set()
    for tree in steps.trees:
        R, V = tree.rewards["reward"].astype(np.float64), row_of(tree, toml)["prior"]
        n, mu, s2 = len(R), R.mean(), R.var(ddof=1)
        e = s2 / n
        w = e / (e + (V - mu) ** 2) if mu != V else 0.0
        np.testing.assert_allclose(tree.advantage, R - (w * V + (1 - w) * mu), atol=1e-5)
        far = [k for k in (4, 8, 12) if abs(R[:k].mean() - V) <= math.sqrt(max(R[:k].var(ddof=1), V * (1 - V)) / k)]
        assert n == (min(far) if far else 16)
        sizes.add(n)
    assert len(sizes) > 1


def foreseen(history: list[tuple[str, float]], text: str) -> float | None:
    """Return the mean of ``history``'s rewards, weighed by the similarity of the texts' words."""
    if not history:
        return None
    split = [re.findall(r"\w+|[^\w\s]", other) for other, _ in history]
    words = sorted({word for some in split for word in some})
    count = np.array([[some.count(word) for word in words] for some in split], np.float64)
    rarity = np.log((1 + len(split)) / (1 + (count > 0).sum(0)))
    mine = np.array([re.findall(r"\w+|[^\w\s]", text).count(word) for word in words]) * rarity
    size = np.linalg.norm(count * rarity, axis=1) * np.linalg.norm(mine)
    cosine = np.divide(count * rarity @ mine, size, out=np.zeros(len(split)), where=size > 0)
    weight = np.exp((cosine - 1) / 0.2)
    return float(weight @ [mean for _, mean in history] / weight.sum())


def seen_before(steps, number: int) -> list[tuple[str, float]]:
    """Return text and mean reward of the groups before a step, in the order of steps and problems."""
    found = []
    for trees in by_step(steps)[:number]:
        for tree in sorted(trees, key=lambda tree: tree.meta["prompt_id"]):
            found.append((tree.meta["prompt_text"].strip(), float(tree.rewards["reward"].mean())))
    return found


@pytest.mark.methods
def test_v_0_predicts_from_the_problems_seen_before(step_of):
    steps = step_of("v_0/seen")
    sizes, means = set(), set()
    for number, trees in enumerate(by_step(steps)):
        history = seen_before(steps, number)
        for tree in trees:
            p = foreseen(history, tree.meta["prompt_text"].strip())
            if p is None:
                assert tree.num_leaves == 4
                continue
            fits = [n for n in range(2, 6) if 1 - p**n - (1 - p) ** n >= 0.9]
            assert 0.05 < p < 0.95
            assert tree.num_leaves == (min(fits) if fits else 6)
            sizes.add(tree.num_leaves)
            means.add(p - np.mean([mean for _, mean in history]))
    assert len(sizes) > 1
    assert max(means) > 0.05, "the words of problems make no difference here"


@pytest.mark.methods
def test_v_05_fuses_the_prediction_from_the_problems_seen_before(step_of):
    steps = step_of("v_05/seen")
    sizes, moved = set(), 0.0
    for number, trees in enumerate(by_step(steps)):
        history = seen_before(steps, number)
        for tree in trees:
            R, V = tree.rewards["reward"].astype(np.float64), foreseen(history, tree.meta["prompt_text"].strip())
            n, mu = len(R), R.mean()
            if V is None:
                assert n == 4
                V = mu
            e = R.var(ddof=1) / n
            w = e / (e + (V - mu) ** 2) if mu != V else 0.0
            np.testing.assert_allclose(tree.advantage, R - (w * V + (1 - w) * mu), atol=1e-5)
            moved = max(moved, abs(w * (V - mu)))
            if history:
                errors = [(k, math.sqrt(max(R[:k].var(ddof=1), V * (1 - V)) / k)) for k in (4, 8, 12)]
                beyond = {k: abs(R[:k].mean() - V) - error for k, error in errors}
                if all(abs(off) > 1e-9 for off in beyond.values()):  # not decided by rounding
                    near = [k for k, off in beyond.items() if off < 0]
                    assert n == (min(near) if near else 16)
                    sizes.add(n)
    assert len(sizes) > 1
    assert moved > 0.01


# -- how responses are sampled -----------------------------------------------------------------------------------------


@pytest.mark.methods
def test_ufo_tries_again_after_wrong_responses(step_of):
    steps = step_of("ufo")
    tokenizer = steps.orchestrator.tokenizer
    again = tokenizer(" again ", add_special_tokens=False)["input_ids"]
    tried = set()
    for tree in steps.trees:
        for leaf in range(tree.num_leaves):
            rows = tree.response_rows(leaf)
            tokens = tree.token_id[rows].tolist()
            given = given_part(tree, leaf)[1]
            starts = [i for i in range(len(given)) if given[i] and (i == 0 or not given[i - 1])]
            for at in starts:
                assert tokens[at : at + len(again)] == again
                assert tokens[at - 1] == tokenizer.eos_token_id
                before = tokenizer.decode(tokens[:at], skip_special_tokens=True)
                assert sum(map(ord, before)) % 2 == 0, "a right response went on"
            assert len(starts) <= 2
            tried.add(len(starts))
            shaped = tree.rewards["verifier"][leaf] * 0.5 ** len(starts)
            assert tree.rewards["reward"][leaf] == pytest.approx(shaped)
            if len(starts) < 2 and tokens[-1] == tokenizer.eos_token_id and len(tokens) + len(again) < 40:
                assert tree.rewards["verifier"][leaf] == 1
    assert len(tried) > 1


@pytest.mark.methods
def test_vl_rethinker_forces_a_second_thought_and_replays(step_of):
    steps = step_of("vl_rethinker")
    thoughts = 0
    for tree in steps.trees:
        for leaf in range(tree.num_leaves):
            given = given_part(tree, leaf)[1].astype(int)
            thoughts += int((np.diff(given, prepend=0) > 0).sum())
    assert thoughts > 3
    later = [tree for update in steps.updates[2:] for tree in update.trees if "replayed" in tree.meta]
    assert later
    assert all(np.ptp(tree.rewards["reward"]) > 0 for tree in later)


@pytest.mark.methods
def test_remax_has_the_reward_of_the_greedy_response_as_its_baseline(step_of):
    steps = step_of("remax")
    start, losses = plain_model(steps, steps.updates[0]), set()
    for tree in steps.judged:
        (greedy,) = np.flatnonzero(~tree.trained)
        with torch.no_grad():
            every = plain_logprobs(start, tree, int(greedy), vocabulary=True)
        assert tree.token_id[tree.response_rows(int(greedy))].tolist() == every.argmax(-1).tolist()
        A = tree.rewards["reward"] - tree.rewards["reward"][greedy]
        np.testing.assert_allclose(tree.advantage, A, atol=1e-6)
        losses |= set(A.tolist())
    assert -1.0 in losses, "the baseline makes no difference here"
    seen = [tree for tree in steps.updates[0].trees if tree.advantage.any()]

    def loss(model):
        parts = [
            -float(tree.advantage[leaf]) * plain_logprobs(model, tree, leaf).sum()
            for tree, leaf in leaves_of(seen)
            if tree.trained[leaf]
        ]
        return torch.stack(parts).mean()

    check_gradient(steps, loss)


@pytest.mark.methods
def test_responses_have_temperatures_of_their_own(step_of):
    steps = step_of("multi_temperature")
    start = plain_model(steps, steps.updates[0])
    for tree in steps.judged:
        own = [set(along(tree, leaf, "temperature").tolist()) for leaf in range(tree.num_leaves)]
        assert sorted(own, key=min) == [{0.5}, {0.5}, {1.0}, {2.0}]
        for leaf, (T,) in enumerate(own):
            with torch.no_grad():
                expected = plain_logprobs(start, tree, leaf, T)
            np.testing.assert_allclose(along(tree, leaf, "behaviour_logprob"), expected, atol=2e-5)
    seen = [tree for tree in steps.updates[0].trees if tree.advantage.any()]

    def loss(model):
        parts = []
        for tree, leaf in leaves_of(seen):
            lp = plain_logprobs(model, tree, leaf, float(along(tree, leaf, "temperature")[0]))
            parts.append(-(float(norm(tree.rewards["reward"])[leaf]) * (lp - lp.detach()).exp()).mean())
        return torch.stack(parts).mean()

    check_gradient(steps, loss)
