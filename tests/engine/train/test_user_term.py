"""Loss terms of the user's: through the real model against plain formulas, and refused with one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, UserError, pack
from rolltree.engine.data.columns import Column, declare
from rolltree.engine.methods.losses import Laser
from rolltree.engine.methods.selections import SELECTIONS
from rolltree.engine.parts.context import Context
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.user_term import FIELDS, UserTerm
from rolltree.kernels import Objective

from .test_terms import NLL, RESPONSES, agree, close, demonstration, group, run

declare(Column("mine/id", np.int32, "token", "an id", -1, merge="first", to_device=True))
declare(Column("mine/weight", np.float32, "token", "a weight", 0, merge="first", to_device=True))


def term(own, select=None, name="mine"):
    return UserTerm("algorithm.terms.mine.loss", own, TokenTerm(FIELDS, name, select), Context())


def rows_of(model, tree):
    """All log-probs [n, V] of each response's places, by plain transformers on flat sequences."""
    out = []
    for s in tree.flatten():
        logits = model(torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1]
        out.append(logits.log_softmax(-1))
    return out


class Everything:
    """Reads every statistic of the head."""

    extra = ("mine/id",)

    def prepare(self, trees):
        for tree in trees:
            tree.set("mine/id", np.where(np.arange(tree.num_tokens) % 2, tree.token_id + 1, -1))
            tree.set("mine/weight", np.linspace(0.5, 1.5, tree.num_tokens))

    def normalizer(self, trees):
        return 7.0

    def loss(self, logprob, entropy, sum_p2, mean_logprob, extra_logprob, fields, columns):
        each = logprob.square() + 2 * entropy + sum_p2.sqrt() + 0.1 * mean_logprob.square() + extra_logprob[:, 0].exp()
        return (each * columns["mine/weight"] * fields.weight).sum(), {"ids": (extra_logprob.sum(), 1)}


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_every_statistic_with_its_gradient(max_tokens):
    """A tree at once, and in pieces, where the model runs twice."""
    tree = group()
    got = run([term(Everything())], [tree], max_tokens=max_tokens, in_pieces=True)
    loss = torch.zeros(())
    for leaf, every in enumerate(rows_of(got[3], tree)):
        rows = tree.response_rows(leaf)
        ids = torch.from_numpy(tree.token_id[rows].astype(np.int64))
        p = every.exp()
        lp = every.gather(1, ids[:, None])[:, 0]
        other = torch.where(torch.from_numpy(rows % 2 == 1), every.gather(1, ids[:, None] + 1)[:, 0].exp(), 1.0)
        entropy, sum_p2, mean = -(p * every).sum(1), p.square().sum(1), every.mean(1)
        each = lp.square() + 2 * entropy + sum_p2.sqrt() + 0.1 * mean.square() + other
        weight = torch.from_numpy(np.linspace(0.5, 1.5, tree.num_tokens)[rows]).float()
        loss = loss + (each * weight).sum() / 7
    agree(got, loss, got[3])


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_several_terms_keep_their_own_ids(max_tokens):
    """Two terms of different ids and a policy loss in one pass: the sum of each alone."""
    tree, given = group(), demonstration()
    calm = TokenTerm(Objective.preset("grpo", entropy_coef=0.2))
    laser = term(Laser(token=11, beta=0.5, c=-3.0), name="laser")
    terms = [term(Everything()), calm, laser, term(Everything(), SELECTIONS["injected"], "given")]
    weights = [0.5, 1.0, 2.0, 0.25]
    together = run(terms, [tree], [given], weights, max_tokens, in_pieces=True)
    total, grads = 0.0, None
    for one, weight in zip(terms, weights, strict=True):
        loss, losses, alone, _ = run([one], [tree], [given], [weight])
        assert losses[one.name] != 0
        assert together[1][one.name] == pytest.approx(losses[one.name], rel=1e-5)
        total += loss
        grads = alone if grads is None else [a + b for a, b in zip(grads, alone, strict=True)]
    assert together[0] == pytest.approx(total, rel=1e-5)
    for a, b in zip(together[2], grads, strict=True):
        close(a, b, 5e-5)


def test_laser_scores_the_place_where_a_response_ends():
    tree = group()
    tree.rewards["verifier"] = np.array([1.0, 0.0, 0.5, 1.0], np.float32)
    got = run([term(Laser(token=11, beta=0.5, c=-3.0))], [tree])
    wanted = zip(rows_of(got[3], tree), [1.0, 0.0, 0.5, 1.0], strict=True)
    agree(got, sum((0.5 * (every[-1, 11] + 3) - r).square() for every, r in wanted) / len(RESPONSES), got[3])


class Ratio:
    def loss(self, logprob, fields):
        r = (logprob - fields.old_logprob).exp()
        return -(fields.adv_pos + fields.adv_neg).mul(r).sum()


def test_the_ratio_is_one_on_policy_and_of_the_sampler_elsewhere():
    tree = TokenTree.from_sequences(
        [1, 2], [[5, 6], [5, 7, 8]], advantages=[1.0, -0.5], behaviour_logprobs=[[-1.0, -2.0], [-1.0, -0.5, -3.0]]
    )
    mine = term(Ratio())
    mine.prepare([tree])
    (batch,) = pack([tree], max_tokens=100)
    lp = torch.linspace(-2, -1, batch.target.numel())
    on = mine.on(batch, mine.normalizer([tree]), True, 1.0).loss(lp)
    advantage = batch.fields(FIELDS).adv_pos + batch.fields(FIELDS).adv_neg
    assert float(on.loss) == pytest.approx(-float(advantage.sum()) / 5)
    off = mine.on(batch, mine.normalizer([tree]), False, 1.0).loss(lp)
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    assert float(off.loss) == pytest.approx(-float((advantage * (lp - old).exp()).sum()) / 5)


class Plain:
    """Adds up what it gets, without the fields' weights."""

    def loss(self, logprob, entropy):
        return entropy.sum() - logprob.sum()


class PerTree(Plain):
    def normalizer(self, trees):
        return float(len(trees))


@pytest.mark.parametrize("own", [Plain(), PerTree()])
@pytest.mark.parametrize("select", [None, "injected"])
def test_tokens_that_do_not_count_are_zero_and_given_ones_count_if_selected(own, select):
    """The normaliser sees the trees whose tokens count: without a selection those that were sampled."""
    masks = [[True, False, True], [True, True]]
    tree = TokenTree.from_sequences([1, 2, 3], [[5, 6, 7], [8, 9]], advantages=[1.0, -0.5], loss_masks=masks)
    given = demonstration()
    got = run([term(own, None if select is None else SELECTIONS[select])], [tree], [given])
    counted = [(tree, masks)] if select is None else [(given, [[True] * 3])]
    loss, tokens = torch.zeros(()), 0
    for one, of_leaves in counted:
        for leaf, (every, mask) in enumerate(zip(rows_of(got[3], one), of_leaves, strict=True)):
            ids = torch.from_numpy(one.token_id[one.response_rows(leaf)].astype(np.int64))
            each = -(every.exp() * every).sum(1) - every.gather(1, ids[:, None])[:, 0]
            loss, tokens = loss + each[torch.tensor(mask)].sum(), tokens + sum(mask)
    trees = 1 if select is None else 2
    loss = loss / (trees if isinstance(own, PerTree) else tokens)
    mine = term(own, None if select is None else SELECTIONS[select])
    other = TokenTerm(NLL, "other", None if select else SELECTIONS["injected"])  # computes the other tree's log-probs
    assert run([mine, other], [tree], [given])[1]["mine"] == pytest.approx(float(loss.detach()), rel=1e-5)
    agree(got, loss, got[3])


class Keeps:
    """Keeps the fields that it gets."""

    def loss(self, logprob, fields):
        self.fields = fields
        return logprob.sum()


def test_fields_are_zero_where_no_token_counts_and_unknown_log_probs_are_none():
    """A log-prob that a masked token alone lacks is unknown where a selection counts that token."""
    masks = [[True, False, True], [True, True]]
    tree = TokenTree.from_sequences([1, 2, 3], [[5, 6, 7], [8, 9]], advantages=[1.0, -0.5], loss_masks=masks)
    tree.set("ref_logprob", np.where(tree.loss_mask, -1.5, np.nan))
    found = []
    for select in (None, lambda tree: np.ones(tree.num_tokens)):
        mine = term(Keeps(), select)
        mine.prepare([tree])
        (batch,) = pack([tree], max_tokens=100)
        mine.on(batch, mine.normalizer([tree]), True, 1.0).loss(torch.linspace(-2, -1, batch.target.numel()))
        found.append(mine.instance.fields)
    mask, raw, (fields, every) = batch.loss_mask, batch.fields(FIELDS), found
    assert (raw.weight[~mask] != 0).any()  # a masked token has a weight, so that the zeros below say something
    for values in (fields.weight, fields.adv_pos, fields.adv_neg):
        assert (values[~mask] == 0).all()
    assert (fields.ref_logprob == torch.where(mask, -1.5, 0.0)).all()
    assert raw.ref_logprob is not None
    assert every.ref_logprob is None


class Divides(Keeps):
    def __init__(self, by):
        self.by = by

    def normalizer(self, trees):
        return self.by


@pytest.mark.parametrize("by", [-1.0, float("nan"), float("inf"), "many", None])
def test_a_normaliser_that_is_no_number_is_refused(by):
    with pytest.raises(UserError, match="its normalizer must return a finite number of at least 0, not"):
        term(Divides(by)).normalizer([group()])


class Compares(Keeps):
    whole_trees = True


def test_a_tree_that_is_divided_is_refused_where_the_loss_compares_its_responses():
    tree = group()
    mine = term(Compares())
    mine.prepare([tree])
    first, *others = pack([tree], max_tokens=8)
    assert others
    with pytest.raises(ValueError, match="The loss term 'mine' needs whole trees"):
        mine.on(first, 1.0, True, 1.0)


class Raises:
    def loss(self, logprob):
        return logprob.sum() / [1][2]


class Flat:
    def loss(self, logprob):
        return logprob


class Asks:
    def loss(self, logprob, logits):
        return logprob.sum()


class NoIds:
    def loss(self, extra_logprob):
        return extra_logprob.sum()


def test_mistakes_are_named():
    with pytest.raises(UserError, match="must be a class with a method loss"):
        term(object())
    with pytest.raises(UserError, match=r"names 'logits', which a run does not have; it may name logprob, fields"):
        term(Asks())
    with pytest.raises(UserError, match="name the columns of ids in `extra`"):
        term(NoIds())
    with pytest.raises(UserError, match=r"IndexError.*line \d+ of 'test_user_term.py'"):
        run([term(Raises())], [group()])
    with pytest.raises(UserError, match="a tensor of one number, not one of shape"):
        run([term(Flat())], [group()])
