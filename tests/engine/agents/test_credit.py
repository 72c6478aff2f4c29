"""Credit, shaping, selections, group callbacks and curricula count an episode once, whatever its number of chains.

Each is computed on the chains of random agents, through the learner, and on the same episodes as single responses that
are written out here from the calls: the tokens of an episode in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolltree.engine import LeafStatus, TokenTree, UserError, load_config, pack
from rolltree.engine.agents.records import EpisodeRecord
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.app.assembly.learning import learning_parts
from rolltree.engine.app.assembly.methods import Methods, loss_terms
from rolltree.engine.data.paths import path_credit
from rolltree.engine.data.segment import Origin, Segment
from rolltree.engine.data.statistics import of_ids
from rolltree.engine.learn.learner import Learner
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.selections import PAIRINGS, SELECTIONS
from rolltree.engine.methods.shaping import SHAPINGS
from rolltree.engine.parts.context import Context
from rolltree.engine.record.metrics import Stopwatch
from rolltree.engine.settings import TrainConfig
from rolltree.engine.settings.capabilities import refuse
from rolltree.engine.settings.capabilities.agents import AGENTS, FORKS, UNTRAINED

from ...support import serving
from ...support.tiny import GIVEN, tiny_job
from ..model.test_tree_equals_flat import make_models
from .calls import RandomAgent, calls_of
from .test_tree import conversation_tree

STOP = LeafStatus.STOP
SCORED = (
    "value", "policy_entropy", "policy_logprob", "policy_sum_p2", "policy_mean_logprob", "policy_kl", "ref_logprob",
    "teacher_logprob", "entropy",
)  # fmt: skip
WORDS = serving.tokenizer()
MODEL, _ = make_models("qwen3")


toml = tiny_job({"given.jsonl": GIVEN})


def job(toml: Path, *flags: str) -> TrainConfig:
    fixed = ["--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm"]
    return load_config(toml, [*fixed, *flags])


def observed(record: EpisodeRecord) -> list[tuple[list[int], int]]:
    """For each call in order: what it read that the chain it continues had not, and where its prompt ends."""
    open_chains: list[list[int]] = []
    found = []
    for call in record.calls:
        ids, cut = call.tree.token_id.tolist(), int(call.tree.leaf_prompt[0])
        fitting = [chain for chain in open_chains if ids[:cut][: len(chain)] == chain and len(chain) <= cut]
        longest = max(map(len, fitting), default=0)
        before = next((chain for chain in fitting if len(chain) == longest), None)
        if before is None:
            found.append(([], cut))
            open_chains.append(ids)
        else:
            found.append((ids[len(before) : cut], cut))
            open_chains[next(i for i, chain in enumerate(open_chains) if chain is before)] = ids
    return found


def single_responses(records: list[EpisodeRecord], *, per_call: bool) -> TokenTree:
    """The group with one response an episode, its calls one after the other; per call without what they read."""
    parents, segments, leaves = [-1], [Segment.prompt([1])], []
    for record in records:
        above = 0
        for number, (call, (read, cut)) in enumerate(zip(record.calls, observed(record), strict=True), start=1):
            role = 1 if call.role else 0
            said = Segment.sampled(call.tree.token_id[cut:], call.tree.behaviour_logprob[cut:])
            extra = Segment.make(said.token_ids, call=number, role=role, temperature=1.0).columns
            for segment in (
                Segment.make([] if per_call else read, origin=Origin.OBSERVATION, call=number),
                Segment(said.token_ids, {**said.columns, **extra}),
            ):
                parents.append(above)
                segments.append(segment)
                above = len(segments) - 1
        leaves.append(above)
    tree = TokenTree.from_nodes(parents, segments, leaves, [record.status for record in records])
    tree.meta["roles"] = ["agent", "helper"]
    return tree


def scored(tree: TokenTree) -> None:
    """Write scores that follow from the log-prob that each sampled token was recorded with, and given tokens' ids."""
    key = np.where(np.isnan(tree.behaviour_logprob), tree.token_id + 0.25 * tree.call, 100 * tree.behaviour_logprob)
    for number, name in enumerate(SCORED):
        values = np.abs(np.sin((number + 1) * key.astype(np.float64)))
        tree.set(name, -values if "logprob" in name else values)


NAMED = {"a": [0.1, 0.9, 0.4, 0.7, 0.2], "b": [1.0, 0.0, 0.0, 1.0, 1.0], "flaw": [0.0, 1.0, 1.0, 0.0, 1.0]}


def groups(seed: int, *, per_call: bool = False) -> tuple[list[TokenTree], list[TokenTree], list[list[EpisodeRecord]]]:
    """Two groups of five episodes as chains (or calls), and as single responses; both judged and scored."""
    chains, flat, records = [], [], []
    for number in range(2):
        agent = RandomAgent(np.random.default_rng([seed, number]), words=9)
        agent.count = 1000 * number
        mine = [agent.episode(int(agent.rng.integers(2, 6))) for _ in range(5)]
        mine = [
            EpisodeRecord(tuple(c for c in one.calls if len(c.tree.token_id) > int(c.tree.leaf_prompt[0])), STOP)
            for one in mine
        ]
        records.append(mine)
        for made, trees in (
            (episode_tree([1], mine, per_call=per_call), chains),
            (single_responses(mine, per_call=per_call), flat),
        ):
            of = made.episode if "episode" in made.columns else np.arange(5)
            made.rewards["reward"] = np.array([1.0, 0.0, 0.0, 0.0, 0.0], np.float32)[of]
            if number:
                made.rewards["reward"] = np.array([0.0, 1.0, 1.0, 1.0, 0.0], np.float32)[of]
            made.rewards |= {name: np.array(values, np.float32)[of] for name, values in NAMED.items()}
            made.meta |= {"prompt_id": f"p{number}", "task": "t", "prompt_text": "x", "attempt": 0, "entry": {}}
            made.meta["roles"] = ["agent", "helper"]
            made.set("group", number)
            scored(made)
            trees.append(made)
    return chains, flat, records


def of_tokens(tree: TokenTree, values: np.ndarray) -> dict[float, float]:
    """Values ``[P]`` of the sampled tokens by the log-prob that names each."""
    rows = tree.path_tokens
    live = tree.loss_mask[rows]
    return dict(zip(tree.behaviour_logprob[rows][live].tolist(), values[live].tolist(), strict=True))


def same(chains: TokenTree, flat: TokenTree, values: Callable[[TokenTree], np.ndarray]) -> None:
    mine, wanted = of_tokens(chains, values(chains)), of_tokens(flat, values(flat))
    assert mine.keys() == wanted.keys()
    np.testing.assert_allclose([mine[k] for k in wanted], list(wanted.values()), rtol=1e-6, atol=1e-7)


def learner(config: TrainConfig) -> Learner:
    return Learner(learning_parts(Methods.make(config, Context(WORDS)), MODEL), Stopwatch(), print)


def credited(config: TrainConfig, trees: list[TokenTree]) -> list[TokenTree]:
    """Credit through the learner; the scores are there already."""
    return learner(config).credit(trees, 1, lambda *_: None)


OPTIONS: dict[str, str] = {
    "gdpo": "{weights={a=1.0,b=0.5}}",
    "noise_forward": "{false_negatives=0.1}",
    "pods": "{keep=3}",
    "by_role": '{rewards={agent="a",helper="b"}}',
    "by_role_mean": '{rewards={agent="a",helper="b"}}',
    "laser": "{token=3}",
    "constrained": "{targets={a=0.9}}",
    "reweighted": '{names=["a","b"]}',
    "gae": "{gamma=0.9,lam=0.8}",
    "reinforce_pp": "{gamma=0.9}",
    "turn_credit": "{gamma=0.9}",
    "log_ratio": "{gamma=0.9}",
    "dispersed": r"{pattern='(.)$'}",
}


@pytest.mark.slow(but=39)
@pytest.mark.check(but=12)
@pytest.mark.parametrize("per_call", [False, True])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_advantage_is_that_of_single_responses_or_refused(toml: Path, name: str, per_call: bool) -> None:
    flags = [f"--algorithm.advantage={name}", f"--algorithm.advantage_options={OPTIONS.get(name, '{}')}"]
    if name == "gae":
        flags.append("--roles.critic={}")
    config = job(toml, *flags)
    if name in FORKS | UNTRAINED:
        with pytest.raises(UserError, match=f"`algorithm.advantage` = '{name}' .* does not have; use another"):
            refuse(AGENTS, as_agent(config))
        return
    refuse(AGENTS, as_agent(config))
    chains, flat, _ = groups(3, per_call=per_call)
    assert sum(tree.num_leaves for tree in chains) > 14
    for trees in (chains, flat):
        for tree in trees:
            rng = np.random.default_rng(7)
            values = tree.behaviour_logprob[tree.path_tokens]
            sampled = np.unique(values[~np.isnan(values)]).tolist()
            rewarded = {lp: rng.normal() for lp in sampled if rng.random() < 0.4}
            tree.set("token_reward", [rewarded.get(lp, np.nan) for lp in values.tolist()])
            if name == "laser":
                of_ids("algorithm.advantage", "policy_logprob/scored_id")
                tree.set("policy_logprob/scored_id", tree.policy_logprob)
    mine, wanted = credited(config, chains), credited(config, flat)
    for one, other in zip(mine, wanted, strict=True):
        same(one, other, path_credit)
        if name == "gae":
            same(one, other, lambda tree: tree.value_target)
    every = np.concatenate([path_credit(tree) for tree in mine])
    assert np.ptp(every) > 0


def as_agent(config: TrainConfig) -> TrainConfig:
    rollout = config.rollout.model_copy(update={"program": "agent"})
    return config.model_copy(update={"rollout": rollout})


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def sd(values: list[float]) -> float:
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def test_group_norm_counts_each_episode_once(toml: Path) -> None:
    """By hand: the first episode has most chains, and would pull the mean if they counted."""
    chains, _, _ = groups(5)
    assert len({int((chains[0].episode == i).sum()) for i in range(5)}) > 1
    (tree, _) = credited(job(toml, "--algorithm.advantage=group_norm"), chains)
    R = [1.0, 0.0, 0.0, 0.0, 0.0]
    for leaf, number in enumerate(tree.episode.tolist()):
        assert tree.advantage[leaf] == pytest.approx((R[number] - mean(R)) / (sd(R) + 1e-6), rel=1e-6)


def test_turns_are_calls(toml: Path) -> None:
    """Return to go over the calls of an episode in their order, normalised over the group's calls of one number."""
    chains, _, records = groups(8)
    trees = credited(
        job(toml, "--algorithm.advantage=turn_credit", "--algorithm.advantage_options={gamma=0.5}"), chains
    )
    for tree, mine, R in zip(trees, records, ([1.0, 0, 0, 0, 0], [0.0, 1, 1, 1, 0]), strict=True):
        returns = [
            [r * 0.5 ** (len(one.calls) - 1 - k) for k in range(len(one.calls))] for one, r in zip(mine, R, strict=True)
        ]
        found = of_tokens(tree, path_credit(tree))
        for number, one in enumerate(mine):
            for k, call in enumerate(one.calls):
                having = [some[k] for some in returns if len(some) > k]
                want = 0.0 if len(having) < 2 else (returns[number][k] - mean(having)) / (sd(having) + 1e-6)
                for lp in call.tree.behaviour_logprob[int(call.tree.leaf_prompt[0]) :].tolist():
                    assert found[lp] == pytest.approx(want, abs=1e-5)


def test_an_episode_whose_judging_failed_is_left_out_whole(toml: Path) -> None:
    chains, _, _ = groups(5)
    for tree in chains:
        tree.rewards["reward"][tree.episode == 1] = np.nan
    mine = credited(job(toml, "--algorithm.advantage=group_mean"), chains)
    assert all(1 not in tree.episode for tree in mine)
    R = [1.0, 0.0, 0.0, 0.0]
    kept = [0, 2, 3, 4]
    for leaf, number in enumerate(mine[0].episode.tolist()):
        assert mine[0].advantage[leaf] == pytest.approx(R[kept.index(number)] - mean(R))


SHAPED: dict[str, str] = {
    "weighted": "{weights={a=1.0,b=0.5}}",
    "gated": '{gate="b"}',
    "overlong": "{longest=12}",
    "cosine_length": "{longest=12}",
    "repetition": "{size=2}",
    "concise": "{longest=12}",
    "difficulty_length": "{longest=12}",
    "noise_backward": "{false_positives=0.1,false_negatives=0.2}",
    "clip_steps": "{threshold=0.1}",
    "length_budget": "{budget=5.0}",
    "length_peak": "{longest=12}",
    "ensemble": '{names=["a","b"]}',
    "step_verdicts": '{of="agent",by="helper",separator="x"}',
    "learnability": '{of="agent",by="helper",solved="b"}',
    "exploration": r"{pattern='(.)$'}",
}


@pytest.mark.check(but=4)
@pytest.mark.parametrize("name", sorted(SHAPINGS))
def test_every_shaping_is_that_of_single_responses(toml: Path, name: str) -> None:
    config = job(toml, f'--reward.shaping=[{{name="{name}",options={SHAPED.get(name, "{}")}}}]')
    refuse(AGENTS, as_agent(config))
    chains, flat, _ = groups(4)
    for trees in (chains, flat):
        for tree in trees:
            values = tree.behaviour_logprob[tree.path_tokens]
            tree.set(
                "token_reward", np.where(np.isnan(values) | (np.sin(90 * values) < 0), np.nan, np.sin(50 * values))
            )
    mine, wanted = credited(config, chains), credited(config, flat)
    for one, other in zip(mine, wanted, strict=True):
        for reward in sorted(other.rewards):
            np.testing.assert_allclose(
                one.rewards[reward], other.rewards[reward][one.episode], rtol=1e-5, err_msg=reward
            )
        same(one, other, path_credit)
        same(one, other, lambda tree: tree.token_reward)


def given(toml: Path, rejected: str | None = None) -> str:
    """A table of demonstrations."""
    key = "" if rejected is None else f',rejected_key="{rejected}"'
    return f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4{key}}}"


CHOSEN: dict[str, str] = {
    "most_varied": "{keep=3}",
    "consistent": "{keep=3}",
    "between": '{begin="",end="$"}',
    "random_share": "{share=0.5}",
}


@pytest.mark.check(but=4)
@pytest.mark.parametrize("name", sorted(SELECTIONS))
def test_every_selection_is_that_of_single_responses(toml: Path, name: str) -> None:
    flags = [f"--algorithm.select={name}", f"--algorithm.select_options={CHOSEN.get(name, '{}')}"]
    further = {"calm": ["--roles.reference={}"], "demonstrated": [given(toml)]}
    config = job(toml, *flags, *further.get(name, []))
    refuse(AGENTS, as_agent(config))
    chains, flat, _ = groups(6)
    ((term, _),) = loss_terms(config, Context(WORDS))
    for trees in (chains, flat):
        for tree in trees:
            tree.set("token_reward", np.sin(90 * tree.behaviour_logprob[tree.path_tokens]))
        term.prepare(trees)

    def weight(tree: TokenTree) -> np.ndarray:
        if "select_token/actor" in tree.columns:
            return np.asarray(getattr(tree, "select_token/actor"))[tree.path_tokens]
        return np.repeat(getattr(tree, "select_leaf/actor"), tree.response_length)

    for one, other in zip(chains, flat, strict=True):
        if name == "random_share":  # each token by its place: others, as many
            assert 0 < weight(one)[one.loss_mask[one.path_tokens]].mean() < 1
        else:
            same(one, other, weight)


@pytest.mark.parametrize("name", sorted(PAIRINGS))
def test_pairs_of_episodes_are_refused(toml: Path, name: str) -> None:
    flags = [f'--algorithm.terms=[{{name="dpo",pairs="{name}"}}]', "--roles.reference={}"]
    flags += [given(toml, "rejected")] if name == "chosen_and_rejected" else []
    config = job(toml, *flags)
    chains, _, _ = groups(2)
    term = loss_terms(config, Context(WORDS))[1][0]
    if name == "chosen_and_rejected":
        refuse(AGENTS, as_agent(config))
        term.prepare(chains)
        assert not any(term.extent(tree).any() for tree in chains)
        return
    with pytest.raises(UserError, match=f"'dpo' with pairs = '{name}' compares .* use pairs of demonstrations"):
        refuse(AGENTS, as_agent(config))
    with pytest.raises(UserError, match="compares two sequences, and an episode of an agent has several"):
        term.prepare(chains)


@pytest.fixture(scope="module")
def dialogues() -> tuple[list[TokenTree], list[TokenTree]]:
    """Two groups of the environment program, and the same as the calls of agents, judged and scored."""
    theirs = [conversation_tree(seed) for seed in (0, 1)]
    mine = []
    for number, tree in enumerate(theirs):
        records = [
            EpisodeRecord(tuple(calls_of(tree, leaf)), LeafStatus(int(tree.status[leaf])))
            for leaf in range(tree.num_leaves)
        ]
        mine.append(episode_tree(tree.token_id[: tree.prompt_length].tolist(), records))
        for made in (tree, mine[-1]):
            made.rewards["reward"] = np.array([[1.0, 0, 0, 0], [0, 1, 1, 0]], np.float32)[number]
            made.rewards |= {name: np.array(values[:4], np.float32) for name, values in NAMED.items()}
            made.meta |= {"prompt_id": f"p{number}", "task": "t", "prompt_text": "x", "roles": ["agent", "helper"]}
            made.set("token_reward", np.sin(np.arange(len(made.path_tokens))))
            key = np.nan_to_num(made.behaviour_logprob, nan=-0.5).astype(np.float64)
            for k, name in enumerate((*SCORED, "policy_logprob/scored_id")):
                of_ids("a test", "policy_logprob/scored_id")
                made.set(name, -np.abs(np.sin((k + 1) * key)) if "logprob" in name else np.abs(np.sin((k + 1) * key)))
    return mine, theirs


@pytest.mark.slow(but=15)
@pytest.mark.check(but=4)
@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - FORKS - UNTRAINED))
def test_a_dialogue_has_the_credit_and_loss_of_the_environment(
    toml: Path, name: str, dialogues: tuple[list[TokenTree], list[TokenTree]]
) -> None:
    """Bit for bit: a dialogue that only appends is the environment's."""
    flags = [f"--algorithm.advantage={name}", f"--algorithm.advantage_options={OPTIONS.get(name, '{}')}"]
    config = job(toml, *flags, *(["--roles.critic={}"] if name == "gae" else []), "--algorithm.objective=grpo")
    found = []
    for trees in dialogues:
        copies = [replace(tree, columns=dict(tree.columns), rewards=dict(tree.rewards)) for tree in trees]
        kept = credited(config, copies)
        ((term, _),) = loss_terms(config, Context(WORDS))
        term.prepare(kept)
        (batch,) = pack(kept, max_tokens=100_000)
        made = term.on(batch, term.normalizer(kept), False, 1.0)
        fields = made.fields
        found.append([*(path_credit(tree) for tree in kept), fields.adv_pos, fields.adv_neg, fields.weight])
        found[-1].append(np.array(term.normalizer(kept)))
    for mine, theirs in zip(*found, strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))
