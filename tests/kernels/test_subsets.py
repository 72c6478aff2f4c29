"""Token subsets: which tokens stay, and that the others leave the head's products."""

from __future__ import annotations

import pytest
import torch

from rolltree.kernels import Objective, PolicyFields, plan_policy_loss
from rolltree.kernels.policy_loss.subsets import entropy_quantile, probability_mask, random_share

M = 4000


def fields() -> tuple[PolicyFields, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(M, generator=g) < 0.75
    made = PolicyFields.flat(torch.randn(M, generator=g), old_logprob=-torch.rand(M, generator=g), mask=mask)
    return made, mask


def rows(given: PolicyFields) -> int:
    plan = plan_policy_loss(given, Objective(), num_rows=M, vocabulary=100, hidden_size=8, device="cpu")
    return plan.row_cuts[-1]


def test_entropy_quantile() -> None:
    given, mask = fields()
    entropy = torch.rand(M, generator=torch.Generator().manual_seed(1))
    entropy[~mask] = torch.nan
    kept = entropy_quantile(given, entropy, 0.2).mask
    assert kept is not None
    assert kept.equal(mask & (entropy >= entropy[mask].quantile(0.8)))
    assert rows(entropy_quantile(given, entropy, 0.2)) == int(kept.sum()) == pytest.approx(0.2 * int(mask.sum()), abs=1)
    ties = entropy_quantile(given, torch.ones(M), 0.2).mask  # all at the threshold: all stay, as in TRL
    assert ties is not None
    assert ties.equal(mask)


def test_random_share_is_unbiased_and_does_not_see_the_batch() -> None:
    given, mask = fields()
    token = torch.arange(M) * 7 + 3
    half = random_share(given, 0.3, token=token, seed=5)
    assert half.mask is not None
    assert not (half.mask & ~mask).any()
    assert int(half.mask.sum()) == pytest.approx(0.3 * int(mask.sum()), rel=0.06)
    torch.testing.assert_close(half.adv_pos, given.adv_pos / 0.3)
    assert rows(half) == int(half.mask.sum())
    order = torch.randperm(M, generator=torch.Generator().manual_seed(2))
    shuffled = random_share(given.take(order), 0.3, token=token[order], seed=5).mask
    assert shuffled is not None
    assert shuffled.equal(half.mask[order])
    other = random_share(given, 0.3, token=token, seed=6).mask
    assert other is not None
    assert not other.equal(half.mask)
    # neighbouring token numbers and seeds are independent of each other
    both = (other & half.mask).sum() / mask.sum()
    assert both == pytest.approx(0.09, abs=0.02)


def test_probability_mask() -> None:
    given, mask = fields()
    kept = probability_mask(given, 0.6).mask
    assert given.old_logprob is not None
    assert kept is not None
    assert kept.equal(mask & (given.old_logprob.exp() < 0.6))


def test_mistakes_are_named() -> None:
    given, _ = fields()
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 0"):
        random_share(given, 0.0, token=torch.arange(M), seed=0)
    with pytest.raises(ValueError, match=r"expected one value a pair, \[4000\], got \[3\]"):
        entropy_quantile(given, torch.ones(3), 0.5)
    with pytest.raises(ValueError, match="must have old_logprob"):
        probability_mask(PolicyFields.flat(torch.ones(3)))
