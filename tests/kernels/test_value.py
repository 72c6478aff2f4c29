"""GAE against the plain backward loop, and the clipped value loss against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolltree.kernels.policy_loss.value import gae, value_loss


def loop(
    reward: Tensor, value: Tensor, lengths: list[int], mask: Tensor, gamma: float, lam: float, bootstrap: Tensor
) -> Tensor:
    """Return the estimate as textbooks write it: backwards over each sequence, masked tokens skipped."""
    advantage, begin = torch.zeros_like(reward), 0
    for s, n in enumerate(lengths):
        next_value, carried = bootstrap[s], torch.zeros(())
        for t in reversed(range(begin, begin + n)):
            if mask[t]:
                delta = reward[t] + gamma * next_value - value[t]
                carried = delta + gamma * lam * carried
                advantage[t], next_value = carried, value[t]
        begin += n
    return advantage


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_gae_is_the_loop(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    M = sum(lengths)
    reward, value = torch.randn(2, M, generator=g, dtype=torch.float64)
    mask, bootstrap = torch.rand(M, generator=g) < 0.7, torch.randn(len(lengths), generator=g, dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    advantage, returns = gae(reward, value, cu, gamma=gamma, lam=lam, mask=mask, bootstrap=bootstrap)
    torch.testing.assert_close(advantage, loop(reward, value, lengths, mask, gamma, lam, bootstrap))
    torch.testing.assert_close(returns, torch.where(mask, advantage + value, 0))


def test_gae_of_one_long_sequence() -> None:
    """lam = gamma = 1: the advantage is what is still to come, less the value; 100,000 tokens."""
    M = 100_000
    reward, value = torch.randn(2, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantage, _ = gae(reward, value, torch.tensor([0, M]))
    torch.testing.assert_close(advantage, reward.flip(0).cumsum(0).flip(0) - value)


def test_value_loss() -> None:
    g = torch.Generator().manual_seed(0)
    value, returns, old = torch.randn(3, 50, generator=g, dtype=torch.float64)
    mask = torch.rand(50, generator=g) < 0.7
    value.requires_grad_()
    out = value_loss(value, returns, normalizer=33, old_value=old, clip=0.5, mask=mask)
    near = old + (value - old).clamp(-0.5, 0.5)
    by_hand = 0.5 * torch.maximum((value - returns).square(), (near - returns).square())[mask]
    torch.testing.assert_close(out.loss, by_hand.sum() / 33)
    torch.testing.assert_close(torch.autograd.grad(out.loss, value), torch.autograd.grad(by_hand.sum() / 33, value))
    mean = {name: float(total / count) for name, (total, count) in out.metrics.items()}
    assert mean["critic/vf_loss"] == pytest.approx(float(by_hand.mean()))
    caught = ((near - returns).square() > (value - returns).square())[mask]
    assert mean["critic/vf_clipfrac"] == pytest.approx(float(caught.double().mean()))
    assert 0 < mean["critic/vf_clipfrac"] < 1
    error, goal = (value - returns)[mask].detach(), returns[mask]
    explained = 1 - (mean["critic/error_sq"] - mean["critic/error"] ** 2) / (
        mean["critic/returns_sq"] - mean["critic/returns"] ** 2
    )
    assert explained == pytest.approx(float(1 - error.var(unbiased=False) / goal.var(unbiased=False)))
    plain = value_loss(value, returns, normalizer=33, mask=mask).loss
    torch.testing.assert_close(plain, 0.5 * (value - returns)[mask].square().sum() / 33)


def test_nothing_to_learn_from_and_junk_in_masked_places() -> None:
    value = torch.full((4,), torch.nan, requires_grad=True)
    out = value_loss(value, torch.zeros(4), normalizer=0, mask=torch.zeros(4, dtype=torch.bool))
    out.loss.backward()
    assert out.loss == 0
    assert value.grad is not None
    assert value.grad.equal(torch.zeros(4))


def test_mistakes_are_named() -> None:
    x, cu = torch.zeros(4), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"gae: value must be \[4\] like reward, got \[3\]"):
        gae(x, x[:3], cu)
    with pytest.raises(ValueError, match=r"gamma and lam must be in \[0, 1\], got 1.5"):
        gae(x, x, cu, gamma=1.5)
    with pytest.raises(ValueError, match=r"bootstrap must be \[1\], one a sequence"):
        gae(x, x, cu, bootstrap=torch.zeros(2))
    with pytest.raises(ValueError, match="clip must be positive"):
        value_loss(x, x, normalizer=1, clip=0.0)


@pytest.mark.parametrize("name", ["reward", "value", "bootstrap"])
def test_estimates_have_no_gradient(name: str) -> None:
    given = {"reward": torch.randn(5), "value": torch.randn(5), "bootstrap": torch.randn(2)}
    given[name].requires_grad_()
    for estimate in gae(cu_seqlens=torch.tensor([0, 2, 5]), **given):
        assert not estimate.requires_grad


@pytest.mark.parametrize("name", ["returns", "old_value"])
def test_targets_that_require_a_gradient_are_refused(name: str) -> None:
    given = {"returns": torch.ones(3), "old_value": torch.ones(3), name: torch.ones(3, requires_grad=True)}
    with pytest.raises(ValueError, match=f"{name} is a constant of the loss but requires grad; detach it"):
        value_loss(torch.ones(3), normalizer=3, **given)
