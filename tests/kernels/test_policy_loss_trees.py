"""policy_loss on trees: the S-form against expanded leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rolltree.kernels import Objective, PolicyFields, policy_loss
from rolltree.kernels.policy_loss import PRESETS

from .formulas import DEVICE, Tree

ON_TREES = [name for name in PRESETS if name not in ("clip_cov", "kl_cov", "token_entropy_mask", "segment_ratio")]


@pytest.mark.check(but=32)
@pytest.mark.parametrize("name", ON_TREES)
@pytest.mark.parametrize("seed", range(4))
def test_tree_equals_expanded_leaves(seed: int, name: str) -> None:
    """Loss, gradients and metrics, with advantages of both signs through shared tokens and clipping active."""
    tree = Tree(seed)
    objective = Objective.preset(name, kl_coef=0.2, entropy_coef=0.1)
    if name != "topr" and objective.mismatch == "none":
        level: Any = "token" if objective.ratio_level == "token" else "geometric"
        objective = replace(objective, mismatch="truncate", mismatch_level=level)
    index, fields = tree.expanded(objective.needs)
    shared_fields = tree.fields(objective.aggregation, needs=objective.needs)
    results = []
    for select, f in ((slice(None), shared_fields), (index, fields)):
        lp, h = tree.logprob.clone().requires_grad_(), tree.entropy.clone().requires_grad_()
        out = policy_loss(lp[select], f, objective, normalizer=17.0, entropy=h[select])
        results.append((out, torch.autograd.grad(out.loss, (lp, h))))
    (shared, shared_grads), (plain, plain_grads) = results
    torch.testing.assert_close(shared.loss, plain.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(shared_grads, plain_grads, rtol=1e-6, atol=1e-9)
    assert shared.metrics.keys() == plain.metrics.keys()
    for metric, (total, count) in shared.metrics.items():
        torch.testing.assert_close((total, count), plain.metrics[metric], rtol=1e-6, atol=1e-9, msg=metric)


OF_PATHS = [name for name in ON_TREES if PRESETS[name].scope == "path"]


@pytest.mark.parametrize("name", OF_PATHS)
@pytest.mark.parametrize("weighed", [False, True], ids=["credit of pairs", "weights of tokens"])
def test_pairs_of_a_tree_equal_expanded_leaves(name: str, weighed: bool) -> None:
    """Ratios and weights of sequences with credit that differs within a leaf, or with weights of tokens."""
    tree, objective = Tree(3), Objective.preset(name, kl_coef=0.2, entropy_coef=0.1)
    needs = (*objective.needs, *(("token_weight",) if weighed and "token_weight" not in objective.needs else ()))
    index, flat_fields = tree.expanded(needs)
    leaf = torch.tensor([i for i, p in enumerate(tree.paths) for _ in p], device=DEVICE)
    credit = tree.advantage[leaf] if weighed else torch.sin(7 * tree.old[index] + leaf)
    if not weighed:
        cu = torch.tensor([0, *(len(p) for p in tree.paths)], device=DEVICE).cumsum(0)
        given = {f: getattr(flat_fields, f) for f in ("mask", "old_logprob", "ref_logprob", "behaviour_logprob")}
        given |= {f: value for f in needs if (value := getattr(flat_fields, f)) is not None}
        flat_fields = PolicyFields.flat(credit, cu_seqlens=cu, **given)
    shared = tree.fields(objective.aggregation, needs=needs)
    assert shared.paths is not None
    pairs = replace(
        shared.paths,
        leaf_advantage=shared.paths.leaf_advantage if weighed else None,
        pair_target=index,
        pair_leaf=leaf,
        pair_advantage=None if weighed else credit,
    )
    results = []
    for select, f in ((slice(None), replace(shared, paths=pairs)), (index, flat_fields)):
        lp, h = tree.logprob.clone().requires_grad_(), tree.entropy.clone().requires_grad_()
        out = policy_loss(lp[select], f, objective, normalizer=17.0, entropy=h[select])
        results.append((out.loss, *torch.autograd.grad(out.loss, (lp, h))))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)
    cut = replace(shared, paths=pairs).slice(0, len(tree.ends))
    assert cut.paths is not None
    torch.testing.assert_close(cut.paths.pair_target, index)


def test_summed_advantages_are_wrong_where_clipping_acts() -> None:
    tree, objective = Tree(0), Objective.preset("ppo")
    index, fields = tree.expanded()
    exact = policy_loss(tree.logprob[index], fields, objective, normalizer=1.0).loss
    split, summed = (
        policy_loss(tree.logprob, tree.fields("token_mean", merge), objective, normalizer=1.0).loss
        for merge in (None, lambda s: s)
    )
    torch.testing.assert_close(split, exact)
    assert (summed - exact).abs() > 0.01 * exact.abs()


def test_path_sums_and_their_adjoint() -> None:
    for seed in range(10):
        tree = Tree(seed)
        paths = tree.fields("token_mean").paths
        assert paths is not None
        x, c = tree.logprob.clone().requires_grad_(), tree.advantage
        want = torch.stack([x[p].sum() for p in tree.paths])
        torch.testing.assert_close(paths.sum(x), want)
        torch.testing.assert_close(*(torch.autograd.grad((c * s).sum(), x)[0] for s in (paths.sum(x), want)))
        torch.testing.assert_close(paths.spread(c), torch.autograd.grad((c * paths.sum(x)).sum(), x)[0])
