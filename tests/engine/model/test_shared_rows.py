"""Siblings that sampled equal tokens with other records: one row, a target for each record, and the flat batch's loss.

Everything is in fp64. The flat side is plain Transformers on padded sequences, and `policy_loss` on flat fields with
the log-probs that were recorded of each sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from rolltree.engine import TokenTree, TreeBatch, backward, batch_loss, pack
from rolltree.engine.batches import pack as packing
from rolltree.engine.batches.rows import Rows, distinct_rows
from rolltree.engine.model.roles import Role
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.critic import Critic
from rolltree.engine.train.terms import PairTerm, TokenTerm
from rolltree.kernels import Objective, PolicyFields, Term, policy_loss

from ...support.thinned import every, thinned
from .test_tree_equals_flat import CONFIGS, TEMPERATURE, close, flat_logprobs, make_models
from .test_tree_objectives import AGGREGATIONS, LEVELS

SCORED = ("ref_logprob", "teacher_logprob", "proximal_logprob")
PRESETS = ("cispo", "clip_cov", "dcpo_clip", "decoupled_ppo", "gmpo", "gspo_token", "luspo", "off_policy_mask", "opd",
           "opd_forward", "rollout_is", "sapo", "token_entropy_mask", "topr", "vespo")  # fmt: skip
OBJECTIVES = {f"{level}, {aggregation}": replace(objective, aggregation=aggregation)
              for level, objective in LEVELS.items() for aggregation in AGGREGATIONS}  # fmt: skip
OBJECTIVES |= {name: Objective.preset(name) for name in PRESETS}
BOUND = 1e-6  # sums of several leaves' credit are rounded to fp32


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return tuple(model.double() for model in make_models("qwen3"))  # type: ignore[return-value]


def perturbed(seed: int, leaves: int = 14, ids: int = 4, eps: float = 0.3) -> TokenTree:
    """Responses over few ids, so that they agree by chance and to every depth, each token recorded with an error.

    Some records are equal all the same, so that targets of one leaf, targets of several and rows of several targets
    occur together. Responses are empty, equal, and prefixes of one another.
    """
    rng = np.random.default_rng(seed)
    responses = [rng.integers(0, ids, rng.integers(0, 9)).tolist() for _ in range(leaves)]
    responses[1], responses[2] = list(responses[0]), responses[0][:2]
    errors = [rng.choice([0.0, 0.0, eps, -eps], len(r)) for r in responses]
    logprobs = [[-1.4 - 0.1 * t for t in r] + e for r, e in zip(responses, errors, strict=True)]
    versions = [rng.choice([3, 3, 3, 4], len(r)) for r in responses]
    masks = [rng.random(len(r)) < 0.9 for r in responses]
    return TokenTree.from_sequences(
        [5, 6],
        responses,
        advantages=rng.normal(size=leaves),
        behaviour_logprobs=logprobs,
        policy_version=versions,
        loss_masks=masks,
    )


def turns(seed: int) -> TokenTree:
    """Conversations flattened by turn, whose answers were sampled twice and agree by chance."""
    rng = np.random.default_rng(seed)
    prompts, responses = [], []
    for _ in range(4):
        context = [5, 6]
        for _ in range(3):
            answers = [rng.integers(0, 3, rng.integers(1, 5)).tolist() for _ in range(2)]
            prompts += [list(context)] * 2
            responses += answers
            context += answers[0] + rng.integers(0, 2, 2).tolist()
    return TokenTree.from_sequences(
        prompts,
        responses,
        advantages=rng.normal(size=len(responses)),
        behaviour_logprobs=[rng.normal(-1.5, 0.3, len(r)) for r in responses],
        loss_masks=[rng.random(len(r)) < 0.9 for r in responses],
    )


def scored(model: Any, trees: list[TokenTree]) -> list[TokenTree]:
    """``trees`` with the log-probs of a reference, a teacher and a policy before the update."""
    for k, column in enumerate(SCORED):
        torch.manual_seed(20 + k)
        weights = {name: p.detach() + 0.05 * torch.randn_like(p) for name, p in model.named_parameters()}
        Role(column, model, weights).score(trees, pack(trees, max_tokens=1000), temperature=TEMPERATURE)
    for tree in trees:
        tree.set("pass_rate", 0.4)
    return trees


def merged(trees: list[TokenTree]) -> None:
    """The trees are what the tests are of: rows have several targets, and some targets are of several leaves."""
    for tree in trees:
        assert distinct_rows(tree).num_rows < 0.95 * tree.num_tokens
        assert tree.num_tokens < tree.logical_tokens - tree.prompt_length * (tree.num_leaves - 1)


def flat_loss(theirs: Any, trees: list[TokenTree], objective: Objective) -> Any:
    """Loss and metrics of the flat batch; leaves gradients in ``theirs``."""
    columns: dict[str, list[torch.Tensor]] = {}
    lengths, advantages = [], []
    for number, tree in enumerate(trees):
        node = np.repeat(np.arange(tree.num_nodes), tree.length) + 10_000 * number
        for leaf, (sequence, logprob, entropy) in enumerate(
            zip(tree.flatten(), *flat_logprobs(theirs, tree, torch.float64), strict=True)
        ):
            rows = tree.response_rows(leaf)
            values = {"logprob": logprob, "entropy": entropy, "mask": sequence.loss_mask, "segment": node[rows],
                      "behaviour_logprob": sequence.behaviour_logprob, "pass_rate": tree.pass_rate[rows],
                      **{name: tree.columns[name][rows] for name in SCORED}}  # fmt: skip
            for name, value in values.items():
                columns.setdefault(name, []).append(torch.as_tensor(value))
            lengths.append(len(logprob))
            advantages.append(sequence.advantage)
    flat = {name: torch.cat(parts) for name, parts in columns.items()}
    logprob, entropy = flat.pop("logprob"), flat.pop("entropy")
    old = flat["behaviour_logprob"]
    if objective.ratio_level != "segment":
        del flat["segment"]
    cu = torch.tensor([0, *np.cumsum(lengths)])
    fields = PolicyFields.flat(torch.tensor(advantages), old_logprob=old, cu_seqlens=cu, **flat)
    theirs.zero_grad()
    out = policy_loss(logprob, fields, objective, normalizer=7.0, entropy=entropy)
    out.loss.backward()
    return out


def tree_loss(
    ours: Any, batches: list[TreeBatch], objective: Objective
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Loss and metrics of packed trees, of pieces too; leaves gradients in ``ours``."""
    ours.zero_grad()
    loss, metrics = 0.0, {}
    for batch in batches:
        terms = [Term(batch.fields(objective, old_logprob="behaviour"), objective, 7.0)]
        out = backward(ours, batch, terms, temperature=TEMPERATURE)
        loss += float(out.loss)
        for name, (value, count) in out.metrics.items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + float(value), before[1] + float(count))
    return loss, metrics


def compare(ours: Any, theirs: Any, trees: list[TokenTree], objective: Objective, **options: Any) -> None:
    want = flat_loss(theirs, trees, objective)
    loss, metrics = tree_loss(ours, pack(trees, **{"max_tokens": 10_000, **options}), objective)
    assert loss == pytest.approx(float(want.loss), rel=BOUND, abs=BOUND)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert q.grad.abs().max() > 0, name
        assert (p.grad - q.grad).norm() <= 3 * BOUND * q.grad.norm(), name
    assert metrics.keys() == want.metrics.keys()
    for name, (value, count) in want.metrics.items():
        assert metrics[name] == pytest.approx((float(value), float(count)), rel=1e-5, abs=1e-5), name


@pytest.mark.slow(but=7)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", thinned(OBJECTIVES, every(3)))
def test_every_objective_is_the_flat_batchs(models: Any, name: str) -> None:
    ours, theirs = models
    trees = scored(ours, [perturbed(1), perturbed(2, leaves=5), turns(3)])
    merged([trees[0], trees[2]])
    compare(ours, theirs, trees, OBJECTIVES[name])


CUTS = [(max_tokens, pieces, name) for max_tokens, pieces in ((30, False), (12, True), (7, True))
        for name in ("token, seq_mean_token_mean", "sequence, token_mean", "sequence, masked, token_sum")]  # fmt: skip


@pytest.mark.slow(but=4)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(("max_tokens", "pieces", "name"), CUTS)
def test_parts_and_pieces_add_up_to_the_flat_batch(models: Any, max_tokens: int, pieces: bool, name: str) -> None:
    ours, theirs = models
    trees = scored(ours, [perturbed(1), turns(3)])
    batches = pack(trees, max_tokens=max_tokens, in_pieces=pieces)
    assert len(batches) > 2 or any(len(batch.pieces) > 2 for batch in batches)
    compare(ours, theirs, trees, OBJECTIVES[name], max_tokens=max_tokens, in_pieces=pieces)


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("seed", range(6))
def test_random_trees(models: Any, seed: int) -> None:
    ours, theirs = models
    trees = scored(ours, [perturbed(10 + seed, leaves=3 + 4 * seed, ids=2 + seed % 3), turns(seed)])
    compare(ours, theirs, trees, LEVELS["token"])
    compare(ours, theirs, trees, LEVELS["sequence"], max_tokens=20, in_pieces=True)


@pytest.mark.parametrize("credit", ["path_advantage", "token_advantage", "node_advantage"])
def test_credit_within_a_response(models: Any, credit: str) -> None:
    """The tree is compared with a sequence for every leaf, with the leaf's values of the column."""
    ours, _ = models
    tree = perturbed(4)
    count = {"path": int(tree.response_length.sum()), "token": tree.num_tokens, "node": tree.num_nodes}
    tree.set(credit, np.random.default_rng(0).normal(size=count[credit.split("_")[0]]))
    merged([tree])
    found = []
    for options in ({}, {"flat": True}, {"max_tokens": 12, "in_pieces": True}):
        loss, _ = tree_loss(ours, pack([tree], **{"max_tokens": 1000, **options}), LEVELS["dual clip"])
        found.append((loss, [p.grad.clone() for p in ours.parameters()]))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=BOUND)
        assert all((a - b).norm() <= 3 * BOUND * b.norm() for a, b in zip(grads, found[0][1], strict=True))


def test_pairs_of_leaves_are_those_of_the_sequences(models: Any) -> None:
    ours, theirs = models
    (tree,) = scored(ours, [perturbed(5)])
    merged([tree])
    pairs = [(0, 3), (4, 1), (5, 6)]
    term = PairTerm(lambda _: pairs)
    term.prepare([tree])
    (batch,) = pack([tree], max_tokens=1000)
    ours.zero_grad()
    out = backward(ours, batch, [term.on(batch, 3.0, False, 1.0)], temperature=TEMPERATURE)
    logprobs, _ = flat_logprobs(theirs, tree, torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    of_leaf = []
    for leaf, (logprob, sequence) in enumerate(zip(logprobs, tree.flatten(), strict=True)):
        mask = torch.as_tensor(sequence.loss_mask)
        ref = torch.as_tensor(tree.ref_logprob[tree.response_rows(leaf)])
        of_leaf.append(((logprob - ref) * mask).nan_to_num().sum())
    for chosen, rejected in pairs:
        total = total - torch.nn.functional.logsigmoid(0.1 * (of_leaf[chosen] - of_leaf[rejected])) / 3
    theirs.zero_grad()
    total.backward()
    assert float(out.loss) == pytest.approx(float(total), rel=BOUND)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 3 * BOUND * q.grad.norm()


def test_a_critic_learns_what_it_learns_of_sequences() -> None:
    ours, _ = make_models("qwen3")
    tree = perturbed(6)
    merged([tree])
    critic = Critic(ours, TrainerConfig(lr=1e-3, max_grad_norm=1e9), clip=0.2)
    torch.nn.init.normal_(ours.value_head.weight, generator=torch.Generator().manual_seed(1))
    critic.score([tree], pack([tree], max_tokens=1000))
    rng = np.random.default_rng(1)
    tree.set("value_target", rng.normal(size=tree.response_length.sum()))
    tree.set("value", tree.value + 0.3)  # some move beyond the clip
    found = []
    critic.trainer._apply = lambda: found.append([p.grad.clone() for p in ours.parameters() if p.grad is not None])  # type: ignore[method-assign,assignment,return-value]
    batches = [pack([tree], max_tokens=1000, flat=flat) for flat in (False, True)]
    losses = [float(critic.learn(some, tree.loss_tokens)["critic/loss"][0]) for some in batches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(found[0]) == len(found[1]) > 10
    assert all((a - b).norm() <= 5e-5 * b.norm() for a, b in zip(*found, strict=True))


def test_rows_of_other_contexts_are_not_merged(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where rows are merged that agree in id and depth and not in what is before them."""
    ours, theirs = models
    trees = scored(ours, [perturbed(1)])
    compare(ours, theirs, trees, LEVELS["token"])

    def careless(tree: TokenTree) -> Rows:
        rows = distinct_rows(tree)
        of_token, seen = rows.of_token.copy(), {}
        for token in range(tree.num_tokens):
            of_token[token] = seen.setdefault((tree.token_id[token], tree.position[token]), of_token[token])
        return rows._replace(of_token=of_token)

    monkeypatch.setattr(packing, "distinct_rows", careless)
    with pytest.raises(AssertionError):
        compare(ours, theirs, trees, LEVELS["token"])


def test_a_target_without_its_own_record_would_show(models: Any) -> None:
    """The comparison fails where the targets of a row all have the first one's record."""
    ours, theirs = models
    trees = scored(ours, [perturbed(1)])
    (batch,) = pack(trees, max_tokens=1000)
    want = float(flat_loss(theirs, trees, LEVELS["token"]).loss)
    key = batch.row * 97 + batch.target
    first = torch.stack([(key == k).nonzero()[0, 0] for k in key])
    assert (first != torch.arange(len(key))).sum() > 10
    recorded = batch.behaviour_logprob
    assert recorded is not None
    for old, same in ((recorded, True), (recorded[first], False)):
        out = batch_loss(ours, batch, LEVELS["token"], normalizer=7.0, temperature=TEMPERATURE, old_logprob=old)
        assert (abs(float(out.loss) - want) < 1e-5) == same


def test_log_probs_of_generate(models: Any) -> None:
    """Responses sampled by Transformers' own `generate`, with its log-probs, which differ in the last bits."""
    ours, theirs = make_models("qwen3")
    torch.manual_seed(0)
    prompt = torch.tensor([[5, 6, 7]] * 24)
    config = GenerationConfig(do_sample=True, temperature=0.35, max_new_tokens=10, pad_token_id=0, top_k=0,
                              return_dict_in_generate=True, output_scores=True)  # fmt: skip
    out = theirs.generate(prompt, config)
    sampled = out.sequences[:, 3:]
    logprob = torch.stack(out.scores, 1).log_softmax(-1).gather(2, sampled[..., None])[..., 0]
    rng = np.random.default_rng(0)
    noisy = logprob.numpy() * (1 + 2e-7 * rng.integers(-2, 3, logprob.shape))  # as of a sampler with other kernels
    responses, advantages = sampled.tolist(), rng.normal(size=24)
    tree = TokenTree.from_sequences([5, 6, 7], responses, advantages=advantages, behaviour_logprobs=list(noisy))
    (batch,) = pack([tree], max_tokens=10_000)
    distinct = {tuple(r[:n]) for r in responses for n in range(1, 11)}
    assert batch.num_tokens == 3 + len(distinct) < 0.9 * tree.num_tokens
    found = []
    for flat in (False, True):
        ours.zero_grad()
        loss = 0.0
        for some in pack([tree], max_tokens=10_000, flat=flat):
            term = TokenTerm(Objective.preset("dapo")).on(some, 240.0, False, 1.0)
            loss += float(backward(ours, some, [term], temperature=0.35).loss)
        found.append((loss, [p.grad.clone() for p in ours.parameters()]))
    (loss, grads), (flat_loss, flat_grads) = found
    assert loss == pytest.approx(flat_loss, rel=1e-5, abs=1e-6)
    assert all((a - b).norm() <= 1e-4 * b.norm() for a, b in zip(grads, flat_grads, strict=True))


@pytest.mark.check(but=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_beginning_of_several_prompts_changes_neither_loss_nor_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts below one system prompt, one of them the system prompt alone, another twice, and a plain sequence."""
    model = make_models(name)[0]
    rng = np.random.default_rng(4)
    system = rng.integers(0, 97, 21).tolist()
    first, second, third = (system + rng.integers(0, 97, n).tolist() for n in (4, 0, 9))
    lengths = [(5, 3, 6), (4, 4), (7, 2), (3, 3), (6,)]
    trees = [
        TokenTree.from_sequences(
            prompt,
            [rng.integers(0, 3, n).tolist() for n in of_tree],
            advantages=rng.normal(size=len(of_tree)),
            behaviour_logprobs=[rng.normal(-1.5, 0.3, n) for n in of_tree],
        )
        for prompt, of_tree in zip([first, second, third, third, first], lengths, strict=True)
    ]
    objective = Objective.preset("gspo", entropy_coef=0.01)

    def run() -> tuple[int, torch.Tensor, list[torch.Tensor]]:
        (batch,) = pack(trees, max_tokens=1000)
        model.zero_grad()
        loss = batch_loss(model, batch, objective, normalizer=3.0, temperature=TEMPERATURE).loss
        loss.backward()
        return batch.num_tokens, loss.detach(), [p.grad.clone() for p in model.parameters()]

    rows, loss, gradients = run()
    monkeypatch.setattr(packing, "WORTH_SHARING", np.inf)
    rows_apart, expected, of_apart = run()
    assert rows < 0.5 * rows_apart
    close(loss, expected)
    for mine, theirs in zip(gradients, of_apart, strict=True):
        close(mine, theirs)
