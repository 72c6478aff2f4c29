"""Tokens keep the policy, the temperature and the purpose that they were sampled with, up to the update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.checks import check_training
from rolltree.engine.loop.controller import Controller

from ...support.real_step import Steps, along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import REWARD, tiny_job

JUDGES = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)


def by_prompt(text, entry):  # some groups all right, some all wrong, some mixed
    kind = int(entry["question"]) % 3
    return [0.0, 1.0, float(len(text) % 2)][kind]
"""

MINE = """
from rolltree.engine.programs import Given, Rewind, RolloutProgram


class Warm(RolloutProgram):  # each response again from the prompt and from its middle, at other temperatures
    rewinds = True

    def start(self, group):
        return group.width

    def decide(self, group, finished):
        for segment in finished:
            if len(segment.branch) == 1:
                yield Rewind(segment.branch, 0, 1, temperature=0.5)
                yield Rewind(segment.branch, segment.length // 2, 2, temperature=2.0)


class Sums:
    def __init__(self):
        self.number, self.seen = 0, []

    def next(self, count):
        self.number += count
        numbers = range(self.number - count, self.number)
        return [{"prompt": f"{k} + 2 =", "answer": "1", "question": str(k)} for k in numbers]

    def observe(self, trees):
        self.seen.append([
            (t.meta["prompt_id"], t.meta.get("dropped"), t.rewards["reward"].tolist(), t.advantage.tolist())
            for t in trees
        ])


"""


PROBLEMS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1), "id": a} for a in range(6)]
toml = tiny_job({"mine.py": MINE, "reward.py": REWARD + JUDGES, "problems.jsonl": PROBLEMS})


def reward(toml: Path, name: str) -> str:
    return f"--reward.verifier={toml.parent}/reward.py:{name}"


def norm(rewards: np.ndarray) -> np.ndarray:
    values = rewards.astype(np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def tempered(model, tree, leaf: int, temperature: np.ndarray) -> torch.Tensor:
    """Log-probs of a response's tokens, each at a temperature of its own."""
    path = tree.path_rows(leaf)
    ids = torch.from_numpy(tree.token_id[path].astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, int(tree.leaf_prompt[leaf]) - 1 : -1]
    logits = logits / torch.from_numpy(np.array(temperature, np.float32))[:, None]
    return torch.log_softmax(logits, -1).gather(1, ids[int(tree.leaf_prompt[leaf]) :, None])[:, 0]


def credit_of(tree, leaf: int) -> float:
    return float(norm(tree.rewards["reward"])[leaf])


LAGGING = (
    "--loop.staleness=1", "--loop.overlap=false", "--trainer.steps=3", "--trainer.lr=0.01",
    "--loop.temperature_scale=[[1,1.0],[2,2.0],[3,0.5]]",
)  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("recompute", [False, True])
def test_groups_are_trained_at_the_temperature_of_their_sampling(toml, tmp_path, monkeypatch, recompute) -> None:
    at: dict[int, float] = {}
    submit = Controller._submit

    def noting(self, groups, *rest, **more):
        at.update({group.ticket: self._params.temperature for group in groups})
        return submit(self, groups, *rest, **more)

    monkeypatch.setattr(Controller, "_submit", noting)
    old = ["--algorithm.old_logprob=recompute"] if recompute else []
    steps = take_steps(toml, tmp_path, reward(toml, "odd"), "--algorithm.objective=reinforce", *LAGGING, *old)
    other = 0
    for k, today in enumerate((1.0, 2.0, 0.5)):
        trees = steps.updates[k].trees
        wanted = [at[int(tree.group[0])] for tree in trees]
        other += sum(temperature != today for temperature in wanted)
        live = [(tree, t) for tree, t in zip(trees, wanted, strict=True) if np.ptp(tree.rewards["reward"])]

        def loss(model, live=live):
            terms, tokens = [], 0
            for tree, temperature in live:
                for leaf in range(tree.num_leaves):
                    lp = plain_logprobs(model, tree, leaf, temperature)
                    terms.append(credit_of(tree, leaf) * lp.sum())
                    tokens += len(lp)
            return -torch.stack(terms).sum() / tokens

        check_gradient(steps, loss, k)
        if recompute:
            model = plain_model(steps, steps.updates[k])
            for tree, temperature in zip(trees, wanted, strict=True):
                found = along(tree, 0, "proximal_logprob")
                torch.testing.assert_close(
                    found, plain_logprobs(model, tree, 0, temperature).detach(), atol=1e-4, rtol=0
                )
    assert other >= 6, "no group was trained at another temperature than today's, so nothing was shown"


@pytest.mark.check
@pytest.mark.parametrize("room", [256, 80])
def test_branches_of_one_prompt_have_temperatures_of_their_own(toml, tmp_path, room) -> None:
    """Some branches begin after the same token; trees are also packed in pieces."""
    steps = take_steps(
        toml, tmp_path, reward(toml, "odd"), f"--rollout.program={toml.parent}/mine.py:Warm", "--trainer.lr=0.01",
        "--algorithm.objective=ppo", "--trainer.updates_per_step=2", "--rollout.temperature=0.8",
        "--trainer.prompts_per_step=4", f"--trainer.max_tokens={room}",
    )  # fmt: skip
    assert any(tree.num_tokens > 80 for tree in steps.trees)
    for tree in steps.trees:
        firsts = tree.temperature[tree.start[1:][tree.parent[1:] == 0]]
        assert {0.5, np.float32(0.8)} <= set(firsts)
        assert 2.0 in tree.temperature
    first = plain_model(steps, steps.updates[0])
    for tree, leaf in leaves_of(steps.updates[0].trees)[:12]:
        own = tempered(first, tree, leaf, along(tree, leaf, "temperature").numpy()).detach()
        torch.testing.assert_close(own, along(tree, leaf, "behaviour_logprob"), atol=1e-4, rtol=0)
    live = [tree for tree in steps.updates[1].trees if np.ptp(tree.rewards["reward"])]

    def ppo(model):
        terms = []
        for tree, leaf in leaves_of(live):
            lp = tempered(model, tree, leaf, along(tree, leaf, "temperature").numpy())
            ratio = (lp - along(tree, leaf, "behaviour_logprob")).exp()
            credit = credit_of(tree, leaf)
            terms.append(-torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit))
        return torch.cat(terms).mean()

    check_gradient(steps, ppo, 1)


class TestSpoChain:
    """Values of cuts are means of their own continuations, which are not trained on."""

    def test_credit_and_gradient(self, toml, tmp_path) -> None:
        options = "{chains=2,samples=3,cut_after=2,threshold=0.5}"
        steps = take_steps(
            toml, tmp_path, reward(toml, "odd"), "--rollout.program=spo_chain", f"--rollout.program_options={options}",
            "--algorithm.advantage=segment_value_diff", "--algorithm.objective=reinforce",
            unset=["algorithm.advantage"],
        )  # fmt: skip
        differs = False
        wanted: list[tuple] = []
        orchestrator = steps.orchestrator
        assert all(tree.num_leaves == 2 for tree in steps.trees)  # what reaches the update
        for group in steps.judged:
            rewards = group.rewards["reward"]
            chains = np.flatnonzero(group.trained)
            assert len(chains) == 2
            paths = [group.path_rows(leaf)[group.prompt_length :] for leaf in range(group.num_leaves)]
            probes = [leaf for leaf in range(group.num_leaves) if not group.trained[leaf]]
            begin = {  # of each continuation: the chain it leaves last, and where
                leaf: max((self.common(paths[leaf], paths[chain]), -int(chain)) for chain in chains) for leaf in probes
            }
            at_prompt = [rewards[leaf] for leaf in probes if begin[leaf][0] == 0]
            assert len(at_prompt) == 6
            for chain in chains:
                sure = np.exp(group.behaviour_logprob[paths[chain]]) >= 0.5
                cuts = [i + 1 for i, n in enumerate(np.cumsum(~sure)) if not sure[i] and n % 2 == 0]
                cuts = [cut for cut in cuts if cut < len(paths[chain])][:16]
                assert sorted({b for b, c in begin.values() if -c == chain and b}) == cuts
                values = [np.mean(at_prompt)]
                values += [np.mean([rewards[p] for p in probes if begin[p] == (cut, -chain)]) for cut in cuts]
                values.append(rewards[chain])
                credit = np.repeat(np.diff(values), np.diff([0, *cuts, len(paths[chain])]))
                node = np.repeat(np.arange(group.num_nodes), group.length)[paths[chain]]
                np.testing.assert_allclose(group.node_advantage[node], credit, atol=1e-6)
                differs |= abs(np.mean(rewards) - values[0]) > 0.01
                wanted.append((group, int(chain), torch.from_numpy(credit).float()))
        assert differs

        def loss(model):
            found = [(plain_logprobs(model, group, chain), credit) for group, chain, credit in wanted]
            return -sum((lp * credit).sum() for lp, credit in found) / sum(len(lp) for lp, _ in found)

        check_gradient(steps, loss)
        tokens = orchestrator.buffer.ledger
        unseen = tokens.dropped["unseen"]  # the end of a chain whose last segment is worth nothing
        assert tokens.dropped["untrained"] + unseen + tokens.trained == tokens.sampled
        assert tokens.trained + unseen == sum(int(along(g, c, "loss_mask").sum()) for g, c, _ in wanted)

    @staticmethod
    def common(a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        return int((np.append(a[:n] == b[:n], False)).argmin())


CACHED = (
    "--rollout.program=mcts", "--rollout.program_options={segment_tokens=3,expansions=3,branch=2}",
    "--data.tasks=[]", "--data.template={prompt}", "--trainer.lr=0.02", "--algorithm.objective=ppo",
    "--trainer.steps=3",
)  # fmt: skip


def problems(toml: Path) -> str:
    return f"--data.path={toml.parent}/problems.jsonl"


@pytest.mark.check
def test_a_cached_solution_has_the_policy_that_sampled_it(toml, tmp_path) -> None:
    steps = take_steps(toml, tmp_path, reward(toml, "odd"), problems(toml), *CACHED)
    live = [tree for tree in steps.updates[2].trees if np.ptp(tree.rewards["reward"])]
    versions = np.concatenate([tree.policy_version[tree.loss_mask] for tree in live])
    assert set(versions) == {0, 2} or set(versions) == {0, 1, 2}
    ratios = []

    def ppo(model):
        terms = []
        for tree, leaf in leaves_of(live):
            lp = plain_logprobs(model, tree, leaf)
            ratio = (lp - along(tree, leaf, "behaviour_logprob")).exp()
            ratios.extend((ratio.detach() - 1).abs().tolist())
            credit = credit_of(tree, leaf)
            terms.append(-torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit))
        return torch.cat(terms).mean()

    check_gradient(steps, ppo, 2)
    assert max(ratios) > 0.05


@pytest.mark.slow
def test_checkpoints_hold_the_cached_solutions(toml, tmp_path) -> None:
    given = (reward(toml, "odd"), problems(toml), *CACHED)
    whole = take_steps(toml, tmp_path / "whole", *given)
    take_steps(toml, tmp_path / "parts", *given, "--trainer.steps=1")
    resumed = take_steps(toml, tmp_path / "parts", *given, resume=True)
    assert untimed(resumed) == untimed(whole)
    solved = [s.orchestrator.stateful["rollout.program"].state_dict()["solved"] for s in (whole, resumed)]
    assert solved[0] == solved[1] != {}


def untimed(steps: Steps) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in steps.rows]


def test_filters_do_not_go_with_tokens_of_older_policies(toml) -> None:
    config = load_config(toml, ["--rollout.program=mcts", "--rollout.program_options={}", "--rollout.top_p=0.9"])
    with pytest.raises(UserError, match="'mcts', which may return tokens of older policies, uses the sampler's log-p"):
        check_training(config)


@pytest.mark.check
def test_a_source_sees_trained_and_dropped_groups_with_their_credit(toml, tmp_path) -> None:
    steps = take_steps(
        toml, tmp_path, reward(toml, "by_prompt"), "--data.tasks=[]", f"--data.source={toml.parent}/mine.py:Sums",
        "--loop.callback=dynamic_sampling", "--trainer.steps=2", "--data.template={prompt}",
    )  # fmt: skip
    seen = steps.orchestrator.source._stream._source.seen
    assert [len([g for g in groups if g[1] is None]) for groups in seen] == [6, 6]
    dropped = [g for groups in seen for g in groups if g[1] is not None]
    assert {why for _, why, *_ in dropped} == {"equal_rewards"}
    assert len(dropped) == sum(row["group/dropped_equal_rewards"] for row in steps.rows) >= 12
    for _, why, rewards, advantage in (g for groups in seen for g in groups):
        np.testing.assert_allclose(advantage, norm(np.array(rewards)), atol=1e-5)
        assert (max(map(abs, advantage)) > 0.5) == (why is None)
    numbers = [int(g[0].rpartition("/")[2].rpartition(":")[2]) for groups in seen for g in groups]
    assert len(set(numbers)) == len(numbers)
