"""Objectives on the chains of agents: the loss and gradients of formulas on plain sequences, through the trainer.

A chain is a sequence. In a mean over sequences those of an episode weigh 1 together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.engine import TokenTree, UserError, batch_logprob, load_config, pack
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.app.assembly.methods import loss_terms
from rolltree.engine.app.assembly.methods import objective as run_objective
from rolltree.engine.methods.groups import GROUP_CALLBACKS
from rolltree.engine.methods.losses import LOSSES
from rolltree.engine.methods.selections import sampled
from rolltree.engine.settings import TrainConfig
from rolltree.engine.settings.capabilities import refuse
from rolltree.engine.settings.capabilities.agents import AGENTS, COMPARED, OTHER_PROMPTS
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective
from rolltree.kernels.policy_loss import PRESETS

from ...kernels.formulas import AGGREGATION, BY_CHANCE, FORMULAS, TOKEN_LOSS
from ...support.fresh import once_a_test
from ..model.test_tree_equals_flat import make_models
from .calls import RandomAgent
from .test_credit import as_agent

LIMIT = 40
"""Longest response in tokens, for the aggregation that divides by it."""
NOT_IN_RUNS = ("clip_tensor",)
"""Objectives that need fields which no run has."""


@once_a_test
def models() -> tuple[Any, Any]:
    return make_models("qwen3")


def episodes(per_call: bool) -> list[TokenTree]:
    """Two groups with credit, rewards and log-probs of several policies near the model's own."""
    ours, _ = models()
    trees = []
    for number in range(2):
        agent = RandomAgent(np.random.default_rng([13, number]), words=30, longest=6)
        records = [agent.episode(int(agent.rng.integers(2, 6))) for _ in range(3)]
        tree = episode_tree([1], records, per_call=per_call)
        rng = np.random.default_rng(number)
        tree.set("advantage", rng.normal(size=3)[tree.episode])
        tree.rewards["reward"] = np.array([1.0, 0.0, 1.0], np.float32)[tree.episode]
        trees.append(tree)
    (batch,) = pack(trees, max_tokens=100_000)
    with torch.no_grad():
        now = batch_logprob(ours, batch).logprob.numpy()
    begin = 0
    for number, tree in enumerate(trees):
        rng = np.random.default_rng([7, number])
        own = np.full(tree.num_tokens, np.nan, np.float32)
        own[tree.prompt_length :] = now[begin : (begin := begin + tree.num_tokens - tree.prompt_length)]
        for name, spread in (("behaviour", 0.25), ("proximal", 0.2), ("teacher", 0.4), ("ref", 0.5)):
            tree.set(f"{name}_logprob", np.where(tree.loss_mask, own + spread * rng.normal(size=len(own)), np.nan))
    return trees


def flat(trees: list[TokenTree], model: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The chains one by one: what the formulas read, log-probs with gradient, and each sequence's weight."""
    parts: dict[str, list[Any]] = {}
    weights: list[float] = []
    for tree in trees:
        counted = [int(tree.loss_mask[tree.response_rows(leaf)].sum()) for leaf in range(tree.num_leaves)]
        for leaf in range(tree.num_leaves):
            ids = torch.from_numpy(tree.token_id[tree.path_rows(leaf)].astype(np.int64))
            cut, rows = int(tree.leaf_prompt[leaf]), tree.response_rows(leaf)
            every = model(input_ids=ids[None]).logits[0, cut - 1 : -1].log_softmax(-1)
            own = every.gather(1, ids[cut:, None])[:, 0]
            live = sum(n > 0 for n, e in zip(counted, tree.episode, strict=True) if e == tree.episode[leaf])
            values = {
                "logprob": own,
                "entropy": -(every.exp() * every).sum(-1),
                "mask": torch.from_numpy(tree.loss_mask[rows]),
                "sequence": torch.full((len(rows),), len(weights)),
                "pass_rate": torch.full((len(rows),), 2 / 3),
            }
            for name in ("behaviour", "proximal", "teacher", "ref"):
                values[name] = torch.from_numpy(np.nan_to_num(getattr(tree, f"{name}_logprob")[rows]))
            for name, value in values.items():
                parts.setdefault(name, []).append(value)
            parts.setdefault("advantage", []).append(torch.tensor([float(tree.advantage[leaf])]))
            weights.append(1 / live if counted[leaf] else 0.0)
    b = {name: torch.cat(values) for name, values in parts.items()}
    b["token_weight"] = torch.ones(len(b["mask"]))
    return b, b.pop("logprob"), torch.tensor(weights)


def mean(b: dict[str, Tensor], token_loss: Tensor, weight: Tensor, kind: str, responses: int) -> Tensor:
    """The mean over tokens, or over sequences that weigh 1 an episode; ``responses`` are the episodes."""
    loss = torch.where(b["mask"], token_loss, 0)
    zero = loss.new_zeros(len(weight))
    sums = zero.index_add(0, b["sequence"], loss)
    counts = zero.index_add(0, b["sequence"], b["mask"].to(loss.dtype)).clamp(min=1)
    return {
        "token_mean": lambda: loss.sum() / b["mask"].sum(),
        "batch_token_mean": lambda: loss.sum() / b["mask"].sum(),
        "token_sum": lambda: loss.sum(),
        "seq_mean_token_mean": lambda: (weight * sums / counts).sum() / responses,
        "seq_mean_token_sum": lambda: (weight * sums).sum() / responses,
        "seq_mean_token_sum_norm": lambda: (weight * sums).sum() / responses / LIMIT,
    }[kind]()


Formula = Callable[[dict[str, Tensor], Tensor], Tensor]


def check(formula: Formula, objective: Objective, trees: list[TokenTree], most: int = 100_000, **packing: bool) -> None:
    """The gradients of a trainer's update are those of a formula of single tokens."""
    ours, theirs = models()
    for tree in trees:
        tree.columns.pop("sequence_weight", None)
        if objective.ratio_base != "proximal":  # ratios are against the sampler
            tree.columns.pop("proximal_logprob", None)
    term = TokenTerm(objective, "actor", sampled if "token_weight" in objective.needs else None, LIMIT)
    term.prepare(trees)
    trainer = Trainer(ours, TrainerConfig(lr=1e-3))
    trainer.drop_gradients()
    batches = pack(trees, max_tokens=most, **packing)
    assert most == 100_000 or len(batches) > 2 or any(batch.pieces for batch in batches)
    for batch in batches:
        terms = [Weighted(term, term.normalizer(trees), 1.0)]
        tokens = sum(tree.logical_tokens for tree in trees)
        trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=False, last=batch is batches[-1])
    gradient = torch.cat([p.grad.flatten() for p in ours.parameters()])
    trainer.drop_gradients()
    theirs.zero_grad()
    b, lp, weight = flat(trees, theirs)
    b["old"] = b["behaviour"]
    want = mean(b, formula(b, lp), weight, objective.aggregation, 6)
    want.backward()
    wanted = torch.cat([p.grad.flatten() for p in theirs.parameters()])
    assert float(wanted.norm()) > 1e-4
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


REFUSED = ("segment_ratio",)


@pytest.mark.slow(but=18)
@pytest.mark.check(but=8)
@pytest.mark.parametrize("per_call", [False, True])
@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in (*NOT_IN_RUNS, *REFUSED)])
def test_every_objective_is_its_formula_on_the_chains(name: str, per_call: bool) -> None:
    trees = episodes(per_call)
    assert sum(tree.num_leaves for tree in trees) > 8
    objective = Objective.preset(name)
    assert objective.aggregation == AGGREGATION[name]
    check(TOKEN_LOSS[name], objective, trees)


@pytest.mark.slow(but=5)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("packing", [{}, {"in_pieces": True}, {"flat": True}])
@pytest.mark.parametrize("name", ["grpo", "gspo", "luspo"])
def test_chains_that_are_packed_apart_weigh_the_same(name: str, packing: dict[str, bool]) -> None:
    """Divided by leaves, into pieces, and each chain a sequence of a padded batch."""
    check(TOKEN_LOSS[name], Objective.preset(name), episodes(False), 50, **packing)


def test_clip_cov_leaves_out_tokens_of_high_covariance() -> None:
    """All of them, so that nothing is drawn."""

    def formula(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        A, m, r = b["advantage"][b["sequence"]], b["mask"], (lp - b["old"]).exp()
        cov = ((A - A[m].mean()) * (lp - lp[m].mean())).detach()
        caught = ((A > 0) & (r > 1.2)) | ((A < 0) & (r < 0.8))
        kept = caught | (cov <= 0.1) | (cov >= 5)
        return kept * torch.maximum(-A * r, -A * r.clamp(0.8, 1.2))

    options = {"covariance_share": 1.0, "covariance_low": 0.1, "covariance_high": 5.0}
    check(formula, Objective.preset("clip_cov", **options), episodes(False))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_weights_of_sequences_are_those_of_chains(level: str, aggregation: str) -> None:
    """The weight is of the policy before the update against the sampler, a product or a geometric mean over a chain."""

    def formula(b: dict[str, Tensor], lp: Tensor) -> Tensor:
        A, r = b["advantage"][b["sequence"]], (lp - b["proximal"]).exp()
        kept = b["mask"].to(lp.dtype)
        zero = lp.new_zeros(int(b["sequence"].max()) + 1)
        gap = zero.index_add(0, b["sequence"], kept * (b["proximal"] - b["behaviour"]))
        count = zero.index_add(0, b["sequence"], kept).clamp(min=1)
        weight = (gap / count if level == "geometric" else gap).exp().clamp(max=1.1)
        return weight[b["sequence"]] * torch.maximum(-A * r, -A * r.clamp(0.8, 1.2))

    options = {"mismatch_level": level, "mismatch_cap": 1.1, "aggregation": aggregation}
    check(formula, Objective.preset("decoupled_ppo", **options), episodes(False))


def test_an_episode_of_many_chains_weighs_as_much_as_one_of_a_single_chain() -> None:
    """By hand: `seq_mean_token_sum` of an episode of one chain, and of one of two."""
    agent = RandomAgent(np.random.default_rng(0), words=30)
    records = [agent.episode(4) for _ in range(2)]
    tree = episode_tree([1], records)
    chains = [int((tree.episode == number).sum()) for number in range(2)]
    assert len(set(chains)) == 2
    term = TokenTerm(Objective.preset("rloo"))
    term.prepare([tree])
    assert term.normalizer([tree]) == 2
    live = tree.loss_length > 0
    for number in range(2):
        mine = (tree.episode == number) & live
        assert tree.columns["sequence_weight"][mine].tolist() == pytest.approx([1 / mine.sum()] * int(mine.sum()))


def test_chosen_chains_weigh_one_together() -> None:
    """A selection by role leaves out the chains of sub-agents: the others of an episode weigh 1."""
    agent = RandomAgent(np.random.default_rng(3), words=30)
    tree = episode_tree([1], [agent.episode(7) for _ in range(4)])
    term = TokenTerm(Objective.preset("grpo"), "own", lambda some: some.loss_mask & (some.role == 0))
    term.prepare([tree])
    counted = [bool((tree.loss_mask & (tree.role == 0))[tree.response_rows(i)].any()) for i in range(tree.num_leaves)]
    assert 0 < sum(counted) < tree.num_leaves
    assert term.normalizer([tree]) == len(set(tree.episode[counted].tolist()))
    for leaf, number in enumerate(tree.episode.tolist()):
        mine = sum(c for c, e in zip(counted, tree.episode, strict=True) if e == number)
        want = 1 / mine if counted[leaf] else 0.0
        assert float(tree.columns["sequence_weight/own"][leaf]) == pytest.approx(want)


def job(toml: Path, *flags: str) -> TrainConfig:
    fixed = ["--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm"]
    return load_config(toml, [*fixed, *flags])


def test_every_objective_was_tried_or_is_refused(toml: Path) -> None:
    assert {*FORMULAS, *BY_CHANCE} == set(PRESETS)
    config = job(toml, "--algorithm.objective=segment_ratio")
    with pytest.raises(UserError, match=r"The loss term 'actor' has ratios of segments .* does not have; set ratio_l"):
        loss_terms(as_agent(config))
    with pytest.raises(UserError, match="needs clip_low"):
        run_objective(config, "algorithm.objective", "clip_tensor", {})
    loss_terms(config)  # of another program


LOSS_OPTIONS = {"laser": "{token=3}"}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_of_whole_responses_are_refused(toml: Path, name: str) -> None:
    options = LOSS_OPTIONS.get(name, "{}")
    config = job(toml, f'--algorithm.terms=[{{name="more",loss="{name}",loss_options={options}}}]')
    if name not in COMPARED:
        refuse(AGENTS, as_agent(config))
        return
    with pytest.raises(UserError, match=f"'more' with loss = '{name}' needs responses of one sequence each"):
        refuse(AGENTS, as_agent(config))


CALLBACK_OPTIONS = {"hint_ladder": '{columns=["h"]}'}


@pytest.mark.parametrize("name", sorted(GROUP_CALLBACKS))
def test_callbacks_that_choose_a_prompt_are_refused(toml: Path, name: str) -> None:
    flags = [f"--loop.callback={name}", f"--loop.callback_options={CALLBACK_OPTIONS.get(name, '{}')}"]
    plain = ["--loop.train_context=plain"] if name in ("hint_ladder", "critique") else []
    config = job(toml, *flags, *plain)
    if name not in OTHER_PROMPTS:
        refuse(AGENTS, as_agent(config))
        return
    wanted = "`loop.train_context` = .plain. needs one prompt" if plain else f"`loop.callback` = '{name}' needs"
    with pytest.raises(UserError, match=wanted):
        refuse(AGENTS, as_agent(config))
