"""Responses sampled under a prompt with a hint and trained under the plain one: groups, ratios, gradients, resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, UserError, load_config
from rolltree.engine.app.assembly.learning import inert
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.data.segment import Origin
from rolltree.engine.loop.unfinished import group_state
from rolltree.engine.methods.groups import Accept, HintLadder
from rolltree.engine.prompts.archive import Archive
from rolltree.engine.prompts.group import Group
from rolltree.engine.prompts.prompts import Prompt

from ...support.real_step import Steps, along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import tiny_job

MINE = """
def seldom(text, entry):
    return float(sum(map(ord, text)) % 6 == 0)

def never(text, entry):
    return 0.0

def again(tree):
    from rolltree.engine.methods.groups import Retry
    entry = tree.meta["entry"]
    return None if tree.meta["attempt"] else Retry(f"{tree.meta['problem']} ({entry['h1']})")

def two_prompts(tree):
    from rolltree.engine.methods.groups import More
    return More(2, "another")

def none_kept(tree):
    from rolltree.engine.methods.groups import Accept
    return Accept([99])
"""
TEMPLATE = "{prompt}\nHint: {hint}"
HINTS = ("h1", "h2", "h3")
UNSET = ("rollout.program", "rollout.program_options", "algorithm.advantage")
FLAT = ("--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm")
SIZES = ("--trainer.prompts_per_step=12", "--rollout.n=3", "--trainer.max_tokens=4096", "--trainer.lr=0.02")


HINTED = [
    {
        "prompt": f"{a} + 3 =", "answer": str(a + 3), "h1": f"add {a}", "h2": "" if a % 5 == 0 else f"{a} + 3",
        "h3": f"it is {a + 3}", "hint": f"{a}, 3",
    }
    for a in range(24)
]  # fmt: skip
toml = tiny_job(
    {"mine.py": MINE, "problems.jsonl": HINTED},
    data={"tasks": None, "path": "FOLDER/problems.jsonl"}, reward={"verifier": "mine.py:seldom"},
    algorithm={"objective": None},
)  # fmt: skip


@dataclass
class Seen:
    """The calls that one group's callback received, and its answers."""

    rewards: list[np.ndarray] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)


@pytest.fixture
def groups(monkeypatch) -> dict[int, Seen]:
    found: dict[int, Seen] = {}
    own = HintLadder.__call__

    def watched(self: HintLadder, tree: TokenTree) -> Any:
        seen = found.setdefault(int(tree.group[0]), Seen())
        seen.rewards.append(tree.rewards["reward"].copy())
        seen.tokens.append([tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)])
        seen.answers.append(own(self, tree))
        return seen.answers[-1]

    monkeypatch.setattr(HintLadder, "__call__", watched)
    return found


def hint_of(tree: TokenTree, leaf: int, columns: tuple[str, ...], toml: Path) -> str | None:
    """Return the hint under which a leaf was sampled, from the data itself."""
    problem = tree.meta["prompt_text"].removesuffix("\n")
    rows = map(json.loads, (toml.parent / "problems.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["prompt"] == problem)
    rung = int(tree.other_prompt[leaf])
    return [row[name] for name in columns if row[name]][rung - 1] if rung else None


def sampled_under(steps: Steps, tree: TokenTree, leaf: int, columns: tuple[str, ...], toml: Path, template: str) -> str:
    problem, hint = tree.meta["prompt_text"].removesuffix("\n"), hint_of(tree, leaf, columns, toml)
    return f"{problem if hint is None else template.format(prompt=problem, hint=hint)}\n"


def logprobs_under(model: Any, steps: Steps, text: str, tree: TokenTree, leaf: int) -> torch.Tensor:  # [n]
    prompt = steps.orchestrator.tokenizer(text)["input_ids"]
    response = tree.token_id[tree.response_rows(leaf)].tolist()
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def clipped(lp: torch.Tensor, old: torch.Tensor, credit: float) -> torch.Tensor:
    r = (lp - old).exp()
    return -torch.minimum(r * credit, r.clamp(0.8, 1.2) * credit)


def norm(rewards: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(((rewards - rewards.mean()) ** 2).sum() / (len(rewards) - 1))
    return (rewards - rewards.mean()) / (deviation + 1e-6)


def grpo(steps: Steps, update: int, old_of: Callable[[TokenTree, int], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Return GRPO's loss of an update, with the old log-probs of ``old_of``."""
    seen = [tree for tree in steps.updates[update].trees if np.ptp(tree.rewards["reward"]) > 0]
    assert seen
    credit = {id(tree): norm(tree.rewards["reward"].astype(np.float64)) for tree in seen}

    def loss(model: Any) -> torch.Tensor:
        parts = []
        for tree, leaf in leaves_of(seen):
            lp = plain_logprobs(model, tree, leaf)  # under the tree's prompt
            parts.append(clipped(lp, old_of(tree, leaf), float(credit[id(tree)][leaf])).mean())
        return torch.stack(parts).mean()

    return loss


RECIPES = {
    "scaf_grpo": (HINTS, 1, TEMPLATE),
    "guide": (("hint",), "all", TEMPLATE),
    "expo": (("answer",), 1, "{prompt}\nThe answer is {hint}. Explain it."),
}


@pytest.fixture(scope="module")
def step_of(toml, tmp_path_factory) -> Callable[..., Steps]:
    made: dict[Any, Steps] = {}

    def take(*overrides: str) -> Steps:
        if overrides not in made:
            made[overrides] = take_steps(toml, tmp_path_factory.mktemp("step"), *FLAT, *SIZES, *overrides, unset=UNSET)
        return made[overrides]

    return take


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hinted_response_is_trained_under_the_plain_prompt_against_the_sampler(toml, step_of, recipe):
    columns, _, template = RECIPES[recipe]
    steps = step_of(f"--recipe={recipe}")
    model = plain_model(steps, steps.updates[0])
    hinted = moved = 0
    for tree, leaf in leaves_of(steps.trees):
        plain = steps.orchestrator.tokenizer(tree.meta["prompt_text"])["input_ids"]
        assert tree.token_id[: tree.prompt_length].tolist() == plain
        assert "Hint" not in tree.meta["prompt_text"]
        assert "Explain" not in tree.meta["prompt_text"]
        recorded = along(tree, leaf, "behaviour_logprob")
        with torch.no_grad():
            text = sampled_under(steps, tree, leaf, columns, toml, template)
            under = logprobs_under(model, steps, text, tree, leaf)
            trained = plain_logprobs(model, tree, leaf)
        torch.testing.assert_close(recorded, under, atol=2e-5, rtol=1e-5)
        hinted += bool(tree.other_prompt[leaf])
        moved += float((recorded - trained).abs().max()) > 1e-3
    assert hinted == moved > 0  # the two prompts give other log-probs, so the ratio is not 1
    check_gradient(steps, grpo(steps, 0, lambda tree, leaf: along(tree, leaf, "behaviour_logprob")))


@pytest.mark.check(but=1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_is_the_one_of_the_ladder(toml, tmp_path, groups, recipe):
    columns, replace, _ = RECIPES[recipe]
    steps = take_steps(toml, tmp_path, *FLAT, *SIZES, f"--recipe={recipe}", unset=UNSET)
    kinds = set()
    for tree in steps.judged:
        seen = groups[int(tree.group[0])]
        problem = tree.meta["prompt_text"].removesuffix("\n")
        rows = map(json.loads, (toml.parent / "problems.jsonl").read_text().splitlines())
        row = next(row for row in rows if row["prompt"] == problem)
        rungs = [name for name in columns if row[name]]
        rewards, tokens = seen.rewards[-1], seen.tokens[-1]
        tries = [range(3 * k, 3 * k + 3) for k in range(len(rewards) // 3)]  # the plain group, then one a hint
        right = [[i for i in some if rewards[i] >= 1] for some in tries]
        assert not any(right[:-1])  # it stops at the first hint that helps
        if len(tries) == 1:
            assert right[0]
            kept, kind = [0, 1, 2], "no hint"
        elif not right[-1]:
            assert len(tries) == 1 + len(rungs)
            kept, kind = [0, 1, 2], "no help"
        elif replace == "all":
            kept, kind = list(tries[-1]), "helped"
        else:
            kept, kind = [1, 2, right[-1][0]], "helped"  # equal rewards: the first is the worst
        kinds.add(kind)
        mine = [tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]
        assert mine == [tokens[i] for i in kept]
        np.testing.assert_array_equal(tree.rewards["reward"], rewards[kept])
        np.testing.assert_array_equal(tree.other_prompt, [i // 3 for i in kept])
    assert {"helped", "no help"} <= kinds
    left = sum(len(t) for s in groups.values() for t in s.tokens[-1]) - sum(t.sampled_tokens for t in steps.judged)
    assert steps.orchestrator.buffer.ledger.dropped.get("replaced") == left > 0
    assert "replaced" in (steps.orchestrator.buffer.summary() or "")  # which checks that all tokens are accounted for


@pytest.mark.check
def test_the_second_update_compares_with_the_policy_rescored_under_the_plain_prompt(step_of):
    steps = step_of("--recipe=guide", "--algorithm.old_logprob=recompute", "--trainer.updates_per_step=2")
    before = plain_model(steps, steps.updates[0])

    def old(tree: TokenTree, leaf: int) -> torch.Tensor:
        with torch.no_grad():
            return plain_logprobs(before, tree, leaf)

    assert any(tree.other_prompt.any() for tree in steps.updates[1].trees)
    for tree, leaf in leaves_of(steps.trees):
        torch.testing.assert_close(along(tree, leaf, "proximal_logprob"), old(tree, leaf), atol=2e-5, rtol=1e-5)
    check_gradient(steps, grpo(steps, 1, old), update=1, tolerance=5e-3)


@pytest.mark.check
def test_at_staleness_the_weight_is_that_of_the_sampler_under_its_prompt(step_of):
    """One update a step: ratio 1 against the policy itself, and the weight min(exp(log p - behaviour), 2)."""
    steps = step_of("--recipe=guide", "--loop.staleness=1", "--loop.overlap=false")
    seen = [tree for tree in steps.updates[0].trees if np.ptp(tree.rewards["reward"]) > 0]
    assert any(tree.other_prompt.any() for tree in seen)

    def loss(model: Any) -> torch.Tensor:
        parts = []
        for tree, leaf in leaves_of(seen):
            credit = float(norm(tree.rewards["reward"].astype(np.float64))[leaf])
            lp = plain_logprobs(model, tree, leaf)
            weight = (lp - along(tree, leaf, "behaviour_logprob")).exp().clamp(max=2).detach()
            parts.append((-credit * weight * (lp - lp.detach()).exp()).mean())
        return torch.stack(parts).mean()

    check_gradient(steps, loss)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("context", ["plain", "sampled"])
def test_retry_trains_under_the_prompt_that_was_asked_for(toml, step_of, context):
    steps = step_of(f"--loop.callback={toml.parent}/mine.py:again", f"--loop.train_context={context}")
    for tree in steps.trees:
        text = steps.orchestrator.tokenizer.decode(tree.token_id[: tree.prompt_length])
        assert ("(add" in text) == (context == "sampled")
        assert tree.other_prompt.tolist() == [int(context == "plain")] * 3


def test_an_open_group_keeps_the_prompt_that_it_samples_under():
    own = Prompt("a", "t", "1 + 1 =", [1, 2], {"answer": "2"}, "1 + 1 =")
    other = Prompt("a", "t", "1 + 1 = (2)", [1, 2, 3], {"answer": "2"}, "1 + 1 = (2)")
    archive = Archive()
    packed = json.loads(json.dumps(group_state(Group(0, own, 0, other=other, attempt=1), None, None, archive)))
    values = Archive(archive.tensors).unpack(packed)
    assert (values["prompt"], values["other"], values["attempt"]) == (own, other, 1)


class TestMistakes:
    def refused(self, toml: Path, *overrides: str) -> str:
        with pytest.raises(UserError) as error:
            list(plan_lines(load_config(toml, [*FLAT, *SIZES, *overrides])))
        return str(error.value)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (("--recipe=scaf_grpo", "--loop.callback_options={columns=['nowhere']}"), "the column 'nowhere'"),
            (("--recipe=scaf_grpo", "--loop.callback_options={columns=[]}"), "at least one column"),
            (("--recipe=scaf_grpo", "--loop.callback_options.replace=0"), "at least 1, or 'all'"),
            (("--recipe=scaf_grpo", "--loop.callback_options.template=hint"), "{prompt} and {hint}"),
            (("--recipe=scaf_grpo", "--data.max_prompt_tokens=9"), "over data.max_prompt_tokens = 9"),
        ],
    )
    def test_a_dry_run_finds(self, toml, flags, said):
        assert said in self.refused(toml, *flags)

    @pytest.mark.parametrize(
        ("name", "said"),
        [("two_prompts", "samples a group under two prompts; set loop.train_context"), ("none_kept", "cannot keep")],
    )
    def test_a_run_finds(self, toml, tmp_path, name, said):
        with pytest.raises(UserError, match=said):
            take_steps(toml, tmp_path, *FLAT, *SIZES, f"--loop.callback={toml.parent}/mine.py:{name}", unset=UNSET)

    def test_no_part_of_the_objective_is_called_inert(self, toml):
        assert inert(load_config(toml, [*FLAT, *SIZES, "--algorithm.objective=grpo"]))
        assert not inert(load_config(toml, [*FLAT, *SIZES, "--recipe=scaf_grpo"]))


class TestReroot:
    def test_it_is_the_tree_built_under_the_other_prompt(self):
        responses = [[5, 6, 7], [5, 6, 8, 9], [], [4]]
        given = {
            "behaviour_logprobs": [np.array([-0.5, -0.6, -k - 1.0, -0.3][: len(r)]) for k, r in enumerate(responses)],
            "advantages": [1.0, -1.0, 0.5, 0.0],
            "policy_version": 3,
            "columns": {"token_reward": [np.arange(len(r), dtype=float) + k for k, r in enumerate(responses)]},
        }
        tree = TokenTree.from_sequences([1, 2], responses, **given)
        tree.rewards["reward"] = np.arange(4, dtype=np.float32)
        tree.meta["prompt_id"] = "a"
        for prompt in ([3], [1, 2, 3, 4, 5]):
            moved, wanted = tree.reroot(prompt), TokenTree.from_sequences(prompt, responses, **given)
            for name in ("parent", "start", "length", "token_id", "position", "parent_row", "subtree_end", "leaf_node",
                         "leaf_order", "leaf_prompt", "first_leaf", "last_leaf", "behaviour_logprob", "origin",
                         "loss_mask", "policy_version", "advantage", "token_reward", "status"):  # fmt: skip
                np.testing.assert_array_equal(getattr(moved, name), getattr(wanted, name), err_msg=name)
            assert (moved.origin[: len(prompt)] == Origin.PROMPT).all()
            np.testing.assert_array_equal(moved.rewards["reward"], tree.rewards["reward"])
            assert moved.meta == tree.meta

    def test_it_refuses(self):
        tree = TokenTree.from_sequences([1, 2], [[5]])
        with pytest.raises(ValueError, match="it is empty"):
            tree.reroot([])
        with pytest.raises(ValueError, match="must be in 0"):
            tree.reroot([-1])
        tree.pictures = (object(),)  # type: ignore[assignment]
        with pytest.raises(ValueError, match="pictures"):
            tree.reroot([1])


def test_a_hinted_response_replaces_the_member_of_the_lowest_reward() -> None:
    """Partial rewards, and one member without a verdict, which goes first."""
    for given, replaced in (([0.4, 0.1, 0.7], 1), ([0.4, np.nan, 0.1], 1), ([0.2, 0.2, 0.1], 2)):
        tree = TokenTree.from_sequences([1], [[2 + i] for i in range(6)])
        tree.rewards["reward"] = np.array([*given, 0.0, 1.0, 1.0], np.float32)
        tree.set("other_prompt", [0, 0, 0, 1, 1, 1])
        tree.meta |= {"attempt": 1, "prompt_id": "p"}
        answer = HintLadder(["h"])(tree)
        assert answer == Accept([*(i for i in range(3) if i != replaced), 4])


def test_all_members_are_replaced_by_those_of_the_last_hint_alone() -> None:
    tree = TokenTree.from_sequences([1], [[2 + i] for i in range(6)])
    tree.rewards["reward"] = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], np.float32)
    tree.set("other_prompt", [0, 0, 1, 1, 2, 2])
    tree.meta |= {"attempt": 2, "prompt_id": "p"}
    assert HintLadder(["h", "g"], replace="all")(tree) == Accept([4, 5])


def test_patience_counts_failures_in_a_row() -> None:
    """A group with a right response between two failed ones begins the count anew."""
    ladder, answers = HintLadder(["h"], patience=1), []
    for rewards in ([0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]):
        tree = TokenTree.from_sequences([1], [[2], [3]])
        tree.rewards["reward"] = np.array(rewards, np.float32)
        tree.meta |= {"attempt": 0, "prompt_id": "p", "problem": "1", "entry": {"h": "x"}}
        answers.append(ladder(tree))
    assert [answer is not None for answer in answers] == [False, False, False, True]
