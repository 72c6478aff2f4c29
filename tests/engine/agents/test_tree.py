"""Trees of episodes: each sampled token is trained once after what it was sampled after, equal beginnings are one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine import LeafStatus, SamplingParams, TokenTree, batch_logprob, batch_loss, pack
from rolltree.engine.agents.records import EpisodeRecord, Failure, SampledCall
from rolltree.engine.agents.tree import OTHER_START, episode_tree
from rolltree.engine.batches.equal_prefixes import share_equal_prefixes
from rolltree.engine.batches.rows import distinct_rows
from rolltree.engine.data.segment import Origin
from rolltree.engine.programs import EnvironmentTurns, Observation
from rolltree.engine.record.failures import unsampled
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.kernels import Objective

from ...support import serving
from ...support.conversations import TEMPLATE
from ..model.test_tree_equals_flat import make_models
from .calls import RandomAgent, call_tree, calls_of, sampled_tokens

STOP, LENGTH, FAILED = LeafStatus.STOP, LeafStatus.LENGTH, LeafStatus.FAILED
STRUCTURE = (
    "parent", "start", "length", "first_leaf", "last_leaf", "token_id", "position", "parent_row", "subtree_end",
    "leaf_node", "leaf_order", "leaf_prompt",
)  # fmt: skip


class Talk:
    """Says something of another length after each turn, and rewards the length of what it heard."""

    def __init__(self, context: Any) -> None:
        self.turns = 0

    async def step(self, messages: list[dict[str, Any]]) -> Observation:
        self.turns += 1
        said = str(messages[-1]["content"])
        return Observation([{"role": "user", "content": "x" * (len(said) % 5)}], reward=float(len(said)))


def conversation_tree(seed: int, turns: int = 4, n: int = 4) -> TokenTree:
    """A group of the real environment program by a tiny model."""
    words = serving.tokenizer()
    words.chat_template = TEMPLATE
    engine = NativeEngine(serving.model(), words, EngineConfig(kv_tokens=8192))
    question = [{"role": "user", "content": "Six times seven?"}]
    prompt = words.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False)
    allowed = [*words("abc")["input_ids"], words.eos_token_id]
    params = SamplingParams(n=n, max_new_tokens=120, allowed_token_ids=allowed, seed=seed)
    context = {"messages": question, "tools": ()}
    program = EnvironmentTurns(Talk, max_turns=turns)
    (tree,) = engine.generate([prompt], params, program, contexts=[context])
    return tree


def test_the_example_of_observations_and_actions() -> None:
    o1, a1, o2, a2, o3, a3, o4, a4 = [1, 2], [3, 4], [5], [6], [1, 9], [7], [8], [3]
    calls = [(o1, a1), (o1 + a1 + o2, a2), (o3, a3), (o1 + a1 + o4, a4)]
    record = EpisodeRecord(
        tuple(SampledCall(call_tree(read, said, [-1.0] * len(said)), number=i) for i, (read, said) in enumerate(calls)),
        STOP,
    )
    tree = episode_tree([], [record])
    paths = [tree.token_id[tree.path_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]
    split = [(path[:length], path[length:]) for path, length in zip(paths, tree.leaf_prompt, strict=True)]
    assert split == [(o1, a1 + o2 + a2), (o3, a3), (o1 + a1 + o4, a4)]
    assert sorted(tree.token_id) == sorted([1, 2, *a1, *o2, *a2, 9, *a3, *o4, *a4])  # O3 shares its first token too


@pytest.mark.check(but=1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_dialogue_that_only_appends_gives_the_tree_of_the_environment(seed: int) -> None:
    wanted = conversation_tree(seed)
    episodes = [
        EpisodeRecord(
            tuple(calls_of(wanted, leaf)), LeafStatus(int(wanted.status[leaf])), wanted.meta["given_rewards"][leaf]
        )
        for leaf in range(wanted.num_leaves)
    ]
    assert [len(record.calls) for record in episodes] == [4] * 4
    tree = episode_tree(wanted.token_id[: wanted.prompt_length].tolist(), episodes)
    for name in STRUCTURE:
        assert np.array_equal(getattr(tree, name), getattr(wanted, name)), name
        assert getattr(tree, name).dtype == getattr(wanted, name).dtype
    assert set(tree.columns) - set(wanted.columns) == {"episode", "answer", "call"}
    for name, values in wanted.columns.items():
        assert tree.columns[name].dtype == values.dtype
        assert np.array_equal(tree.columns[name], values, equal_nan=values.dtype.kind == "f"), name
    assert tree.meta["given_rewards"] == wanted.meta["given_rewards"]
    assert tree.episode.tolist() == [0, 1, 2, 3]
    assert "roles" not in tree.meta
    assert "errors" not in tree.meta


def trained(tree: TokenTree) -> list[tuple[int, int, float, tuple[int, ...]]]:
    """Episode, id, log-prob and all ids before it of each token that a leaf trains."""
    found = []
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        ids = tree.token_id[rows].tolist()
        for place in range(int(tree.leaf_prompt[leaf]), len(ids)):
            if tree.loss_mask[rows[place]]:
                logprob = float(tree.behaviour_logprob[rows[place]])
                found.append((int(tree.episode[leaf]), ids[place], logprob, tuple(ids[:place])))
    return found


def prefixes(episodes: list[EpisodeRecord]) -> set[tuple[int, ...]]:
    every = [call.tree.token_id.tolist() for record in episodes for call in record.calls]
    return {tuple(ids[: n + 1]) for ids in every for n in range(len(ids))}


@pytest.mark.check
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 7), st.booleans())
@settings(max_examples=300, deadline=None)
def test_each_sampled_token_is_trained_once(seed: int, episodes: int, calls: int, per_call: bool) -> None:
    rng = np.random.default_rng(seed)
    agent = RandomAgent(rng)
    records = [agent.episode(int(rng.integers(1, calls + 1))) for _ in range(episodes)]
    tree = episode_tree([1, 2], records, per_call=per_call)
    assert sorted(trained(tree)) == sorted(sampled_tokens(records))
    assert (tree.response_leaves <= 1).all()
    assert sorted(set(tree.episode.tolist())) == list(range(episodes))
    assert tree.episode.tolist() == sorted(tree.episode.tolist())
    for number, record in enumerate(records):
        (main,) = np.flatnonzero((tree.episode == number) & tree.answer)
        own = [call for call in record.calls if not call.role]
        assert tree.token_id[tree.path_rows(int(main))].tolist() == own[-1].tree.token_id.tolist()
        mine = int((tree.episode == number).sum())
        assert mine == len(record.calls) if per_call else mine <= len(record.calls)
    assert distinct_rows(tree).num_rows == len(prefixes(records))
    of_prompts = np.flatnonzero(tree.origin == Origin.PROMPT)
    ids = {tuple(path_to(tree, int(row))) for row in of_prompts}
    assert len(ids) == len(of_prompts)  # a beginning that is equal is stored once
    if any(call.role for record in records for call in record.calls):
        assert tree.meta["roles"] == ["agent", "helper"]
        said = {c.tree.behaviour_logprob[i] for r in records for c in r.calls if c.role for i in range(*span(c))}
        assert {tree.behaviour_logprob[row] for row in np.flatnonzero(tree.role == 1)} == said
    calls_made = [call for record in records for call in record.calls]
    assert tree.meta["agent"] == {
        "calls": len(calls_made), "call_tokens": sum(c.tree.num_tokens for c in calls_made), "tool_s": 0.0
    }  # fmt: skip


def span(call: SampledCall) -> tuple[int, int]:
    return int(call.tree.leaf_prompt[0]), call.tree.num_tokens


def path_to(tree: TokenTree, row: int) -> list[int]:
    ids = []
    while row >= 0:
        ids.append(int(tree.token_id[row]))
        row = int(tree.parent_row[row])
    return ids


def record(*calls: tuple[list[int], list[int]], roles: tuple[str, ...] = (), **fields: Any) -> EpisodeRecord:
    made = [
        SampledCall(call_tree(prompt, said, [-1.0 - i] * len(said)), dict(enumerate(roles)).get(i, ""), i)
        for i, (prompt, said) in enumerate(calls)
    ]
    return EpisodeRecord(tuple(made), **({"status": STOP} | fields))


def leaf(tree: TokenTree, number: int) -> tuple[list[int], list[int]]:
    ids, cut = tree.token_id[tree.path_rows(number)].tolist(), int(tree.leaf_prompt[number])
    return ids[:cut], ids[cut:]


def test_the_first_of_two_calls_that_continue_one_continues_its_chain() -> None:
    """And what the second shares with the first, observations too, is its prompt."""
    tree = episode_tree([1, 2], [record(([1, 2], [3]), ([1, 2, 3, 7, 8], [4]), ([1, 2, 3, 7, 9], [5]))])
    assert [leaf(tree, i) for i in range(2)] == [([1, 2], [3, 7, 8, 4]), ([1, 2, 3, 7, 9], [5])]
    assert tree.num_tokens == 8
    assert tree.answer.tolist() == [False, True]
    rows = tree.response_rows(0)
    assert tree.origin[rows].tolist() == [Origin.SAMPLED, Origin.OBSERVATION, Origin.OBSERVATION, Origin.SAMPLED]
    assert tree.call[rows].tolist() == [1, 2, 2, 2]
    assert tree.call[tree.response_rows(1)].tolist() == [3]


def test_a_call_continues_the_longest_chain_that_it_begins_with() -> None:
    """The same answer was sampled twice; what followed the first one is not read again after the second."""
    tree = episode_tree([1], [record(([1], [3]), ([1], [3]), ([1, 3, 7], [4]), ([1, 3, 7, 4, 8], [5]))])
    assert [leaf(tree, i) for i in range(2)] == [([1], [3, 7, 4, 8, 5]), ([1], [3])]
    assert tree.num_tokens == 7


def test_an_edited_answer_is_a_branch_inside_of_what_was_sampled() -> None:
    tree = episode_tree([1], [record(([1], [3, 4, 5]), ([1, 3, 4, 9], [6]))])
    assert [leaf(tree, i) for i in range(2)] == [([1], [3, 4, 5]), ([1, 3, 4, 9], [6])]
    assert tree.num_tokens == 6


def test_the_same_call_twice_is_two_leaves() -> None:
    tree = episode_tree([1], [record(([1], [3]), ([1], [3]))])
    assert [leaf(tree, i) for i in range(2)] == [([1], [3]), ([1], [3])]
    assert tree.loss_tokens == 2


def test_sub_agents_have_roles_and_the_agents_own_last_answer_is_the_episodes() -> None:
    calls = (([1, 2], [3]), ([1, 7], [4]), ([1, 2, 3, 8], [5]), ([1, 7, 4, 8], [6]))
    tree = episode_tree([1, 2], [record(*calls, roles=("", "search", "", "search"))])
    assert [leaf(tree, i) for i in range(2)] == [([1, 2], [3, 8, 5]), ([1, 7], [4, 8, 6])]
    assert tree.answer.tolist() == [True, False]
    assert tree.meta["roles"] == ["agent", "search"]
    assert [tree.role[tree.response_rows(i)].tolist() for i in range(2)] == [[0, 0, 0], [1, 0, 1]]


def test_statuses_failures_and_episodes_without_calls() -> None:
    tree = episode_tree(
        [1, 2],
        [
            record(([1, 2], [3]), ([1, 5], [4]), status=LENGTH, reward=0.5, extras={"form": 1.0}),
            record(([1, 2], [3]), ([1, 5], [4]), failure=Failure("raised", "it crashed"), status=FAILED),
            record(status=FAILED, failure=Failure("silent", "it said nothing")),
            record(([9, 2], [3])),
        ],
    )
    assert tree.episode.tolist() == [0, 0, 1, 1, 2, 3]
    assert tree.status.tolist() == [STOP, LENGTH, FAILED, FAILED, FAILED, FAILED]
    assert unsampled(tree) == {2: "it crashed", 3: "it crashed", 4: "it said nothing", 5: OTHER_START.why}
    failed = {name: number for name, number in tree.meta["agent"].items() if name.startswith("failed_")}
    assert failed == {"failed_raised": 1, "failed_silent": 1, "failed_template": 1}
    assert tree.meta["given_rewards"] == {0: 0.5, 1: 0.5}
    assert tree.meta["given_named"] == {0: {"form": 1.0}, 1: {"form": 1.0}}
    assert tree.response_length.tolist()[4:] == [0, 0]
    kept = tree.without_leaves(tree.status == FAILED)
    assert kept is not None
    assert kept.episode.tolist() == [0, 0]


def test_a_group_without_any_call_is_its_prompt() -> None:
    tree = episode_tree(
        [7, 8],
        [record(failure=Failure("raised", "x"), status=FAILED), record(failure=Failure("raised", "y"), status=FAILED)],
    )
    assert tree.token_id.tolist() == [7, 8]
    assert tree.response_length.tolist() == [0, 0]
    assert unsampled(tree) == {0: "x", 1: "y"}


def test_what_is_no_group_of_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        episode_tree([1], [])
    two = TokenTree.from_sequences([1], [[2], [3]])
    with pytest.raises(ValueError, match="one leaf, got 2"):
        episode_tree([1], [EpisodeRecord((SampledCall(two),), STOP)])


def losses(model: torch.nn.Module, trees: list[TokenTree], objective: Objective) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total, normalizer = 0.0, float(sum(tree.loss_tokens for tree in trees))
    for batch in pack(trees, max_tokens=100_000):
        out = batch_loss(model, batch, objective, normalizer=normalizer, old_logprob="behaviour")
        out.loss.backward()
        total += out.loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_what_an_engine_sampled_has_the_log_probs_of_the_trainer() -> None:
    """Each call of random agents is a job of the native engine; the trainer computes the tree with the same weights."""
    model = serving.model()
    engine = NativeEngine(model, serving.tokenizer(), EngineConfig(kv_tokens=8192))
    rng, records = np.random.default_rng(4), []
    for number in range(3):
        calls: list[SampledCall] = []
        for k in range(5):
            ids = [[256, 5, 6], *(call.tree.token_id.tolist() for call in calls)]
            before = ids[int(rng.integers(len(ids)))] if k % 2 else ids[-1]
            before = before[: int(rng.integers(1, len(before) + 1))] if k == 3 else before
            prompt = [*before, *rng.integers(1, 200, 3).tolist()]
            params = SamplingParams(n=1, max_new_tokens=7, temperature=0.8, seed=10 * number + k)
            calls.append(SampledCall(engine.generate([prompt], params)[0], number=k))
        records.append(EpisodeRecord(tuple(calls), STOP))
    tree = episode_tree([256], records)
    assert 3 < tree.num_leaves < 15
    assert sorted(trained(tree)) == sorted(sampled_tokens(records))
    (batch,) = pack([tree], max_tokens=10_000)
    with torch.no_grad():
        found = batch_logprob(model, batch, temperature=0.8).logprob
    assert batch.behaviour_logprob is not None
    off = (found - batch.behaviour_logprob)[batch.loss_mask].abs()
    assert len(off) == sum(call.tree.loss_tokens for one in records for call in one.calls)
    assert float(off.max()) < 1e-4


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("per_call", [False, True])
def test_loss_and_gradient_are_those_of_the_calls_one_by_one(per_call: bool, alike: bool) -> None:
    """Where equal beginnings have equal records too, and the learner merges them."""
    model, _ = make_models("qwen3")
    agent = RandomAgent(np.random.default_rng(5), words=2 if alike else 20, longest=6, alike=alike)
    records = [agent.episode(6) for _ in range(4)]
    tree = episode_tree([1, 2], records, per_call=per_call)
    advantage = np.array([1.0, -0.5, 2.0, -1.0])
    tree.set("advantage", advantage[tree.episode])
    flat = []
    for number, episode in enumerate(records):
        for call in episode.calls:
            ids, cut = call.tree.token_id.tolist(), int(call.tree.leaf_prompt[0])
            logprobs = [call.tree.behaviour_logprob[cut:]]
            given = {"advantages": [advantage[number]], "behaviour_logprobs": logprobs}
            flat.append(TokenTree.from_sequences(ids[:cut], [ids[cut:]], **given))
    objective = Objective.preset("ppo", entropy_coef=0.01)
    (ours, gradient), (theirs, wanted) = losses(model, [tree], objective), losses(model, flat, objective)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5
    assert tree.num_tokens < 0.5 * sum(one.num_tokens for one in flat)
    shared = share_equal_prefixes(tree)
    assert (shared is not tree) == alike
    (ours, gradient) = losses(model, [shared], objective)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5
