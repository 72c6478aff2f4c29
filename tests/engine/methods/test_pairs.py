"""No two names of one kind behave alike, unless they are equal by definition and `rolltree methods` says so.

Every name takes two steps of two updates through a learner, on the trees that one run recorded: branches, tool answers,
rewards of turns, responses that begin with given tokens, groups of equal rewards, named rewards, demonstrations. Names
are alike if they agree wherever both are accepted: on policy, one step behind with drifted log-probs, and with credit
of tokens. `make methods` compares all; CI a few.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.learning import learning_parts
from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.app.assembly.sampling import load_policy
from rolltree.engine.app.methods import SAME_IN_RUNS
from rolltree.engine.data.columns import COLUMNS
from rolltree.engine.data.paths import path_credit
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.learn.learner import Learner
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.selections import SELECTIONS
from rolltree.engine.methods.shaping import SHAPINGS
from rolltree.engine.model.loading import load_tokenizer
from rolltree.engine.parts.context import Context
from rolltree.engine.record.metrics import Stopwatch, Sums
from rolltree.kernels.policy_loss import ALIASES, PRESETS

from ...support.real_step import take_steps
from ...support.tiny import GIVEN, NO_METHOD, write_job, write_other

JUDGES = """
def judged(text, entry):
    kind, value = int(entry["answer"]) % 4, sum(map(ord, text))
    right = [0.0, 1.0, float(value % 2), float(value % 3 == 0)][kind]
    return {"reward": right, "a": value % 7 / 7, "b": value % 5 / 5, "flaw": value % 2, "graded": value % 11 / 10}
"""

MINE = """
import numpy as np
from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.methods.credit import Credit
from rolltree.engine.programs import Fork, Given, Reward, Rewind, RolloutProgram

def by_token(trees):
    return Credit("token", [np.sin(tree.token_id + 0.5 * tree.position) for tree in trees])

class Everything(RolloutProgram):
    segment_tokens = 3
    rewinds = True

    def start(self, group):
        self.begun = False
        return 2

    def decide(self, group, finished):
        for segment in finished:
            if segment.status is None:
                yield Reward(segment.branch, float(sum(map(int, segment.token_ids)) % 7) / 7, at=segment.length)
                if segment.depth == 1:
                    yield Fork(segment.branch, 2, append=Given([5, 6], Origin.OBSERVATION))
                else:
                    yield Fork(segment.branch, 1, append=Given([7]) if segment.branch[-1] else None)
            elif not self.begun and segment.length:
                self.begun = True
                yield Rewind(segment.branch, 0, 2, append=Given([8, 9, 10]))
"""
T = 0.1
"""Temperature, so low that the random model's distributions are far from uniform."""
SAMPLED = (
    "loss_mask", "origin", "behaviour_logprob", "policy_version", "entropy", "temperature", "token_reward", "group",
    "status", "trained",
)  # fmt: skip
"""Columns of sampling and judging; all others are the learner's."""
FIXED = (
    "--evaluation.problems=0", "--evaluation.every=0", "--trainer.updates_per_step=2", "--trainer.lr=0.01",
    "--trainer.max_tokens=120", "--trainer.self_check=false", "--trainer.prompts_per_step=6", "--rollout.n=4",
    f"--rollout.temperature={T}", "--rollout.max_new_tokens=12", "--data.max_prompt_tokens=20",
)  # fmt: skip
ON_POLICY, BEHIND, OF_TOKENS = "on policy", "one step behind", "credit of tokens"
SITUATIONS: dict[str, tuple[str, ...]] = {
    ON_POLICY: ("--algorithm.old_logprob=recompute",),
    BEHIND: ("--loop.staleness=1", "--loop.correction=none", "--algorithm.old_logprob=recompute"),
    OF_TOKENS: ("--algorithm.old_logprob=recompute", "--algorithm.advantage={folder}/mine.py:by_token"),
}


class Recorded(NamedTuple):
    """The judged trees of each step, and the demonstrations."""

    steps: list[list[TokenTree]]
    given: list[TokenTree]


ROWS = [
    {"prompt": f"{a} + 3 =", "answer": str(a), "task": "ab"[a % 2], "prior": 0.3 + 0.1 * a, "solution": "3"}
    for a in range(6)
]
FILES = {"mine.py": MINE, "reward.py": JUDGES, "given.jsonl": GIVEN, "problems.jsonl": ROWS}


@pytest.fixture(scope="module")
def toml(tmp_path_factory) -> Path:
    path = write_job(
        tmp_path_factory.mktemp("pairs"), FILES, data={"tasks": None, "path": "FOLDER/problems.jsonl"},
        rollout={**NO_METHOD["rollout"], "n": None}, reward={"verifier": "reward.py:judged"},
        algorithm=NO_METHOD["algorithm"],
    )  # fmt: skip
    write_other(path)
    return path


@pytest.fixture(scope="module")
def recorded(toml, tmp_path_factory) -> Recorded:
    flags = (
        f"--rollout.program={toml.parent}/mine.py:Everything", "--trainer.steps=2",
        f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=3}}",
        "--algorithm.terms=[{name='teach',objective='sft',select='injected',weight=0.001}]",
    )  # fmt: skip
    steps = take_steps(
        toml, tmp_path_factory.mktemp("recorded"), *FIXED, *flags,
        unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
    )  # fmt: skip
    trees = steps.judged
    found = Recorded([trees[:6], trees[6:]], [tree for u in steps.updates[:2] for tree in u.given])
    every = [tree for some in found.steps for tree in some]
    assert len(every) == 12
    assert any(tree.num_nodes > tree.num_leaves + 1 for tree in every)
    assert any((tree.origin == Origin.OBSERVATION).any() for tree in every)
    assert any((~np.isnan(tree.token_reward)).any() for tree in every)
    assert sum(np.ptp(tree.rewards["reward"]) == 0 for tree in every) >= 4
    assert len({int(n) for tree in every for n in tree.response_length}) > 3
    assert found.given
    return found


def fresh(tree: TokenTree) -> TokenTree:
    """Return a copy as it was judged."""
    columns = {name: values.copy() for name, values in tree.columns.items() if name in SAMPLED}
    rewards = {name: values.copy() for name, values in tree.rewards.items() if name != "verifier"}
    return replace(tree, columns=columns, rewards=rewards, meta=dict(tree.meta))


def copies(recorded: Recorded, situation: str, graded: bool) -> list[list[TokenTree]]:
    steps = [[fresh(tree) for tree in trees] for trees in recorded.steps]
    for tree in itertools.chain(*steps):
        if graded:
            tree.rewards["reward"] = tree.rewards["graded"].copy()
        if situation == BEHIND:  # the sampler's weights were others
            drift = 0.5 * np.sin(3.0 * np.arange(tree.num_tokens) + tree.token_id)
            tree.set("behaviour_logprob", np.minimum(tree.behaviour_logprob + drift, -1e-3))
            tree.set("policy_version", tree.policy_version - 2)
    return steps


Signature = list[np.ndarray]
Read = Callable[[Learner, Sequence[TokenTree], list[torch.Tensor]], list[np.ndarray]]


def learn(toml: Path, recorded: Recorded, flags: Sequence[str], situation: str, graded: bool, read: Read) -> Signature:
    """Take the steps with a learner of its own; return what ``read`` finds after each.

    Raises:
        UserError: the run refuses the name.
    """
    config = load_config(toml, [*FIXED, *(flag.replace("{folder}", str(toml.parent)) for flag in flags)])
    model = load_policy(config)
    context = Context(load_tokenizer(config.model.path))
    learner = Learner(learning_parts(Methods.make(config, context), model), Stopwatch(), lambda said: None)
    gradients: list[torch.Tensor] = []
    optim_step = learner.trainer.optim_step

    def watched() -> Any:
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return optim_step()

    learner.trainer.optim_step = watched  # type: ignore[method-assign]
    found: Signature = []
    for step, trees in enumerate(copies(recorded, situation, graded), start=1):
        torch.manual_seed(step)
        learner.update(trees, [fresh(tree) for tree in recorded.given], step, Sums())
        found += read(learner, trees, gradients)
        gradients.clear()
    return found


def of_gradients(learner: Learner, trees: Sequence[TokenTree], gradients: list[torch.Tensor]) -> list[np.ndarray]:
    return [gradient.double().numpy() for gradient in gradients]


def of_credit(learner: Learner, trees: Sequence[TokenTree], gradients: list[torch.Tensor]) -> list[np.ndarray]:
    return [np.asarray(path_credit(tree), np.float64) for tree in trees]


def of_rewards(learner: Learner, trees: Sequence[TokenTree], gradients: list[torch.Tensor]) -> list[np.ndarray]:
    return [np.concatenate([tree.rewards["reward"], np.nan_to_num(tree.token_reward, nan=-9.0)]) for tree in trees]


def of_selection(learner: Learner, trees: Sequence[TokenTree], gradients: list[torch.Tensor]) -> list[np.ndarray]:
    found = []
    for tree in trees:
        per_leaf = tree.columns.get("select_leaf/actor")
        chosen = tree.columns.get("select_token/actor", tree.loss_mask)[tree.path_tokens].astype(np.float64)
        leaf = np.ones(tree.num_leaves) if per_leaf is None else per_leaf
        found.append(chosen * np.repeat(leaf, tree.response_length))
    return found + of_gradients(learner, trees, gradients)  # which demonstrations have too


def alike(one: Signature, other: Signature) -> bool:
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return False
    return all(np.linalg.norm(a - b) <= 1e-4 * max(np.linalg.norm(a), 1e-12) for a, b in zip(one, other, strict=True))


def same_pairs(signatures: dict[str, dict[Any, Signature]]) -> set[frozenset[str]]:
    """Return the pairs of names that agree in all situations that both are accepted in."""
    found = set()
    for one, other in itertools.combinations(signatures, 2):
        both = signatures[one].keys() & signatures[other].keys()
        assert both, f"{one} and {other} are never compared"
        if all(alike(signatures[one][key], signatures[other][key]) for key in both):
            found.add(frozenset((one, other)))
    return found


# -- objectives --------------------------------------------------------------------------------------------------------

OF_OBJECTIVE: dict[str, tuple[str, ...]] = {
    "opd": ("--roles.teacher={path='{folder}/other'}",),
    "opd_forward": ("--roles.teacher={path='{folder}/other'}",),
    "sft": ("--algorithm.select=rewarded",),
    "aux_nll": ("--algorithm.select=rewarded",),
    "pear": ("--algorithm.select=rewarded",),
    "prob_shaping": ("--algorithm.select=rewarded",),
}
REFUSED = {"clip_tensor": "needs clip_low"}
"""Names that a run refuses, with the reason: bounds for each token are for callers of the kernel."""


def objective_signatures(
    toml: Path, recorded: Recorded, names: Sequence[str], situations: Sequence[str] = tuple(SITUATIONS)
) -> dict[str, dict[Any, Signature]]:
    found: dict[str, dict[Any, Signature]] = {}
    for name in names:
        for situation in situations:
            flags = SITUATIONS[situation]
            chosen = (f"--algorithm.objective={name}", *OF_OBJECTIVE.get(name, ()), *flags)
            made = learn(toml, recorded, chosen, situation, False, of_gradients)
            assert made, f"{name} made no update, {situation}"
            assert all(np.isfinite(gradient).all() for gradient in made)
            found.setdefault(name, {})[situation] = made
    return found


def same_by_definition(one: str, other: str) -> bool:
    """Tell if `rolltree methods` says that one objective is the other."""
    if (one, other) in SAME_IN_RUNS or (other, one) in SAME_IN_RUNS:
        return True
    return ALIASES.get(one, (one,))[0] == ALIASES.get(other, (other,))[0]


@pytest.mark.slow(but=1)
@pytest.mark.check
def test_a_few_objectives_are_all_different(toml, recorded):
    found = objective_signatures(toml, recorded, ("grpo", "gspo", "gspo_token"), (OF_TOKENS,))
    assert same_pairs(found) == set()


@pytest.mark.methods
def test_a_name_is_like_itself_and_an_alias_like_its_other_name(toml, recorded):
    """Otherwise the comparison would find no pair whatever the names did."""
    found = objective_signatures(toml, recorded, ("sft", "raft", "aux_nll"))
    again = objective_signatures(toml, recorded, ("sft",))
    assert same_pairs({**found, "again": again["sft"]}) >= {frozenset(("sft", "again")), frozenset(("sft", "raft"))}


def test_a_run_refuses_what_no_column_holds(toml, recorded):
    for name, said in REFUSED.items():
        with pytest.raises(UserError, match=said):
            learn(toml, recorded, (f"--algorithm.objective={name}",), ON_POLICY, False, of_gradients)


@pytest.mark.methods
@pytest.mark.timeout(1800)
def test_no_two_objectives_behave_alike(toml, recorded):
    names = [name for name in PRESETS if name not in REFUSED]
    found = objective_signatures(toml, recorded, names)
    assert set(found) == set(names)
    undeclared = {tuple(sorted(pair)) for pair in same_pairs(found) if not same_by_definition(*pair)}
    assert not undeclared


NOT_RECORDED = {
    "remax",
    "progress_bonus",
    "by_role",
    "step_verdicts",
    "learnability",
    "canon",
    "wrong_steps",
    "own_prompt",
    "other_prompt",
}
"""Parts that need a greedy response, probes, two policies, responses of several lengths or of another prompt, or steps
of negative reward, which the recorded groups do not have; test_advantages.py, test_roles.py and
test_recipes_of_{losses,credit}.py test them."""

# -- credit ------------------------------------------------------------------------------------------------------------

OF_CREDIT: dict[str, tuple[str, ...]] = {
    "gae": ("--roles.critic={lr=0.01}",),
    "gdpo": ("--algorithm.advantage_options={weights={a=1.0,b=0.5}}",),
    "noise_forward": ("--algorithm.advantage_options={false_negatives=0.1}",),
    "pods": ("--algorithm.advantage_options={keep=2}",),
    "laser": ("--algorithm.advantage_options={token=11,mix=0.3}",),
    "log_ratio": ("--roles.teacher={path='{folder}/other'}", "--roles.reference={}"),
    "constrained": ("--algorithm.advantage_options={targets={a=0.9}}",),
    "reweighted": ("--algorithm.advantage_options={names=['a','b']}",),
    "by_role_mean": ("--algorithm.advantage_options={rewards={policy='reward'}}",),
    "dispersed": ("--algorithm.advantage_options={pattern='(\\S)'}",),
}


def credit_signatures(
    toml: Path, recorded: Recorded, names: Sequence[str], rewards: Sequence[bool] = (False, True)
) -> dict[str, dict[Any, Signature]]:
    found: dict[str, dict[Any, Signature]] = {}
    for name in names:
        for graded in rewards:
            flags = (f"--algorithm.advantage={name}", *OF_CREDIT.get(name, ()), "--algorithm.objective=ppo")
            if (name, graded) == ("nft", True):  # it takes rewards of 0 and 1
                continue
            made = learn(toml, recorded, (*flags, "--algorithm.old_logprob=recompute"), ON_POLICY, graded, of_credit)
            found.setdefault(name, {})[graded] = made
    return found


@pytest.mark.check
def test_a_few_credits_are_all_different(toml, recorded):
    names = ("group_norm", "branch_mean", "cumulative", "constrained")
    assert same_pairs(credit_signatures(toml, recorded, names, (False,))) == set()


@pytest.mark.methods
@pytest.mark.timeout(1800)
def test_no_two_credits_are_alike(toml, recorded):
    names = [name for name in ADVANTAGES if name not in NOT_RECORDED]
    found = credit_signatures(toml, recorded, names)
    assert set(found) == set(names)
    assert same_pairs(found) == set()


# -- shapings and selections -------------------------------------------------------------------------------------------

OF_SHAPING: dict[str, str] = {
    "weighted": "{weights={a=1.0}}",
    "gated": "{gate='flaw'}",
    "repetition": "{size=2}",
    "noise_backward": "{false_positives=0.1,false_negatives=0.2}",
    "clip_steps": "{threshold=0.2}",
    "length_budget": "{budget=9}",
    "length_peak": "{longest=12}",
    "ensemble": "{names=['a','b']}",
    "exploration": "{pattern='(\\S)'}",
}
OF_SELECTION = {"most_varied": "{keep=2}", "consistent": "{keep=2}", "between": "{begin='',end='e'}"}


@pytest.mark.methods
@pytest.mark.timeout(1800)
def test_no_two_shapings_are_alike(toml, recorded):
    found = {}
    for name in [name for name in SHAPINGS if name not in NOT_RECORDED]:
        options = OF_SHAPING.get(name, "{}")
        flags = (f"--reward.shaping=[{{name='{name}',options={options}}}]", "--algorithm.objective=ppo")
        found[name] = {g: learn(toml, recorded, flags, ON_POLICY, g, of_rewards) for g in (False, True)}
    assert same_pairs(found) == set()


@pytest.mark.methods
@pytest.mark.timeout(1800)
def test_no_two_selections_are_alike(toml, recorded):
    found = {}
    for name in [name for name in SELECTIONS if name not in NOT_RECORDED]:
        flags = (
            f"--algorithm.select={name}", f"--algorithm.select_options={OF_SELECTION.get(name, '{}')}",
            "--algorithm.objective=ppo", "--algorithm.old_logprob=recompute", "--roles.reference={}",
            f"--demonstrations={{path='{toml.parent}/given.jsonl'}}",
        )  # fmt: skip
        found[name] = {g: learn(toml, recorded, flags, ON_POLICY, g, of_selection) for g in (False, True)}
    assert same_pairs(found) == set()


def test_the_recorded_columns_are_those_of_sampling():
    assert set(SAMPLED) <= set(COLUMNS)
    assert functools.reduce(set.union, [set(OF_CREDIT) - set(ADVANTAGES), set(OF_SHAPING) - set(SHAPINGS)]) == set()
