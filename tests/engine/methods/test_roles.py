"""Methods of several roles: verdicts as rewards, verdicts on steps, baselines by role; and their recipes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import UserError, load_config
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.methods import roles
from rolltree.engine.methods.roles import by_role, learnability, step_verdicts
from rolltree.engine.parts.context import Context
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rewards.parts import RewardParts, task_names
from rolltree.engine.rewards.verdict import Verdict
from rolltree.engine.settings import RewardPartConfig

from ...support.real_step import leaves_of, plain_logprobs
from ..loop.test_policies_run import STOPS, Two, gradient_of, off_by, take, write_two


class Letters:
    """A tokenizer whose tokens are characters."""


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    read = roles.response_text
    monkeypatch.setattr(
        roles, "response_text",
        lambda tokenizer, ids: "".join(map(chr, ids)) if isinstance(tokenizer, Letters) else read(tokenizer, ids),
    )  # fmt: skip


def spoken(*turns: tuple[str, Sequence[str]]) -> TokenTree:
    """Return a tree of texts of the generator, each with the verifier's answers to it (none: a leaf of its own)."""
    parents, segments, leaves = [-1], [Segment.prompt([1])], []

    def add(parent: int, text: str, role: int, origin: Origin = Origin.SAMPLED) -> int:
        known = {"behaviour_logprob": -1.0, "role": role, "model": role} if origin is Origin.SAMPLED else {}
        parents.append(parent)
        segments.append(Segment.make(list(map(ord, text)), origin=origin, **known))
        return len(segments) - 1

    for text, answers in turns:
        response = add(0, text, 0)
        if not answers:
            leaves.append(response)
            continue
        asked = add(response, "?", 1, Origin.OBSERVATION)
        leaves += [add(asked, answer, 1) for answer in answers]
    tree = TokenTree.from_nodes(parents, segments, leaves, [LeafStatus.STOP] * len(leaves))
    tree.meta["roles"] = ["generator", "verifier"]
    return tree


def normal(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return [(v - mean) / (spread + 1e-6) for v in values]


def along(tree: TokenTree, values: Any) -> list[list[float]]:
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(tree.response_length)[:-1])]


def test_each_role_has_its_own_baseline_and_counts_a_response_once() -> None:
    tree = spoken(("ab", ["x", "yy"]), ("c", ["z", "z"]), ("d", ["w"]), ("long", []))
    tree.rewards = {
        "a": np.array([1, 1, 0, 0, 1, 0], np.float32),
        "b": np.array([1, 0, 1, 1, 0, np.nan], np.float32),
    }
    (found,) = by_role([tree], rewards={"generator": "a", "verifier": "b"}).values
    first = normal([1, 0, 1, 0])  # four responses, whatever the number of their verdicts
    second = normal([1, 0, 1, 1, 0])  # five verdicts; a leaf without one has no value
    expected = [
        [first[0], first[0], 0, second[0]],
        [first[0], first[0], 0, second[1], second[1]],
        [first[1], 0, second[2]],
        [first[1], 0, second[3]],
        [first[2], 0, second[4]],
        [first[3]] * 4,
    ]
    for leaf, values in zip(along(tree, found), expected, strict=True):
        assert leaf == pytest.approx(values, abs=1e-9)
    (opposite,) = by_role([tree], rewards={"generator": "-a"}).values
    mine = tree.role[tree.path_tokens] == 0
    assert np.allclose(opposite[mine], -found[mine])
    assert not opposite[~mine].any()


def test_a_response_of_several_leaves_has_their_mean() -> None:
    tree = spoken(("ab", ["x", "y", "z"]), ("c", ["x", "y", "z"]))
    tree.rewards = {"b": np.array([1, 0, 0, 0, 0, 0], np.float32)}
    (found,) = by_role([tree], rewards={"generator": "b"}).values
    expected = normal([1 / 3, 0])
    assert along(tree, found)[2][:2] == pytest.approx([expected[0]] * 2)
    assert along(tree, found)[5][0] == pytest.approx(expected[1])


def test_equal_rewards_and_single_responses_have_no_credit() -> None:
    tree = spoken(("ab", ["x"]), ("c", ["y"]))
    tree.rewards = {"a": np.array([1 / 3, 1 / 3], np.float32)}
    assert not by_role([tree], rewards={"generator": "a"}).values[0].any()
    alone = spoken(("ab", ["x"]))
    alone.rewards = {"a": np.array([1.0], np.float32)}
    assert not by_role([alone], rewards={"generator": "a", "verifier": "a"}).values[0].any()
    with pytest.raises(UserError, match="named no reward 'c'; it named a"):
        by_role([tree], rewards={"generator": "c"})


def test_token_rewards_go_to_the_tokens_of_their_role_before_them() -> None:
    tree = spoken(("abc", ["xy"]), ("d", ["z"]))
    tree.rewards = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    given = np.full(int(tree.response_length.sum()), np.nan)
    given[[1, 2, 4]] = [0.5, 0.25, 3.0]  # of b, c, x
    tree.set("token_reward", given)
    (found,) = by_role([tree], rewards={"generator": "a", "verifier": "b"}).values
    assert along(tree, found) == [[0.75, 0.75, 0.25, 0, 3.0, 0], [0, 0, 0]]


def test_step_verdicts_are_laid_on_the_last_tokens_of_steps() -> None:
    tree = spoken(
        ("ab\n\ncd\n\n", ["Step 1: correct step 2: Incorrect", "STEP 2: correct. Step 9: correct"]),
        ("e\n\n\n\nf", ["Step 1: incorrect\nStep 2: incorrect"]),
        ("gh", ["nothing"]),
    )
    tree.rewards = {"reward": np.array([1, 0, 1, 0], np.float32)}
    shaped = step_verdicts(tree, tokenizer=Letters(), weight=0.5)
    assert shaped.tolist() == [1, 0, 1, 0]
    mean = [1.0, 0.0, -1.0, -1.0]  # step 1, step 2 of the first response (one right, one wrong); both of the second
    first, second, third, fourth = (0.5 * value for value in normal(mean))
    nan = float("nan")
    expected = [
        [nan, first, nan, nan, nan, second, nan, nan],
        [nan, first, nan, nan, nan, second, nan, nan],
        [third, nan, nan, nan, nan, fourth],
        [nan, nan],
    ]
    for found, values in zip(along(tree, tree.token_reward), expected, strict=True):
        assert found[: len(values)] == pytest.approx(values, nan_ok=True, abs=1e-6)
        assert np.isnan(found[len(values) :]).all()


def test_a_problem_is_worth_what_its_answers_leave_to_learn() -> None:
    tree = spoken(("ab", ["x", "yy", "z"]), ("c", ["z", "z"]), ("d", ["w", "v"]), ("long", []))
    tree.rewards = {
        "reward": np.full(8, 2.0, np.float32),
        "solved": np.array([1, 0, 0, 1, 1, 0, np.nan, 1], np.float32),
    }
    assert learnability(tree, of="generator", by="verifier").tolist() == [2.0] * 8
    # a third of the first, all of the second, none of the third with a verdict; the last was not answered
    found = tree.rewards["learnability"]
    assert found[:7] == pytest.approx([2 / 3] * 3 + [0.0] * 4)
    assert np.isnan(found[7])
    with pytest.raises(UserError, match="learnability needs the roles 'proposer' and 'solver'"):
        learnability(tree)
    with pytest.raises(UserError, match="named no reward 'right'; it named learnability, reward, solved"):
        learnability(tree, of="generator", by="verifier", solved="right")


def test_step_verdicts_are_not_of_reasoning_nor_of_a_text_that_was_cut_off() -> None:
    def token_rewards(tree: TokenTree) -> list[float]:
        tree.rewards = {"reward": np.zeros(tree.num_leaves, np.float32)}
        step_verdicts(tree, tokenizer=Letters())
        return np.nan_to_num(tree.token_reward).tolist()

    said = [["Step 1: correct"], ["Step 1: incorrect"], ["Step 1: incorrect"]]
    thought = [["<think>Step 1: incorrect</think>Step 1: correct"], *said[1:-1], ["<think>Step 1: correct"]]
    plain = spoken(("a", said[0]), ("b", said[1]), ("c", ["none"]))
    cut = spoken(("a", said[0]), ("b", said[1]), ("c", said[2]))
    cut.status[2] = LeafStatus.LENGTH
    wanted = [value for value in token_rewards(plain) if value]
    assert wanted == pytest.approx(normal([1, -1]))
    assert [value for value in token_rewards(cut) if value] == wanted
    assert [value for value in token_rewards(spoken(*zip("abc", thought, strict=True))) if value] == wanted


def test_equal_verdicts_teach_nothing_and_roles_are_needed() -> None:
    tree = spoken(("ab", ["Step 1: correct"]), ("c", ["Step 1: correct"]))
    tree.rewards = {"reward": np.zeros(2, np.float32)}
    step_verdicts(tree, tokenizer=Letters())
    assert not np.nan_to_num(tree.token_reward).any()
    with pytest.raises(UserError, match="needs the roles 'generator' and 'critic'"):
        step_verdicts(tree, tokenizer=Letters(), by="critic")


class Fixed(Rewards):
    """Returns the value of each text."""

    def __init__(self, values: dict[str, float | None]) -> None:
        self.values, self.read = values, list[str]()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        self.read += [item.response_text for item in items]
        values = [self.values[item.response_text] for item in items]
        return [RewardResult(value, "broken" if value is None else None) for value in values]


def of_roles(outcome: Fixed, **options: Any) -> RewardParts:
    parts = [
        (
            RewardPartConfig(name="verdict", verifier="verdict", role="verifier", weight=0.5),
            Verdict("outcome", **options),
        ),
        (RewardPartConfig(name="outcome", verifier="exact", role="generator"), outcome),
    ]
    return RewardParts(parts, task_names(()), Context(), ["generator", "verifier"])


@pytest.mark.parametrize(
    ("said", "value", "verdict"),
    [
        ("Verdict: correct", 1.0, 1.0),
        ("Verdict: correct", 0.0, 0.0),
        ("VERDICT: incorrect", 0.0, 1.0),
        ("Verdict: incorrect", 0.9, 1.0),
        ("Verdict: correct, no. Verdict: incorrect", 1.0, 0.0),
        ("I do not know", 1.0, 0.0),
        ("<think>Verdict: correct</think>Verdict: incorrect", 0.0, 1.0),
        ("<think>Verdict: correct, or not", 1.0, 0.0),
        ("<think>Verdict: correct</think>I do not know", 1.0, 0.0),
    ],
)
def test_a_verdict_is_right_where_it_agrees_with_the_outcome(said: str, value: float, verdict: float) -> None:
    outcome = Fixed({"42": value})
    (found,) = of_roles(outcome).score([RewardItem("42?" + said, {}, roles={"generator": "42", "verifier": said})])
    assert outcome.read == ["42"]
    assert found.named == {"verdict": verdict, "outcome": value}
    assert found.value == pytest.approx(value + 0.5 * verdict)
    assert found.unparsed == ("no_verdict" if "not" in said else None)
    item = RewardItem("42?" + said, {}, roles={"generator": "42", "verifier": said}, ended=False)
    (cut,) = of_roles(outcome).score([item])
    assert (cut.named["verdict"], cut.unparsed) == (0.0, "cut_off")


def test_responses_without_a_verdict_or_an_outcome() -> None:
    rewards = of_roles(Fixed({"42": 1.0, "7": None}))
    alone, held_out, broken = rewards.score(
        [
            RewardItem("42", {}, roles={"generator": "42"}),
            RewardItem("42", {}),  # no roles: an answer of the first role alone
            RewardItem("7", {}, roles={"generator": "7", "verifier": "Verdict: correct"}),
        ]
    )
    assert (alone.value, held_out.value, broken.value) == (1.0, 1.0, None)
    assert np.isnan(alone.named["verdict"])
    assert broken.reason is not None
    (mute,) = rewards.score([RewardItem("", {}, roles={})])
    assert mute.skipped == "no_role"


def test_verdicts_with_a_pattern_of_their_own() -> None:
    rewards = of_roles(Fixed({"42": 1.0}), pattern=r"\[(yes|no)\]", says_right="yes")
    (found,) = rewards.score([RewardItem("", {}, roles={"generator": "42", "verifier": "[no] [yes]"})])
    assert found.named["verdict"] == 1.0
    for pattern in ("(", "yes"):
        with pytest.raises(UserError, match="pattern of the verifier 'verdict'"):
            Verdict("outcome", pattern=pattern)


# -- the recipes, through the loop -------------------------------------------------------------------------------------

SIZES = f"{{generate_tokens=7,verdicts=2,question=' = ',stop={json.dumps(STOPS)}}}"
PATTERN, SAYS_RIGHT, SEPARATOR = r"([12])(1?)", "", "o"


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a method, whose second model writes many a 1 and 2, and ends its texts."""
    path = write_two(tmp_path_factory.mktemp("roles"))
    other = path.parent / "other"
    tokenizer, model = AutoTokenizer.from_pretrained(other), AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        rows, digits = model.get_input_embeddings().weight, tokenizer("12")["input_ids"]
        rows[digits] *= 12
        rows[tokenizer.eos_token_id] = 1.2 * rows[digits].sum(0)  # the end is what follows a digit, not another one
    model.save_pretrained(other)
    text = path.read_text()
    path.write_text(
        text.partition("[models.verifier]")[0]
        + "[rollout]\nn = 8\nmax_new_tokens = 20\n"
        + text[text.index("[trainer]") :]
    )
    return path


def take_recipe(toml: Path, directory: Path, recipe: str, parts: list[dict[str, Any]], *overrides: str) -> Two:
    given = "[" + ",".join("{" + ",".join(f"{k}={v}" for k, v in part.items()) + "}" for part in parts) + "]"
    return take(
        toml, directory, f"--recipe={recipe}", f"--rollout.program_options={SIZES}", f"--reward.parts={given}",
        "--trainer.steps=2", "--trainer.max_tokens=8192", *overrides,
    )  # fmt: skip


def role_tokens(tree: TokenTree, leaf: int, role: int) -> Any:  # [n] bool
    rows = tree.response_rows(leaf)
    return (tree.origin[rows] == Origin.SAMPLED) & (tree.role[rows] == role)


def text_of(two: Two, tree: TokenTree, leaf: int, role: int) -> str:
    ids = tree.token_id[tree.response_rows(leaf)][role_tokens(tree, leaf, role)]
    return str(two.run.tokenizer.decode(ids, skip_special_tokens=True))


def judged_text(two: Two, tree: TokenTree, leaf: int) -> str:
    """Return the verifier's text; one that was cut off has no verdict."""
    return text_of(two, tree, leaf, 1) if tree.status[leaf] == LeafStatus.STOP else ""


def baseline(tree: TokenTree, role: int, values: Sequence[float]) -> dict[int, float]:
    """Return each leaf's credit in a role: its response's mean value among the group's, each response once."""
    members: dict[tuple[int, ...], list[int]] = {}
    for leaf in range(tree.num_leaves):
        if (mine := role_tokens(tree, leaf, role)).any():
            members.setdefault(tuple(tree.response_rows(leaf)[mine].tolist()), []).append(leaf)
    means = [float(np.mean([values[leaf] for leaf in leaves])) for leaves in members.values()]
    credit = normal(means) if len(means) > 1 else [0.0] * len(means)
    return {leaf: c for c, leaves in zip(credit, members.values(), strict=True) for leaf in leaves}


def step_rewards(two: Two, tree: TokenTree) -> list[Any]:
    """Return for each leaf [n] the normalised verdicts at its steps' last tokens, written from the paper's words."""
    ends: dict[tuple[int, ...], dict[int, int]] = {}
    votes: dict[tuple[tuple[int, ...], int], list[float]] = {}
    keys = []
    for leaf in range(tree.num_leaves):
        mine = np.flatnonzero(role_tokens(tree, leaf, 0))
        rows = tree.response_rows(leaf)[mine]
        keys.append(tuple(rows.tolist()))
        place, step, text = dict[int, int](), 0, text_of(two, tree, leaf, 0)
        for piece in re.finditer(f"(?:(?!{SEPARATOR}).)+", text, re.DOTALL):
            if piece.group().strip():
                step += 1
                spelled = [
                    len(two.run.tokenizer.decode(tree.token_id[rows[: i + 1]], skip_special_tokens=True))
                    for i in range(len(rows))
                ]
                place[step] = int(mine[next((i for i, n in enumerate(spelled) if n >= piece.end()), len(rows) - 1)])
        ends[keys[-1]] = place
        for number, said in {int(n): s for n, s in re.findall(PATTERN, judged_text(two, tree, leaf))}.items():
            if number in place:
                votes.setdefault((keys[-1], number), []).append(1.0 if said == SAYS_RIGHT else -1.0)
    means = {key: sum(v) / len(v) for key, v in votes.items()}
    known = list(means.values())
    scaled = dict(zip(means, normal(known), strict=True)) if len(known) > 1 else dict.fromkeys(means, 0.0)
    found = []
    for leaf, key in enumerate(keys):
        values = np.zeros(int(tree.response_length[leaf]))
        for step, at in ends[key].items():
            values[at] += scaled.get((key, step), 0.0)
        found.append(values)
    return found


def check_credit(tree: TokenTree, expected: Sequence[Any]) -> None:
    for leaf, values in enumerate(along(tree, tree.path_advantage)):
        assert values == pytest.approx(list(expected[leaf]), abs=1e-4)


@pytest.mark.methods
def test_rl_tango(toml: Path, tmp_path: Path) -> None:
    folder = toml.parent
    two = take_recipe(
        toml, tmp_path, "rl_tango",
        [
            {"name": "'outcome'", "verifier": f"'{folder}/judges.py:odd'"},
            {"name": "'verdict'", "options": f"{{pattern='{PATTERN}',says_right=''}}".replace(PATTERN, "[12](1?)")},
        ],
        f"--models.verifier.path={folder}/other", "--trainer.prompts_per_step=16",
        f"--reward.shaping=[{{name='step_verdicts',options={{pattern='{PATTERN}',says_right='',separator='o'}}}}]",
    )  # fmt: skip
    steps = 0
    for step, trees in enumerate(two.trees):
        weight = 0.5 - 0.4 * step / 199  # from 0.5 at step 1 to 0.1 at step 200
        for tree in trees:
            right = [float(len(text_of(two, tree, leaf, 0)) % 2) for leaf in range(tree.num_leaves)]
            agrees = []
            for leaf, outcome in enumerate(right):
                said = re.findall(r"[12](1?)", judged_text(two, tree, leaf))
                agrees.append(float((said[-1] == "") == (outcome >= 1)) if said else 0.0)
            first, second = baseline(tree, 0, right), baseline(tree, 1, agrees)
            gained = step_rewards(two, tree)
            expected = []
            for leaf in range(tree.num_leaves):
                one, other = role_tokens(tree, leaf, 0), role_tokens(tree, leaf, 1)
                later = np.cumsum(gained[leaf][::-1])[::-1]
                expected.append(one * (first[leaf] + weight * later) + other * second.get(leaf, 0.0))
            steps += sum(np.count_nonzero(values) for values in gained)
            check_credit(tree, expected)
        model, losses = two.model("", step), []
        for tree in trees:
            credit, mine = along(tree, tree.path_advantage), []
            for leaf in range(tree.num_leaves):
                logprob, counted = plain_logprobs(model, tree, leaf), role_tokens(tree, leaf, 0)
                loss = -torch.tensor(credit[leaf]) * (logprob - logprob.detach()).exp()
                mine.append(loss[torch.from_numpy(counted)].mean())
            if any(np.any(np.array(credit[leaf])[role_tokens(tree, leaf, 0)]) for leaf in range(tree.num_leaves)):
                losses += mine  # a group without credit for the role is left out
        found = two.updates[""][step].gradient
        assert off_by(found, gradient_of(torch.stack(losses).float().mean(), model)) < 5e-4
    assert two.updates["verifier"], "the verifier was not trained"
    assert steps > 10, "the verifier said hardly anything about steps, so nothing was compared"


@pytest.mark.methods
def test_unity_mas_o(toml: Path, tmp_path: Path) -> None:
    config = load_config(
        toml,
        [
            "--recipe=unity_mas_o",
            f"--rollout.program_options={SIZES}",
            "--reward.parts=[{name='outcome',verifier='exact'}]",
        ],
    )
    assert not config.models
    two = take_recipe(
        toml, tmp_path, "unity_mas_o",
        [
            {"name": "'outcome'", "verifier": f"'{toml.parent}/judges.py:odd'"},
            {"name": "'verdict'", "verifier": f"'{toml.parent}/judges.py:third'", "options": "{}"},
        ],
        f"--models.verifier.path={toml.parent}/other",
    )  # fmt: skip
    verdicts = 0
    for tree in (tree for trees in two.trees for tree in trees):
        right = [float(len(text_of(two, tree, leaf, 0)) % 2) for leaf in range(tree.num_leaves)]
        third = [float(sum(map(ord, text_of(two, tree, leaf, 1))) % 3 == 0) for leaf in range(tree.num_leaves)]
        first, second = baseline(tree, 0, right), baseline(tree, 1, third)
        check_credit(tree, [
            role_tokens(tree, leaf, 0) * first[leaf] + role_tokens(tree, leaf, 1) * second.get(leaf, 0.0)
            for leaf in range(tree.num_leaves)
        ])  # fmt: skip
        verdicts += sum(value != 0 for value in second.values())
    assert verdicts > 20


@pytest.mark.methods
def test_rlac(toml: Path, tmp_path: Path) -> None:
    two = take_recipe(
        toml, tmp_path, "rlac", [{"name": "'found'", "verifier": f"'{toml.parent}/judges.py:third'"}],
        f"--models.critic.path={toml.parent}/other",
    )  # fmt: skip
    assert set(two.run.learner.policies) == {"critic"}
    compared = 0
    for tree, leaf in leaves_of([tree for trees in two.trees for tree in trees]):
        value = float(
            sum(map(ord, two.run.tokenizer.decode(tree.token_id[tree.response_rows(leaf)], skip_special_tokens=True)))
            % 3
            == 0
        )
        assert tree.rewards["found"][leaf] == value
        assert tree.rewards["reward"][leaf] == -value
        first = baseline(tree, 0, [-v for v in tree.rewards["found"].tolist()])
        second = baseline(tree, 1, tree.rewards["found"].tolist())
        expected = role_tokens(tree, leaf, 0) * first[leaf] + role_tokens(tree, leaf, 1) * second.get(leaf, 0.0)
        assert along(tree, tree.path_advantage)[leaf] == pytest.approx(list(expected), abs=1e-4)
        compared += bool((role_tokens(tree, leaf, 1) * expected).any())
    assert compared > 20


@pytest.mark.methods
def test_azr(toml: Path, tmp_path: Path) -> None:
    two = take_recipe(
        toml, tmp_path, "azr", [{"name": "'solved'", "verifier": f"'{toml.parent}/judges.py:third'"}],
        f"--models.solver.path={toml.parent}/other",
    )  # fmt: skip
    worth = set()
    for tree in (tree for trees in two.trees for tree in trees):
        solved = tree.rewards["solved"].tolist()
        answers: dict[tuple[int, ...], list[float]] = {}
        keys = [tuple(tree.response_rows(k)[role_tokens(tree, k, 0)].tolist()) for k in range(tree.num_leaves)]
        for leaf, key in enumerate(keys):
            if role_tokens(tree, leaf, 1).any():
                answers.setdefault(key, []).append(solved[leaf])
        rates = {key: sum(values) / len(values) for key, values in answers.items()}
        gain = {key: 1 - rate if 0 < rate < 1 else 0.0 for key, rate in rates.items()}
        worth |= set(gain.values())
        proposals = normal(list(gain.values())) if len(gain) > 1 else [0.0] * len(gain)
        first, second = dict(zip(gain, proposals, strict=True)), baseline(tree, 1, solved)
        check_credit(tree, [
            role_tokens(tree, leaf, 0) * first.get(keys[leaf], 0.0)
            + role_tokens(tree, leaf, 1) * second.get(leaf, 0.0)
            for leaf in range(tree.num_leaves)
        ])  # fmt: skip
    assert worth == {0.0, 0.5}  # two answers to each problem
