"""Every recipe takes a step of a tiny model through the real loop: `make methods`, and a few of them in CI.

Losses and advantages are written here from the recipes' papers, on plain sequences and with a plain model; the second
update of a step is compared, where ratios have left 1 and bounds act.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.app.recipes import recipe_names
from rolltree.engine.data.segment import Origin

from ...support.real_step import Steps, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import GIVEN, NO_METHOD, write_job, write_other

MINE = """
def mixed(text, entry):
    kind = sum(map(ord, entry["question"])) % 4
    return [0.0, 1.0, float(len(text) % 2), float(sum(map(ord, text)) % 2)][kind]

def odd(text, entry):
    return float(sum(map(ord, text)) % 2)

def graded(text, entry):
    return sum(map(ord, text)) % 97 / 97

def named(text, entry):
    value = odd(text, entry)
    return {"reward": value, "a": value, "b": float(len(text) % 3)}

def steps(text, entry):
    half = len(text) // 2
    spans = [(0, half, (len(text) % 5) / 5), (half, len(text), sum(map(ord, text)) % 7 / 7)] if half else []
    return {"reward": odd(text, entry), "spans": spans}
"""
COMMON = (
    "--trainer.updates_per_step=2", "--trainer.lr=0.02", "--trainer.max_tokens=4096", "--trainer.self_check=false",
    "--trainer.prompts_per_step=8",
)  # fmt: skip
DEMONSTRATIONS = "--demonstrations={{path='{folder}/given.jsonl',per_step=4}}"
RECORDED = "--demonstrations={{path='{folder}/recorded.jsonl',logprob_key='logprobs',per_step=4}}"
NEEDS: dict[str, tuple[str, ...]] = {
    "gdpo": ("--reward.verifier={folder}/mine.py:named", "--algorithm.advantage_options.weights={{a=1.0,b=0.5}}"),
    "codev_r1": ("--reward.verifier={folder}/mine.py:mixed",),
    "passk": ("--reward.verifier={folder}/mine.py:graded",),
    "prof": ("--reward.verifier={folder}/mine.py:steps",),
    "prm_clip": ("--reward.verifier={folder}/mine.py:steps",),
    "prm_delta": ("--reward.verifier={folder}/mine.py:steps",),
    "sft": (DEMONSTRATIONS, "--trainer.prompts_per_step=0"),
    "ink_grpo": (DEMONSTRATIONS,),
    "pear": (RECORDED, "--trainer.prompts_per_step=0"),
    "opd": ("--roles.teacher={{path='{folder}/other'}}",),
    "brorl": ("--rollout.n=16",),
    "dump": (
        "--data.tasks=[{{name='chain_sum', options={{min_digits=1,max_digits=1}}}},"
        "{{name='basic_arithmetic', options={{min_digits=1,max_digits=1,max_terms=3}}}}]",
    ),
    "treepo": ("--rollout.program_options={{segment_tokens=3,init=2}}", "--rollout.n=4"),
    "branch_grpo": ("--rollout.program_options={{segment_tokens=3,init=2}}", "--rollout.n=4"),
    "spo_tree": ("--rollout.program_options={{branch_factors=[2,2],segment_tokens=3}}", "--rollout.n=4"),
    "spo_chain": ("--rollout.program_options={{cut_after=3,samples=2}}",),
    "treerl": ("--rollout.program_options={{chains=2,forks=1}}", "--rollout.n=6"),
    "latr": ("--rollout.program_options={{tau_abs=0.001,lookahead=3}}",),
    "s_grpo": ("--rollout.program_options={{exit_text='Answer: '}}",),
    "deepsearch": ("--rollout.program_options={{segment_tokens=3,expansions=2,branch=2}}",),
    "propa": ("--rollout.program_options={{segment_tokens=3,expansions=2,branch=2}}",),
    "arpo": ("--rollout.program_options.tool=calculator", "--rollout.n=4"),
}
"""Keys that a recipe asks for, and sizes that fit the tiny model."""
ELSEWHERE = {
    "ghpo": "it needs a column `solution`: tests/engine/programs",
    "tool_turns": "it needs a chat template and tools: tests/engine/programs",
    "scale_rl": "it samples asynchronously: tests/engine/loop/test_staleness.py",
    "asyncflow": "it samples asynchronously: tests/engine/loop/test_early_scores.py",
    "areal": "it samples asynchronously: tests/engine/loop/test_staleness.py",
    "april": "it samples asynchronously: tests/engine/loop/test_staleness.py",
    "scaf_grpo": "it needs columns of hints: tests/engine/loop/test_train_context.py",
    "guide": "it needs a column of hints: tests/engine/loop/test_train_context.py",
    "expo": "it needs a column of answers: tests/engine/loop/test_train_context.py",
    "rl_tango": "it trains two policies: tests/engine/methods/test_roles.py",
    "rlac": "it trains two policies: tests/engine/methods/test_roles.py",
    "azr": "its program has roles: tests/engine/methods/test_roles.py",
    "unity_mas_o": "its program has roles: tests/engine/methods/test_roles.py",
    **dict.fromkeys(("optimal_token", "oblr", "rover", "laser"), "test_statistics_columns.py"),
    **dict.fromkeys(("greso", "sgpo", "knapsack"), "they need a file of problems: test_recipes_of_savers.py"),
    **dict.fromkeys(
        (
            "prefix_rft",
            "dr_po",
            "masa",
            "v_0",
            "v_05",
            "gvm",
            "drive",
            "qwenlong_l1",
            "limr",
            "ariadne",
            "interplay",
            "igrpo",
            "visurf",
            "ampo",
            "hpt",
            "ufo",
            "vl_rethinker",
            "think_short",
            "remax",
            "multi_temperature",
            "reward_ensemble",
            "fapo",
            "outcome_exploration",
            "intuitor",
            "rlpr",
            "verifree",
            "self_rewarding_ppo",
            "fgrpo",
        ),
        "test_recipes_of_problems.py",
    ),
    **dict.fromkeys(("mrt", "eight_x", "gtr", "e2c", "ead"), "test_recipes_of_segments.py"),
    **dict.fromkeys(("ttrl", "empo", "pref_grpo", "brpo"), "tests/engine/rewards/test_group_judges.py"),
    **dict.fromkeys(("reasoning_sql", "chatshopbuddy"), "test_recipes_of_problems.py"),
    "hybrid_verifier": "it needs a server: tests/engine/rewards/{test_parts,test_remote}.py",
    **dict.fromkeys(("rubicon", "dr_sci"), "they need a server: tests/engine/rewards/test_rubric.py"),
    **dict.fromkeys(("general_reasoner", "grlo"), "they need a server: tests/engine/rewards/test_remote.py"),
    "sapo_swarm": "it needs files of other runs: test_recipes_of_problems.py",
    **dict.fromkeys(
        (
            "light_r1",
            "tulu3_stages",
            "miromind_m1_stages",
            "acereason_stages",
            "sft_then_grpo",
            "metis_rise",
            "openvlthinker",
            "vision_r1",
            "seeing_to_thinking",
        ),
        "tests/engine/app/test_stages.py",
    ),
    **dict.fromkeys(
        (
            "reg_grpo",
            "copg",
            "pacs",
            "rrhf",
            "rl_plus",
            "itool",
            "critique_grpo",
            "rltf_sd",
            "cog_rethinker",
            "rltf_fm",
            "capo",
            "process_rewards",
            "canon_entropy",
            "puzzlecraft",
            "recap",
            "rae",
            "rlsp",
            "format_length",
        ),
        "test_recipes_of_losses.py and test_recipes_of_credit.py",
    ),
    "sft_grpo": "its stages and its prompts: tests/engine/prompts/test_disjoint.py",
    "eksft": "test_calm.py",
    **dict.fromkeys(("dpo", "hypo"), "they need a file of pairs: tests/engine/prompts/test_demonstrations.py"),
    "next": "its stages and its extrapolation: tests/engine/{app/test_stages,loop/test_extrapolation}.py",
    **dict.fromkeys(("gkd", "opd_full", "self_distill"), "tests/engine/learn/test_whole_distributions.py"),
    **dict.fromkeys(("mopd", "opd_topk"), "tests/engine/learn/test_teachers.py"),
    "turn_rewards": "it needs a chat template and tools: test_turn_rewards.py",
}
"""Recipes whose step is not taken here, and the reason."""
IN_CI = ("grpo", "dapo", "gspo", "ngrpo", "s_grpo")
RUN = [name for name in recipe_names() if name not in ELSEWHERE]


def with_marks(names: list[str]) -> list[Any]:
    return [name if name in IN_CI else pytest.param(name, marks=pytest.mark.methods) for name in names]


RECORDED = [{"prompt": f"{a} + 2 =", "response": "Answer: 3", "logprobs": [-3.0 - 0.1 * a] * 4} for a in range(6)]
FILES = {"mine.py": MINE, "given.jsonl": GIVEN, "recorded.jsonl": RECORDED}


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("job"), FILES, reward={"verifier": "mine.py:mixed"}, **NO_METHOD)
    write_other(path)
    return path


@pytest.fixture(scope="module")
def step_of(toml, tmp_path_factory) -> Callable[[str], Steps]:
    @functools.cache
    def take(name: str) -> Steps:
        needs = [text.format(folder=toml.parent) for text in NEEDS.get(name, ())]
        return take_steps(
            toml, tmp_path_factory.mktemp(name), *COMMON, f"--recipe={name}", *needs,
            unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
        )  # fmt: skip

    return take


# -- advantages: of a group's rewards R, or of all groups --------------------------------------------------------------


def sd(values) -> float:
    values = np.asarray(values, np.float64)
    return float(np.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - 1, 1)))


def group(formula):
    return lambda groups: [np.array([formula(np.asarray(R, np.float64), i) for i in range(len(R))]) for R in groups]


NORM = group(lambda R, i: (R[i] - R.mean()) / (sd(R) + 1e-6))
MEAN = group(lambda R, i: R[i] - R.mean())
LOO = group(lambda R, i: R[i] - np.delete(R, i).mean())
VIRTUAL = group(lambda R, i: (R[i] - np.append(R, 1).mean()) / (sd(np.append(R, 1)) + 1e-6))
SIGNED = group(lambda R, i: 1.0 if R[i] > 0 else -1.0)
MAXRL = group(lambda R, i: (R[i] - R.mean()) / R.mean() if R.mean() else 0.0)
FORWARD = group(lambda R, i: 0.1 if R[i] > 0 else -0.9)
NFT = group(lambda R, i: (2 * R[i] - 1) * math.sqrt((1 - R.mean()) / R.mean()) if 0 < R.mean() < 1 else 0.0)
PASSK = group(lambda R, i: (np.sort(R)[-1] - np.sort(R)[-2]) / (sd(R) + 1e-6) if i == list(R).index(max(R)) else 0.0)


def batch_std(groups):
    spread = sd(np.concatenate(groups))
    return [(R - R.mean()) / (spread + 1e-6) for R in groups]


def gpg(groups):
    every = np.concatenate(groups)
    return [len(every) / max((every != 0).sum(), 1) * (R - R.mean()) for R in groups]


# -- losses of tokens: lp [n] with gradient, old [n], A a number -------------------------------------------------------


def clipped(low, high):
    def loss(lp, old, A):
        r = (lp - old).exp()
        return -torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)

    return loss


def reinforce(lp, old, A):
    return -A * lp


def on_policy(lp, old, A):
    return -A * (lp - lp.detach()).exp()


def cispo(lp, old, A):
    return -(lp - old).exp().clamp(0.8, 1.2).detach() * A * lp


def sapo(lp, old, A):
    tau = 1.0 if A > 0 else 1.05
    return -4 / tau * torch.sigmoid(tau * ((lp - old).exp() - 1)) * A


def of_sequence(low, high):
    def loss(lp, old, A):
        s = (lp - old).mean().exp()
        return -torch.minimum(s * A, s.clamp(1 - low, 1 + high) * A).expand(len(lp))

    return loss


def gmpo(lp, old, A):
    d = lp - old
    m = torch.minimum(d, torch.tensor(0.4)) if A > 0 else torch.maximum(d, torch.tensor(-0.4))
    return -(m.mean().exp() * A).expand(len(lp))


def vespo(lp, old, A):
    k, lam = (2, 3) if A >= 0 else (3, 2)
    W = (lp - old).sum().detach().double().clamp(math.log(1e-8), 20).exp()
    return -(math.exp(lam) * W**k * (-lam * W).exp()).float() * A * lp


def topr(lp, old, A):
    return -(1.0 if A > 0 else (lp - old).sum().detach().clamp(max=0).exp()) * A * lp


def dppo(lp, old, A):
    moved = (lp.exp() - old.exp()).detach()
    ok = moved <= 0.2 if A > 0 else moved >= -0.2
    return -A * (lp - old).exp().clamp(max=20).detach() * lp * ok


def dcpo(lp, old, A):
    q, r = old.exp(), (lp - old).exp()
    high = (0.5 + 0.5 * (1 + 4 * 0.2 / q).sqrt()).clamp(max=10)
    low = 0.5 + 0.5 * (1 - 4 * 0.2 / q).clamp(min=0).sqrt()
    return -torch.minimum(r * A, torch.minimum(torch.maximum(r, low), high) * A)


def w_reinforce(weight):
    return lambda lp, old, A: -(weight if A > 0 else 1.0) * A * lp


def dual(lp, old, A):
    worst = clipped(0.2, 0.2)(lp, old, A)
    return worst if A > 0 else torch.minimum(worst, torch.tensor(-4.0 * A))


def k3(coefficient):
    return lambda lp, ref: coefficient * ((ref - lp).exp() - (ref - lp) - 1)


def unbiased(lp, ref):  # the reference is the old policy here
    return 0.001 * (lp - ref).exp() * ((ref - lp).exp() - (ref - lp) - 1)


FLAT: dict[str, tuple[Any, Any, str, Any]] = {
    "grpo": (NORM, clipped(0.2, 0.2), "seq", k3(0.04)),
    "two_grpo": (NORM, clipped(0.2, 0.2), "seq", None),
    "dapo": (NORM, clipped(0.2, 0.28), "token", None),
    "codev_r1": (NORM, clipped(0.2, 0.28), "token", None),
    "dr_grpo": (MEAN, clipped(0.2, 0.2), "norm", None),
    "rloo": (LOO, reinforce, "seq_sum", None),
    "gspo": (NORM, of_sequence(3e-4, 4e-4), "seq", None),
    "luspo": (NORM, of_sequence(2e-3, 2.5e-3), "seq_sum", None),
    "gmpo": (NORM, gmpo, "seq", None),
    "cispo": (NORM, cispo, "token", None),
    "sapo": (NORM, sapo, "seq", None),
    "vespo": (NORM, vespo, "token", None),
    "lite_ppo": (batch_std, clipped(0.2, 0.2), "token", None),
    "prorl": (NORM, clipped(0.2, 0.4), "token", k3(1e-4)),
    "brorl": (NORM, clipped(0.2, 0.4), "token", k3(1e-4)),
    "intellect2": (NORM, dual, "token", k3(0.001)),
    "tis": (NORM, clipped(0.2, 0.2), "token", None),  # sampler and trainer agree here
    "icepop": (NORM, clipped(0.2, 0.2), "token", None),
    "dppo": (NORM, dppo, "token", None),
    "topr": (NORM, topr, "token", None),
    "dcpo": (NORM, dcpo, "token", None),
    "ngrpo": (VIRTUAL, clipped(0.16, 0.24), "seq", None),
    "w_reinforce": (SIGNED, w_reinforce(0.1), "token", None),
    "nsr": (SIGNED, w_reinforce(0.0), "token", None),
    "gpg": (gpg, reinforce, "token", None),
    "maxrl": (MAXRL, reinforce, "token", None),
    "passk": (PASSK, clipped(0.2, 0.2), "token", None),
    "noisy_forward": (FORWARD, reinforce, "token", None),
    "noisy_backward": (MEAN, reinforce, "token", None),
    "acereason": (NORM, on_policy, "token", None),
    "conciser": (NORM, clipped(0.2, 0.28), "token", None),
    "apriel": (NORM, clipped(0.2, 0.2), "seq", None),
    "long_cot": (NORM, clipped(0.2, 0.2), "token", None),
    "miromind_m1": (NORM, clipped(0.2, 0.28), "token", None),
    "dars": (NORM, clipped(0.2, 0.2), "seq", None),
    "dars_b": (NORM, clipped(0.2, 0.2), "seq", None),
    "karl": (NORM, clipped(0.2, 0.2), "token", None),  # sampler and trainer agree here
    "dump": (NORM, clipped(0.2, 0.2), "seq", None),
}
"""Advantage, loss of a token, mean over (tokens, responses' means or sums, or the longest responses), and KL."""


def length_of(tree) -> np.ndarray:
    return np.array([len(tree.response_rows(leaf)) for leaf in range(tree.num_leaves)])


def repeated(tree, size: int) -> np.ndarray:
    found = []
    for leaf in range(tree.num_leaves):
        ids = tree.token_id[tree.response_rows(leaf)].tolist()
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        found.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return np.array(found)


def cosine(tree, R) -> np.ndarray:
    share = (1 + np.cos(np.pi * length_of(tree) / 10)) / 2
    return np.where(R >= 1, 0.5 + 0.5 * share, -0.5 - 0.5 * share) - repeated(tree, 3)


SHAPED: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "dapo": lambda tree, R: R - np.clip((length_of(tree) - 8) / 2, 0, 1),
    "high_entropy": lambda tree, R: R - np.clip((length_of(tree) - 8) / 2, 0, 1),
    "noisy_backward": lambda tree, R: R / 0.9,
    "conciser": lambda tree, R: R + (1 - length_of(tree) / 10) * (R >= 1).all(),
    "apriel": lambda tree, R: R - 0.5 * R.mean() * length_of(tree) / 10,
    "long_cot": cosine,
    "miromind_m1": lambda tree, R: R - 0.5 * repeated(tree, 20),
}
"""The reward that a recipe makes of the verifier's; the longest response has 10 tokens."""


def rewards(name: str, tree) -> np.ndarray:
    given = tree.rewards["verifier" if name in SHAPED else "reward"].astype(np.float64)
    return SHAPED[name](tree, given) if name in SHAPED else given


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", with_marks(list(FLAT)))
def test_the_gradient_of_the_second_update_is_that_of_the_formula(step_of, name):
    advantage, loss_of, mean, kl = FLAT[name]
    steps = step_of(name)
    every = steps.trees
    credit = dict(zip(map(id, every), advantage([rewards(name, tree) for tree in every]), strict=True))
    start = plain_model(steps, steps.updates[0])
    blind = kl is None and name != "nsr"
    seen = [t for t in steps.updates[1].trees if not blind or np.abs(credit[id(t)]).max() > 1e-9]
    if name == "nsr":
        seen = [tree for tree in seen if (credit[id(tree)] < 0).any()]
    leaves = leaves_of(seen)
    assert len(leaves) >= 4
    temperature = steps.orchestrator.learner.temperature(1)

    def loss(model):
        parts = []
        for tree, leaf in leaves:
            lp = plain_logprobs(model, tree, leaf, temperature)
            with torch.no_grad():
                old = plain_logprobs(start, tree, leaf, temperature)
            found = loss_of(lp, old, float(credit[id(tree)][leaf]))
            parts.append(found if kl is None else found + kl(lp, old))
        if mean == "seq":
            return torch.stack([part.mean() for part in parts]).mean()
        if mean == "seq_sum":
            return torch.stack([part.sum() for part in parts]).mean()
        return torch.cat(parts).sum() / (10 * len(parts)) if mean == "norm" else torch.cat(parts).mean()

    check_gradient(steps, loss, update=1, tolerance=5e-3)


@pytest.mark.parametrize("name", with_marks([name for name in SHAPED if name not in ("dapo",)] + ["dapo"]))
def test_the_shaped_reward_is_that_of_the_formula(step_of, name):
    for tree in step_of(name).trees:
        np.testing.assert_allclose(tree.rewards["reward"], rewards(name, tree), atol=1e-6)


def test_the_exits_of_s_grpo_decay(step_of):
    trees = step_of("s_grpo").trees
    assert any((tree.rewards["reward"] == 0.5).any() for tree in trees)
    for tree in trees:
        exits = []  # sampled tokens before the exit's text; one cut off by the longest response has none
        for leaf in range(tree.num_leaves):
            origins = tree.origin[tree.response_rows(leaf)].tolist()
            exits.append(origins.index(Origin.INJECTED) if Origin.INJECTED in origins else len(origins))
        want, k = np.zeros(tree.num_leaves), 0
        for leaf in sorted(range(tree.num_leaves), key=exits.__getitem__):
            if tree.rewards["verifier"][leaf] >= 1:
                want[leaf], k = 2.0**-k, k + 1
        np.testing.assert_allclose(tree.rewards["reward"], want)
        np.testing.assert_allclose(tree.advantage, want - want.mean(), atol=1e-6)


@pytest.mark.methods
@pytest.mark.parametrize("name", ["spo_tree", "deepsearch"])
def test_a_segment_has_the_rise_of_the_value(step_of, name):
    for tree in step_of(name).trees:
        below = [[] for _ in range(tree.num_nodes)]
        for leaf, node in enumerate(tree.leaf_node.tolist()):
            while node >= 0:
                below[node].append(float(tree.rewards["reward"][leaf]))
                node = int(tree.parent[node])
        value = [np.mean(some) for some in below]
        want = [0.0, *(value[k] - value[tree.parent[k]] for k in range(1, tree.num_nodes))]
        np.testing.assert_allclose(tree.node_advantage, want, atol=1e-6)


@pytest.mark.methods
def test_a_segment_of_a_chain_has_the_rise_of_its_continuations(step_of):
    """The value of a cut is the mean of the responses that continue from it, which no update counts."""
    cuts = 0
    for tree in step_of("spo_chain").judged:
        R, begun = tree.rewards["reward"].astype(np.float64), dict[int, list[float]]()
        for leaf in np.flatnonzero(~tree.trained):
            begun.setdefault(int(tree.parent[tree.leaf_node[leaf]]), []).append(R[leaf])
        for leaf in np.flatnonzero(tree.trained):
            node = int(tree.leaf_node[leaf])
            while node > 0:
                above = int(tree.parent[node])
                V, before = (np.mean(begun.get(k, [R[leaf]])) for k in (node, above))
                assert tree.node_advantage[node] == pytest.approx(V - before, abs=1e-6)
                cuts += node in begun
                node = above
    assert cuts


@pytest.mark.methods
@pytest.mark.parametrize("name", ["dapo", "codev_r1", "high_entropy", "treepo", "latr", "acereason", "prorl"])
def test_dynamic_sampling_trains_on_no_group_of_equal_rewards(step_of, name):
    trees = step_of(name).trees
    raw = [tree.rewards.get("verifier", tree.rewards["reward"]) for tree in trees]
    assert len(trees) == 8
    assert all(np.ptp(values) > 0 for values in raw)


@pytest.mark.methods
def test_pods_and_prof_train_on_four_responses_of_a_group(step_of):
    for name in ("pods", "prof"):
        for tree in step_of(name).trees:
            assert (tree.columns["select_leaf/actor"] != 0).sum() == min(4, tree.num_leaves)


@pytest.mark.methods
@pytest.mark.parametrize("name", [name for name in RUN if name not in FLAT])
def test_every_other_recipe_changes_the_policy(step_of, name):
    steps = step_of(name)
    assert any(g.norm() > 0 for update in steps.updates for g in update.gradient.values())


@pytest.mark.methods
def test_lora_rl_changes_the_adapter_alone(step_of):
    """The adapter's gradient is compared with the formula in tests/engine/loop/test_lora_run.py."""
    steps = step_of("lora_rl")
    before, after = steps.updates[0].weights, dict(steps.orchestrator.learner.model.named_parameters())
    assert any(".lora_" in name for name in before)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == (".lora_" not in name), name


def test_every_recipe_is_run_or_named_with_a_reason():
    assert set(ELSEWHERE) <= set(recipe_names())
    assert set(FLAT) | set(SHAPED) <= set(RUN)
