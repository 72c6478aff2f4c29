"""What a run does with episodes besides credit: judging, group callbacks, curricula, the replay store, metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine import LeafStatus, TokenTree
from rolltree.engine.agents.records import EpisodeRecord, Failure, SampledCall, Times
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.app import show
from rolltree.engine.data.concat import join
from rolltree.engine.data.episodes import Episodes
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.loop.callback import Callback, CallbackRule
from rolltree.engine.loop.describe import describe, describe_verdicts
from rolltree.engine.loop.evaluation import Evaluation
from rolltree.engine.loop.judging import Judging
from rolltree.engine.methods.curricula import CURRICULA
from rolltree.engine.methods.groups import GROUP_CALLBACKS, KEEPS, Accept
from rolltree.engine.prompts.curriculum import Curriculum
from rolltree.engine.prompts.group import Group, Responses, State
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.record.failures import Failures
from rolltree.engine.record.metrics import Sums
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rewards.interface import FromProgram
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.settings import DataConfig

from ...support import serving
from .calls import RandomAgent
from .test_credit import groups
from .test_tree import record

WORDS = serving.tokenizer()
STOP, FAILED = LeafStatus.STOP, LeafStatus.FAILED


def ids(text: str) -> list[int]:
    return list(WORDS(text, add_special_tokens=False)["input_ids"])


def prompt(n: int = 0) -> Prompt:
    return Prompt(f"p{n}", "task", "Q", ids("Q"), {"answer": "4"}, "Q")


def said(*calls: tuple[str, str], **fields: Any) -> EpisodeRecord:
    return record(*((ids(read), ids(wrote)) for read, wrote in calls), **fields)


class Lengths(Rewards):
    """Rewards the length of a text, and remembers what it was asked; fails at a text with an x."""

    def __init__(self, by_group: bool = False) -> None:
        self.asked: list[RewardItem] = []
        self.by_group = by_group

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        self.asked += items
        return [
            RewardResult(None, "it raised")
            if "x" in item.response_text
            else RewardResult(float(len(item.response_text)), None, {"form": 0.5}, [(0, 1, 0.25)])
            for item in items
        ]


def judged(tree: TokenTree, rewards: Rewards, on_failure: str = "drop") -> Group:
    judging = Judging(WORDS, lambda: None, on_failure=on_failure)
    group = Group(0, prompt(), 0, State.JUDGING)
    with judging.running(rewards):
        judging.add([(group, tree, None)])
        judging.wait(10)
        assert judging.take([group]) == [group]
        judging.put_rewards(group)
    return group


GROUP = (
    said(("Q", "ab"), ("Qab?", "cde"), ("Z", "yy"), ("Qab?cde!", "f")),  # one chain of its own, and another text's
    said(("Q", "g"), ("R", "hijk")),  # rewritten: its last answer stands after another prompt
    said(("Q", "lm"), failure=Failure("raised", "it crashed: no module"), status=FAILED),
    said(("Q", "n"), ("Qn.", "x")),
)


@pytest.mark.parametrize("by_group", [False, True])
def test_the_verifier_is_asked_once_an_episode_with_the_text_of_its_last_answer(by_group: bool) -> None:
    tree, rewards = episode_tree(ids("Q"), [replace_first(r) for r in GROUP]), Lengths(by_group)
    assert tree.episode.tolist() == [0, 0, 1, 1, 2, 3]
    group = judged(tree, rewards)
    assert show.describe(group).startswith("reward 6.00, 4 episodes of 9 calls, 6 leaves, ")
    assert [item.response_text for item in rewards.asked] == ["ab?cde!f", "hijk", "n.x"]
    assert tree.rewards["reward"].tolist()[:4] == [8, 8, 4, 4]
    assert np.isnan(tree.rewards["reward"][4:]).all()
    assert tree.rewards["form"].tolist()[:4] == [0.5] * 4
    assert tree.status.tolist() == [STOP, STOP, STOP, STOP, FAILED, FAILED]
    rewarded = np.split(tree.token_reward, np.cumsum(tree.response_length)[:-1])
    assert [int((~np.isnan(some)).sum()) for some in rewarded] == [1, 0, 0, 1, 0, 0]  # parts of the text it was asked
    assert group.unsampled == ["it crashed: no module"]
    assert group.responses == 4
    sums, notes = Sums(), Notes()
    failures = {"rollout": Failures.of_rollouts(5), "reward": Failures.of_rewards(5)}
    describe_verdicts([group], failures, sums, notes)
    found = sums.means()
    assert found["reward/mean"] == 6
    assert (found["rollout/failed"], found["reward/failed"]) == (1, 1)
    assert any("1 of 4" in note and "it crashed: no module" in note for note in notes.said)


class Notes:
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def replace_first(one: EpisodeRecord) -> EpisodeRecord:
    """The same after a first token that all prompts share."""
    calls = []
    for call in one.calls:
        cut = int(call.tree.leaf_prompt[0])
        whole = call.tree.token_id.tolist()
        again = record(([*ids("^"), *whole[:cut]], whole[cut:])).calls[0]
        calls.append(replace(again, role=call.role, number=call.number))
    return replace(one, calls=tuple(calls))


def test_rewards_that_agents_give_are_taken() -> None:
    records = [
        replace_first(said(("Q", "a"), ("R", "b"), reward=0.75, extras={"form": 1.0})),
        replace_first(said(("Q", "c"), reward=-1.0)),
        replace_first(said(("Q", "d"))),
    ]
    group = judged(episode_tree(ids("^"), records), FromProgram())
    tree = group.tree
    assert tree.rewards["reward"].tolist()[:3] == [0.75, 0.75, -1.0]
    assert np.isnan(tree.rewards["reward"][3])
    assert [verdict.skipped for verdict in group.verdicts] == [None, None, "no_reward"]
    assert tree.rewards["form"].tolist()[:2] == [1.0, 1.0]
    assert np.isnan(tree.rewards["form"][2:]).all()


def test_a_failed_episode_never_has_a_reward_and_ends_the_run_if_that_is_asked() -> None:
    records = [
        replace_first(said(("Q", "ab"))),
        replace_first(said(("Q", "c"), failure=Failure("timeout", "it hung"), status=FAILED)),
    ]
    tree = judged(episode_tree(ids("^"), records), Lengths(), "zero").tree
    assert tree.rewards["reward"][0] == 2
    assert np.isnan(tree.rewards["reward"][1])
    with pytest.raises(RunError, match=r"An agent failed on 'p0' \(it hung\); repair it"):
        judged(episode_tree(ids("^"), records), Lengths(), "raise")


def test_roles_texts_are_those_of_the_whole_episode() -> None:
    one = said(("Q", "ab"), ("Z", "yy"), ("Qab?", "cd"), roles=("", "search", ""))
    rewards = Lengths()
    judged(episode_tree(ids("^"), [replace_first(one)]), rewards)
    assert [item.roles for item in rewards.asked] == [{"agent": "abcd", "search": "yy"}]


def test_a_held_out_problem_is_answered_by_one_episode() -> None:
    """And one that failed, with several chains, counts as one."""
    good = episode_tree(ids("^"), [replace_first(said(("Q", "b"), ("R", "c")))])
    bad = episode_tree(
        ids("^"), [replace_first(said(("Q", "b"), ("R", "c"), failure=Failure("raised", "no"), status=FAILED))]
    )

    class Fixed:
        def generate(self, jobs: Any) -> list[TokenTree]:
            return [good, bad]

    class Console(Notes):
        def phase(self, text: str) -> None: ...
        def evaluation(self, *numbers: Any) -> None: ...

    rewards = Lengths()
    console: Any = Console()
    sampler: Any = Fixed()
    evaluation = Evaluation([prompt(0), prompt(1)], SamplingParams(), 0, sampler, WORDS, console)
    found = evaluation.run(0, rewards)
    assert [item.response_text for item in rewards.asked] == ["c"]
    assert (found["eval/accuracy"], found["eval/failed"]) == (0.5, 1)
    assert console.said == ["1 of 2 held-out problems could not be answered: no."]


def plain(tree: TokenTree) -> Group:
    verdicts = [RewardResult(float(r), None) for r in Episodes(tree).tree.rewards["reward"]]
    texts = [""] * tree.num_leaves
    return Group(0, prompt(), 0, State.JUDGING, parts=[Responses(tree, texts, {}, verdicts)])


def asked(tree: TokenTree, function: Any) -> tuple[Any, Group, Buffer]:
    """The answer of a group callback in a run."""
    buffer = Buffer(Budget(batch=2))
    (group,) = buffer.admit([prompt()])
    for state in (State.SAMPLING, State.JUDGING):
        buffer.to(group, state)
    group.parts = plain(tree).parts
    buffer.sampled(group, tree)
    callback = Callback(CallbackRule(function, "mine"), buffer, lambda problem: prompt(), lambda *rest: rest)  # type: ignore[arg-type,return-value]
    return callback.answer(group), group, buffer


@pytest.mark.parametrize("name", ["dynamic_sampling", "until_unequal", "top_up", "on_demand"])
@pytest.mark.parametrize("rewards", [[0.0] * 5, [1.0, 0, 0, 0, 0], [1.0, 1, 1, 0, 0]])
def test_callbacks_answer_as_for_single_responses(name: str, rewards: list[float]) -> None:
    chains, flat, _ = groups(3)
    known = GROUP_CALLBACKS[name]
    answers, states = [], []
    for tree in (chains[0], flat[0]):
        of = tree.episode if "episode" in tree.columns else np.arange(5)
        tree.rewards["reward"] = np.array(rewards, np.float32)[of]
        function = known(column="p") if name == "on_demand" else known
        entry = {"p": 0.9}

        def called(some: TokenTree, function: Any = function, entry: Any = entry) -> Any:
            some.meta["entry"] = entry
            return function(some, step=1) if name == "on_demand" else function(some)

        answer, group, _ = asked(tree, called)
        answers.append(answer)
        states.append((group.state, group.reason))
    assert answers[0] == answers[1]
    assert states[0] == states[1]


def test_a_callback_keeps_episodes_with_all_their_chains() -> None:
    chains, _, _ = groups(3)
    tree = chains[0]
    _, group, buffer = asked(tree, lambda some: Accept([0, 3]))
    assert sorted(set(group.tree.episode.tolist())) == [0, 3]
    assert group.tree.num_leaves == int(np.isin(tree.episode, [0, 3]).sum()) > 2
    assert len(group.verdicts) == 2
    assert group.state is State.READY
    assert buffer.ledger.dropped == {"replaced": tree.sampled_tokens - group.tree.sampled_tokens}
    with pytest.raises(UserError, match="a group of 5 episodes cannot keep"):
        asked(chains[1], lambda some: Accept([0, 5]))


@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_curricula_observe_episodes(name: str, tmp_path: Path) -> None:
    options = {"hardest": {"after": 1}, "ladder": {"column": "level"}, "ucb": {"by": "kind"}}.get(name, {})
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    chains, flat, _ = groups(3)
    states = []
    for trees in (chains, flat):
        curriculum = Curriculum(DataConfig(path=str(path), curriculum=name, curriculum_options=options))
        for number, tree in enumerate(trees):
            of = tree.episode if "episode" in tree.columns else np.arange(5)
            tree.set("advantage", np.array([0.5, -1.0, 2.0, 0.25, 0.0])[of])
            made = replace(prompt(number), entry={"level": 1.0, "kind": "k"})
            group = plain(tree)
            group.prompt = made
            curriculum.observe(group, {})
        states.append(json.dumps(curriculum.state_dict()))
    mine, wanted = (json.loads(state) for state in states)
    assert mine["observed"] == wanted["observed"] == {"p0": [5, 1.0], "p1": [5, 3.0]}
    assert near(mine["own"], wanted["own"])


def near(one: Any, other: Any) -> bool:
    """Sums of floats differ by their order."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(near, one, other))
    return one == pytest.approx(other, rel=1e-5) if isinstance(one, float) else bool(one == other)


@pytest.mark.parametrize("name", sorted(KEEPS))
def test_choices_for_the_replay_store_are_those_of_single_responses(name: str) -> None:
    chains, flat, _ = groups(3)
    assert KEEPS[name](Episodes(chains[0]).tree) == KEEPS[name](flat[0])


def test_metrics_count_episodes_once() -> None:
    chains, flat, records = groups(5)
    for tree in chains:
        tree.status[(tree.episode == 1) & tree.answer] = LeafStatus.LENGTH
    mine, wanted = Sums(), Sums()
    describe(chains, 12, mine)
    describe(flat, 12, wanted)
    a, b = mine.means(), wanted.means()
    for name in ("reward/group_std", "response_length/mean", "response_length/max"):
        assert a[name] == pytest.approx(b[name])
    assert a["response_length/clip_ratio"] == 0.2
    calls = [call for group in records for one in group for call in one.calls]
    assert a["agent/calls"] == len(calls) / 10
    assert a["agent/branches"] == sum(tree.num_leaves for tree in chains) / 10 > 1
    tokens = sum(call.tree.num_tokens for call in calls)
    assert a["agent/shared_ratio"] == tokens / sum(tree.num_tokens for tree in chains) > 1
    assert not any(name.startswith("agent/") for name in b)


def timed(one: EpisodeRecord, times: list[Times | None], seconds: float) -> EpisodeRecord:
    calls = tuple(SampledCall(c.tree, c.role, c.number, t) for c, t in zip(one.calls, times, strict=True))
    return EpisodeRecord(calls, one.status, one.reward, one.extras, one.failure, seconds)


def test_the_agents_own_time_is_what_no_call_takes() -> None:
    """Calls at the same time count once, those of unknown times not at all; and failures count by their cause."""
    three = said(("Q", "ab"), ("Qab?", "cde"), ("QZ", "yy"))
    with_gaps = timed(three, [Times(1, 1, 2, 4), Times(2, 3, 3, 6), Times(7, 7, None, 8)], 10.0)
    assert with_gaps.own_seconds == 1 + 1 + 2
    assert timed(three, [Times(0, 0, 0, 9), Times(2, 3, 3, 6), None], 9.5).own_seconds == 0.5
    assert timed(three, [None] * 3, 3.0).own_seconds == 3.0
    failed = said(("Q", "lm"), failure=Failure("timeout", "it hung"), status=FAILED)
    silent = said(failure=Failure("silent", "it said nothing"), status=FAILED)
    tree, sums = episode_tree(ids("Q"), [with_gaps, failed, silent, failed]), Sums()
    assert [len(one["calls"]) for one in tree.meta["timeline"]] == [3, 0, 0, 0]
    assert tree.meta["timeline"][0]["seconds"] == 10.0
    assert tree.meta["timeline"][0]["calls"][2] == {
        "number": 3, "role": "", "arrived": 7, "begun": 7, "first": None, "ended": 8, "read": 2, "sampled": 2,
    }  # fmt: skip
    tree.rewards["reward"] = np.zeros(tree.num_leaves, np.float32)
    describe([tree, join([tree, tree])], 12, sums)
    found = sums.means()
    assert found["agent/tool_s"] == 4 * 3 / 12
    assert (found["agent/failed_timeout"], found["agent/failed_silent"]) == (6, 3)
    assert "agent/failed_raised" not in found
    twice = join([tree, tree]).meta["timeline"]
    assert twice == [*tree.meta["timeline"], *tree.meta["timeline"]]


def test_groups_that_were_sampled_again_are_joined() -> None:
    """Episodes get new numbers, prompts share their beginning, every leaf keeps its own."""
    agent = RandomAgent(np.random.default_rng(2), words=5)
    trees = [episode_tree([1], [agent.episode(4) for _ in range(3)]) for _ in range(2)]
    trees.append(TokenTree.from_sequences([1, 5, 5], [[2], [3]], behaviour_logprobs=[[-9.0], [-8.0]]))
    for number, tree in enumerate(trees):
        tree.rewards["reward"] = np.arange(tree.num_leaves, dtype=np.float32) + 10 * number
    joined = join(trees)
    leaf = 0
    for tree in trees:
        for own in range(tree.num_leaves):
            mine, theirs = joined.path_rows(leaf), tree.path_rows(own)
            assert joined.token_id[mine].tolist() == tree.token_id[theirs].tolist()
            assert joined.leaf_prompt[leaf] == tree.leaf_prompt[own]
            response, wanted = joined.response_rows(leaf), tree.response_rows(own)
            np.testing.assert_array_equal(joined.behaviour_logprob[response], tree.behaviour_logprob[wanted])
            assert joined.rewards["reward"][leaf] == tree.rewards["reward"][own]
            assert joined.call[response].tolist() == tree.call[wanted].tolist()
            leaf += 1
    first = len(set(trees[0].episode.tolist())) + len(set(trees[1].episode.tolist()))
    assert joined.episode.tolist()[-2:] == [first, first + 1] == [6, 7]
    assert joined.meta["agent"]["calls"] == 24
    assert [times is None for times in joined.meta["timeline"]] == [False] * 6 + [True] * 2
    assert Episodes(joined).tree.num_leaves == 8
    assert (joined.response_leaves <= 1).all()
    with pytest.raises(ValueError, match="different prompts"):
        join([trees[0], TokenTree.from_sequences([9], [[2]])])
