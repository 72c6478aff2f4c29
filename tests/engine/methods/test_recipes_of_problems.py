"""Recipes that read columns of the problems, choose problems or prompts, or change how responses are sampled: their
numbers through the real loop, against formulas written here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree

from ..tiny import write_job
from .real_step import Steps, along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps

MINE = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)

def seldom(text, entry):
    return float(sum(map(ord, text)) % 6 == 0)

def by_level(text, entry):
    return float(sum(map(ord, text)) % 5 < int(entry["difficulty"]) - 1)

def named(text, entry):
    value = odd(text, entry)
    return {"reward": value, "flaw": float(len(text) % 2), "a": value - len(text) % 3, "b": len(text) % 5 / 5 - 0.5}
"""
SEEDED = {"e2c": 8, "v_05": 4, "visurf": 4, "hpt": 3, "ampo": 3}
"""Responses to a prompt, if not 4."""
LONG = ("--rollout.max_new_tokens=40", "--rollout.n=8", "--trainer.prompts_per_step=24")
"""So many tokens that the random model ends some responses itself."""
NEEDS: dict[str, tuple[str, ...]] = {
    "prefix_rft": ("--rollout.temperature=0.1", "--trainer.lr=0.002"),
    "dr_po": ("--rollout.program_options={{column='solution',members=2}}",),
    "masa": ("--rollout.program_options={{question='Share 0.',members=2}}",),
    "v_0": ("--data.curriculum_options={{column='prior',least=2,most=6}}", "--trainer.prompts_per_step=12"),
    "hpt": ("--reward.verifier={folder}/mine.py:seldom",),
    "ampo": ("--reward.verifier={folder}/mine.py:seldom",),
    "igrpo": ("--loop.callback_options={{template='{{prompt}} after {{draft}}'}}",),
    "ufo": ("--rollout.program_options={{text=' again ',tries=3}}", *LONG),
    "vl_rethinker": (*LONG, "--trainer.steps=3"),
    "e2c": ("--rollout.program_options={{plans=4,plan_end='e'}}",),
    "ead": ("--rollout.program_options={{decay=8.0,least=0.5,segment_tokens=2}}",),
    "think_short": ("--reward.shaping=[{{name='length_budget',options={{share=0.5,budget=6}}}}]",),
    "reward_ensemble": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='ensemble',options={{names=['a','b']}}}}]",
    ),
    "fapo": ("--reward.verifier={folder}/mine.py:named",),
    "reasoning_sql": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='weighted',options={{weights={{a=1.5,b=-0.5}}}}}}]",
    ),
    "chatshopbuddy": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='gated',options={{gate='flaw'}}}}]",
    ),
    "outcome_exploration": (
        "--reward.shaping=[{{name='exploration',options={{bonus=0.1,repeated=0.05,pattern='^(\\S)'}}}}]",
        "--trainer.prompts_per_step=3", "--trainer.steps=8", "--trainer.updates_per_step=1",
    ),
    "self_rewarding_ppo": ("--roles.teacher={{path='{folder}/other'}}", "--algorithm.advantage_options.gamma=0.9"),
    "fgrpo": (
        "--reward.verifier={folder}/mine.py:named", "--trainer.steps=3",
        "--algorithm.advantage_options={{targets={{a=0.9,b=-5.0}},rate=0.5}}",
    ),
    "dcpo": ("--trainer.prompts_per_step=12", "--trainer.steps=3", "--trainer.updates_per_step=1"),
    "gvm": (
        "--data.curriculum_options={{n=4,pilot=2,alpha=0.5,beta=2.0,most=9}}", "--trainer.steps=4",
        "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1", "--rollout.temperature=0.1",
    ),
    "drive": (
        "--data.curriculum_options={{after=2,keep=0.25,n=5}}", "--trainer.steps=4", "--trainer.prompts_per_step=12",
        "--trainer.updates_per_step=1",
    ),
    "qwenlong_l1": ("--trainer.steps=4", "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1"),
    "limr": (
        "--data.curriculum_options={{epochs=2,least=0.6}}", "--trainer.steps=5", "--trainer.prompts_per_step=12",
        "--trainer.updates_per_step=1",
    ),
    "ariadne": (
        "--reward.verifier={folder}/mine.py:by_level", "--trainer.steps=5", "--trainer.prompts_per_step=4",
        "--data.curriculum_options={{start=2,rise=1,window=4,above=0.1}}", "--trainer.updates_per_step=1",
    ),
    "interplay": ("--trainer.steps=3", "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1"),
}  # fmt: skip
"""Keys that a recipe asks for, and sizes that fit the tiny model."""
IN_CI = ("prefix_rft", "masa", "v_05", "gvm")


def marked(*names: str) -> list[Any]:
    return [name if name in IN_CI else pytest.param(name, marks=pytest.mark.methods) for name in names]


@pytest.fixture(scope="module")
def toml(tmp_path_factory) -> Path:
    path = write_job(tmp_path_factory.mktemp("problems"), MINE)
    problems = path.parent / "problems.jsonl"
    gone = ("tasks", 'objective = "dapo"', "advantage", "program", "n = ")
    lines = [line for line in path.read_text().splitlines() if not line.startswith(gone)]
    text = "\n".join(lines).replace("[data]", f'[data]\npath = "{problems}"').replace("reward.py:judge", "mine.py:odd")
    path.write_text(text)
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("verifier"))
    (path.parent / "bare.toml").write_text(bare)
    rows = [
        {
            "prompt": f"{a} + 3 =", "answer": str(a + 3), "solution": f"{a}+3={a + 3}",
            "prior": [0.0, 0.25, 0.5, 0.75, 0.9, 1.0][a % 6], "difficulty": 2 + a % 3,
        }
        for a in range(24)
    ]  # fmt: skip
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def step_of(toml, tmp_path_factory) -> Callable[[str], Steps]:
    @functools.cache
    def take(name: str) -> Steps:
        if name == "self_rewarding_ppo" and not (toml.parent / "other").exists():
            torch.manual_seed(5)
            config = AutoConfig.from_pretrained(toml.parent / "model")
            AutoModelForCausalLM.from_config(config).save_pretrained(toml.parent / "other")
        needs = [text.format(folder=toml.parent) for text in NEEDS.get(name, ())]
        common = (
            "--trainer.updates_per_step=2", "--trainer.lr=0.02", "--trainer.max_tokens=4096",
            "--trainer.self_check=false", "--trainer.prompts_per_step=6", f"--rollout.n={SEEDED.get(name, 4)}",
        )  # fmt: skip
        file = toml.parent / "bare.toml" if name in ("rlpr", "verifree") else toml
        return take_steps(
            file, tmp_path_factory.mktemp(name), *common, f"--recipe={name}", *needs,
            unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
        )  # fmt: skip

    return take


def row_of(tree: TokenTree, toml: Path) -> dict[str, Any]:
    """Return the problem's row, from the data itself."""
    rows = [json.loads(line) for line in (toml.parent / "problems.jsonl").read_text().splitlines()]
    return rows[int(tree.meta["prompt_id"].rpartition("/")[2])]


def by_step(steps: Steps, updates: int = 1) -> list[list[TokenTree]]:
    """Return the trees of each step."""
    return [
        [tree for update in steps.updates[k : k + updates] for tree in update.trees]
        for k in range(0, len(steps.updates), updates)
    ]


def ids(steps: Steps) -> list[list[str]]:
    return [[tree.meta["prompt_id"] for tree in trees] for trees in by_step(steps)]


def sd(x: np.ndarray) -> float:
    return float(np.sqrt(((x - x.mean()) ** 2).sum() / max(len(x) - 1, 1)))


def norm(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return (x - x.mean()) / (sd(x) + 1e-6)


def clipped(lp: torch.Tensor, old: torch.Tensor, A: float) -> torch.Tensor:
    r = (lp - old).exp()
    return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A)


def given_part(tree: TokenTree, leaf: int) -> tuple[list[int], np.ndarray]:
    """Return the given tokens of a response, and where they are in it."""
    rows = tree.response_rows(leaf)
    given = tree.origin[rows] == Origin.INJECTED
    return tree.token_id[rows[given]].tolist(), given


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
    decode = functools.partial(steps.orchestrator.tokenizer.decode, skip_special_tokens=True)
    foreseen = 0
    for tree in steps.trees:
        asked = np.array([bool(given_part(tree, leaf)[0]) for leaf in range(tree.num_leaves)])
        assert asked.sum() == 2
        given, want = tree.rewards["verifier"].astype(np.float64), tree.rewards["verifier"].astype(np.float64).copy()
        p = (given[~asked] == 1).mean()
        for leaf in np.flatnonzero(asked):
            ids_, where = given_part(tree, leaf)
            assert decode(ids_) == "Share 0."
            rows = tree.response_rows(leaf)
            said = re.search(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", decode(tree.token_id[rows[~where]]))
            q = None if said is None else float(said[1]) / (100 if said[2] else 1)
            want[leaf] = 0 if q is None or q > 1 else 1 - abs(q - p)
            foreseen += q is not None
        np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-6)
        A = np.zeros(tree.num_leaves)
        A[asked], A[~asked] = norm(want[asked]), norm(want[~asked])
        np.testing.assert_allclose(tree.advantage, A, atol=2e-5)


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


# -- rewards -----------------------------------------------------------------------------------------------------------


def exploration(steps: Steps) -> list[np.ndarray]:
    decode = functools.partial(steps.orchestrator.tokenizer.decode, skip_special_tokens=True)
    seen: dict[tuple[str, str], int] = {}
    found = []
    for tree in steps.trees:
        texts = [decode(tree.token_id[tree.response_rows(leaf)]) for leaf in range(tree.num_leaves)]
        answers = [(tree.meta["prompt_id"], text[0]) if text[:1].strip() else None for text in texts]
        for answer in filter(None, answers):
            seen[answer] = seen.get(answer, 0) + 1
        gain = [0.1 / math.sqrt(seen[a]) - 0.05 * (answers.count(a) - 1) if a else 0.0 for a in answers]
        found.append(tree.rewards["verifier"] + np.array(gain))
    return found


SHAPED: dict[str, Callable[[Steps], list[Any]]] = {
    "think_short": lambda steps: [
        tree.rewards["verifier"] + 0.5 * np.maximum(1 - np.maximum(tree.response_length - 6, 0) / 6, 0)
        for tree in steps.trees
    ],
    "reward_ensemble": lambda steps: [np.minimum(t.rewards["a"], t.rewards["b"]) for t in steps.trees],
    "fapo": lambda steps: [
        t.rewards["verifier"] - ((t.rewards["verifier"] == 1) & (t.rewards["flaw"] == 1)) for t in steps.trees
    ],
    "reasoning_sql": lambda steps: [1.5 * t.rewards["a"] - 0.5 * t.rewards["b"] for t in steps.trees],
    "chatshopbuddy": lambda steps: [t.rewards["verifier"] * (t.rewards["flaw"] == 1) for t in steps.trees],
    "outcome_exploration": exploration,
}


@pytest.mark.methods
@pytest.mark.parametrize("name", list(SHAPED))
def test_the_shaped_reward_is_that_of_the_formula(step_of, name):
    steps = step_of(name)
    for tree, want in zip(steps.trees, SHAPED[name](steps), strict=True):
        np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-6)
    assert any(not np.array_equal(t.rewards["reward"], t.rewards["verifier"]) for t in steps.trees)


@pytest.mark.methods
def test_intuitor_rewards_certainty(step_of):
    steps = step_of("intuitor")
    start = plain_model(steps, steps.updates[0])
    for tree in steps.trees:
        with torch.no_grad():
            want = [-plain_logprobs(start, tree, k, vocabulary=True).mean() for k in range(tree.num_leaves)]
        np.testing.assert_allclose(tree.rewards["reward"], want, rtol=1e-5)
        assert np.ptp(tree.rewards["reward"]) > 0


@pytest.mark.methods
@pytest.mark.parametrize("name", ["rlpr", "verifree"])
def test_the_policy_s_probability_of_the_answer_is_the_reward(step_of, toml, name):
    steps = step_of(name)
    start, tokenizer = plain_model(steps, steps.updates[0]), steps.orchestrator.tokenizer

    def p(tree, response):
        text = tree.meta["prompt_text"] + response + "\nAnswer: "
        ids_, answer = (
            tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, row_of(tree, toml)["answer"])
        )
        with torch.no_grad():
            logits = start(input_ids=torch.tensor([ids_ + answer])).logits[0, len(ids_) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(answer)[:, None])[:, 0].exp().double()

    for tree in steps.trees[:3]:
        texts = [
            tokenizer.decode(tree.token_id[tree.response_rows(k)], skip_special_tokens=True)
            for k in range(tree.num_leaves)
        ]
        if name == "rlpr":
            want = [float((p(tree, t).mean() - p(tree, "").mean()).clamp(0, 1)) for t in texts]
            A = norm(np.array(want))
        else:
            want = [float(p(tree, t).prod()) for t in texts]
            A = np.array([w - np.delete(want, i).mean() for i, w in enumerate(want)])
        np.testing.assert_allclose(tree.rewards["reward"], want, rtol=2e-3, atol=1e-7)
        if np.ptp(tree.rewards["reward"]) > 1e-5 or name == "verifree":
            np.testing.assert_allclose(tree.advantage, A, rtol=0.05, atol=1e-5)


@pytest.mark.methods
def test_self_rewarding_ppo_takes_two_models_word_for_it(step_of, toml):
    steps = step_of("self_rewarding_ppo")
    teacher = AutoModelForCausalLM.from_pretrained(toml.parent / "other", dtype=torch.float32).eval()
    base, want = plain_model(steps, steps.updates[0]), []
    for tree, leaf in leaves_of(steps.trees):
        with torch.no_grad():
            gain = (plain_logprobs(teacher, tree, leaf) - plain_logprobs(base, tree, leaf)).double().numpy()
        want.append([sum(0.9 ** (s - t) * gain[s] for s in range(t, len(gain))) for t in range(len(gain))])
    every = np.concatenate(want)
    found = np.concatenate([tree.path_advantage for tree in steps.trees])
    np.testing.assert_allclose(found, (every - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8), atol=1e-3)


# -- credit that remembers ---------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_fgrpo_raises_the_weight_of_what_falls_short(step_of):
    steps = step_of("fgrpo")
    weights = {"a": 0.0, "b": 0.0}
    for trees in by_step(steps, 2):
        for tree in trees:
            want = norm(tree.rewards["reward"]) + sum(w * norm(tree.rewards[k]) for k, w in weights.items())
            np.testing.assert_allclose(tree.advantage, want, atol=1e-4)
        for name, target in (("a", 0.9), ("b", -5.0)):
            mean = np.concatenate([tree.rewards[name] for tree in trees]).astype(np.float64).mean()
            weights[name] = max(0.0, weights[name] + 0.5 * (target - mean))
    assert weights["a"] > 0.5
    assert weights["b"] == 0


@pytest.mark.methods
def test_dcpo_blends_the_statistics_of_all_groups_of_a_problem(step_of):
    every: dict[str, list[np.ndarray]] = {}
    blended = 0
    for trees in by_step(step_of("dcpo")):
        for tree in trees:
            past = every.setdefault(tree.meta["prompt_id"], [])
            R = tree.rewards["reward"].astype(np.float64)
            past.append(R)
            i, all_of = len(past), np.concatenate(past)
            S, C = norm(R), (R - all_of.mean()) / (sd(all_of) + 1e-6)
            one, two = ((i - 1) * C + S) / i, (C + (i - 1) * S) / i
            want = np.where(np.abs(one) < np.abs(two), one, two) if i > 1 else S
            np.testing.assert_allclose(tree.advantage, want, atol=1e-5)
            blended += i > 1 and np.abs(want - S).max() > 1e-3
    assert blended > 3


# -- which problems ----------------------------------------------------------------------------------------------------


def history(steps: Steps, before: int) -> dict[str, list[float]]:
    """Return the rewards of each problem in the steps before one."""
    found: dict[str, list[float]] = {}
    for trees in by_step(steps)[:before]:
        for tree in trees:
            found.setdefault(tree.meta["prompt_id"], []).extend(tree.rewards["reward"].tolist())
    return found


def test_gvm_samples_by_success_and_gradient(step_of):
    steps = step_of("gvm")
    known: dict[str, list[float]] = {}
    counts = []
    for trees, update in zip(by_step(steps), steps.updates, strict=True):
        score = {}
        for problem, (m, total, size) in known.items():
            p = min(max(total / m, 1 / (2 * m)), 1.0)
            score[problem] = size / m / math.sqrt(p + 0.5 / p)
        for tree in trees:
            name = tree.meta["prompt_id"]
            share = score[name] / np.mean(list(score.values())) if name in score else 0.5
            want = max(1, min(round(4 * share), 9)) if name in score else 2
            assert tree.num_leaves == want
            counts += [want] if name in score else []
        model = plain_model(steps, update)
        for tree in trees:
            m, total, size = known.get(tree.meta["prompt_id"], (0, 0.0, 0.0))
            for leaf in range(tree.num_leaves):
                with torch.no_grad():
                    every = plain_logprobs(model, tree, leaf, 0.1, vocabulary=True).double()
                rows = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))
                lp = every.gather(1, rows[:, None])[:, 0]
                size += math.sqrt(float((1 - 2 * lp.exp() + every.exp().square().sum(1)).sum()))
            known[tree.meta["prompt_id"]] = [m + tree.num_leaves, total + float(tree.rewards["reward"].sum()), size]
        assert all((tree.columns["select_leaf/actor"] == (tree.rewards["reward"] >= 1)).all() for tree in trees)
    assert len(set(counts)) > 1, "every problem got the same number of responses"


@pytest.mark.methods
def test_drive_ends_with_many_responses_to_the_hardest(step_of):
    steps = step_of("drive")
    for number, trees in enumerate(by_step(steps)):
        assert {tree.num_leaves for tree in trees} == {4 if number < 2 else 5}
    past = {name: np.mean(r) for name, r in history(steps, 2).items()}
    assert len(past) == 24
    border = sorted(past.values())[5]
    assert {past[name] <= border for name in ids(steps)[2]} == {True}
    assert len(set(ids(steps)[2])) == 6


@pytest.mark.methods
def test_qwenlong_l1_draws_the_hard_again(step_of):
    steps = step_of("qwenlong_l1")
    first = [name for batch in ids(steps)[:2] for name in batch]
    assert sorted(first) == sorted(f"problems/{k}" for k in range(24))
    for number in (2, 3):
        past = {name: np.mean(r) for name, r in history(steps, number).items()}
        taken = [name for batch in ids(steps)[:number] for name in batch]
        order = sorted(past, key=lambda name, taken=taken: (taken.count(name), first.index(name)))
        # the store has those chosen least often first, each turn in an order of its own; so compare as sets of draws
        assert len(set(ids(steps)[number])) == 12
        assert set(ids(steps)[number]) <= set(order)


@pytest.mark.methods
def test_limr_leaves_out_what_learns_unlike_the_average(step_of):
    steps = step_of("limr")
    means: dict[str, list[float]] = {}
    for trees in by_step(steps)[:4]:
        for tree in trees:
            means.setdefault(tree.meta["prompt_id"], []).append(float(tree.rewards["reward"].mean()))
    assert {len(m) for m in means.values()} == {2}
    average = np.mean(list(means.values()), 0)
    score = {k: 1 - ((np.array(m) - average) ** 2).sum() / ((1 - average) ** 2).sum() for k, m in means.items()}
    kept = {name for name, s in score.items() if s > 0.6}
    assert 0 < len(kept) < 24
    assert set(ids(steps)[4]) <= kept


@pytest.mark.methods
def test_ariadne_climbs(step_of, toml):
    level, recent, levels = 2, [], []
    for trees in by_step(step_of("ariadne")):
        hardness = [row_of(tree, toml)["difficulty"] for tree in trees]
        assert max(hardness) <= level
        levels.append(level)
        for tree, d in zip(trees, hardness, strict=True):
            if d == level:
                recent = [*recent, float(tree.rewards["reward"].mean())][-4:]
            if len(recent) == 4 and np.mean(recent) > 0.1:
                level, recent = level + 1, []
    assert len(set(levels)) > 1


@pytest.mark.methods
def test_interplay_stays_at_the_edge(step_of):
    steps = step_of("interplay")
    past = {name: np.mean(r) for name, r in history(steps, 2).items()}
    assert len(past) == 24
    assert all(0.1 <= past[name] <= 0.9 for name in ids(steps)[2])
    assert any(not 0.1 <= mean <= 0.9 for mean in past.values())
