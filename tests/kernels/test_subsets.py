"""Token subsets: which tokens stay, and that the others leave the head's products."""

from __future__ import annotations

import pytest
import torch

from rolltree.kernels import Objective, PathIndex, PolicyFields, plan_policy_loss, policy_loss
from rolltree.kernels.policy_loss.subsets import calm_tokens, entropy_quantile, probability_mask, random_share

M = 4000


def fields() -> tuple[PolicyFields, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(M, generator=g) < 0.75
    made = PolicyFields.flat(torch.randn(M, generator=g), old_logprob=-torch.rand(M, generator=g), mask=mask)
    return made, mask


def rows(given: PolicyFields) -> int:
    plan = plan_policy_loss(given, Objective(), num_rows=M, vocabulary=100, hidden_size=8, device="cpu")
    return plan.row_cuts[-1]


def learning(given: PolicyFields) -> torch.Tensor:
    return Objective().live(given)


def test_entropy_quantile() -> None:
    given, mask = fields()
    entropy = torch.rand(M, generator=torch.Generator().manual_seed(1))
    entropy[~mask] = torch.nan
    kept = learning(entropy_quantile(given, entropy, 0.2))
    assert kept.equal(mask & (entropy >= entropy[mask].quantile(0.8)))
    assert rows(entropy_quantile(given, entropy, 0.2)) == int(kept.sum()) == pytest.approx(0.2 * int(mask.sum()), abs=1)
    ties = learning(entropy_quantile(given, torch.ones(M), 0.2))  # all at the threshold: all stay, as in TRL
    assert ties.equal(mask)


def test_the_ratio_of_a_sequence_is_over_all_its_tokens() -> None:
    """Chosen beforehand is the same as chosen by the objective, at the level of tokens and of sequences."""
    g = torch.Generator().manual_seed(0)
    lp, old, ref, entropy = torch.randn(4, 40, generator=g, dtype=torch.float64)
    cu = torch.tensor([0, 13, 20, 40])
    given = PolicyFields.flat(torch.randn(3, generator=g), old_logprob=old, ref_logprob=ref, cu_seqlens=cu)
    for name in ("dapo", "gspo"):
        plain, choosing = (Objective.preset(name, kl_coef=0.1, entropy_share=s) for s in (1.0, 0.4))
        before = policy_loss(lp, entropy_quantile(given, entropy, 0.4), plain, normalizer=3).loss
        torch.testing.assert_close(before, policy_loss(lp, given, choosing, normalizer=3, entropy=entropy).loss)


def test_leaves_of_a_tree_have_one_advantage_and_refuse() -> None:
    paths = PathIndex(torch.tensor([3, 2, 3]), torch.tensor([1, 2]), torch.tensor([2, 2]), torch.ones(2), torch.ones(2))
    tree = PolicyFields(torch.ones(3), torch.zeros(3), torch.ones(3), old_logprob=-torch.ones(3), paths=paths)
    some = probability_mask(tree, 0.9)
    policy_loss(-torch.ones(3), some, Objective(), normalizer=1)
    for objective in (Objective(ratio_level="sequence"), Objective(off_policy_delta=0.1)):
        with pytest.raises(ValueError, match="advantages and weights of a tree's leaves"):
            policy_loss(-torch.ones(3), some, objective, normalizer=1)


def test_random_share_is_unbiased_and_does_not_see_the_batch() -> None:
    given, mask = fields()
    token = torch.arange(M) * 7 + 3
    half = random_share(given, 0.3, token=token, seed=5)
    chosen = learning(half)
    assert not (chosen & ~mask).any()
    assert int(chosen.sum()) == pytest.approx(0.3 * int(mask.sum()), rel=0.06)
    torch.testing.assert_close(half.adv_pos[chosen], given.adv_pos[chosen] / 0.3)
    assert rows(half) == int(chosen.sum())
    order = torch.randperm(M, generator=torch.Generator().manual_seed(2))
    assert learning(random_share(given.take(order), 0.3, token=token[order], seed=5)).equal(chosen[order])
    other = learning(random_share(given, 0.3, token=token, seed=6))
    assert not other.equal(chosen)
    # neighbouring token numbers and seeds are independent of each other
    both = (other & chosen).sum() / mask.sum()
    assert both == pytest.approx(0.09, abs=0.02)


def test_probability_mask() -> None:
    given, mask = fields()
    kept = learning(probability_mask(given, 0.6))
    assert given.old_logprob is not None
    assert kept.equal(mask & (given.old_logprob.exp() < 0.6))


def test_calm_tokens() -> None:
    given, mask = fields()
    entropy, kl = torch.rand(2, M, generator=torch.Generator().manual_seed(3))
    kept = Objective.preset("sft").live(calm_tokens(given, entropy, kl, 0.1))
    wild = (entropy >= entropy[mask].quantile(0.9)) | (kl >= kl[mask].quantile(0.9))
    assert kept.equal(mask & ~wild)


def test_mistakes_are_named() -> None:
    given, _ = fields()
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 0"):
        random_share(given, 0.0, token=torch.arange(M), seed=0)
    with pytest.raises(ValueError, match=r"entropy must be \[4000\], one a target, got \[3\]"):
        entropy_quantile(given, torch.ones(3), 0.5)
    with pytest.raises(ValueError, match="must have old_logprob"):
        probability_mask(PolicyFields.flat(torch.ones(3)))
