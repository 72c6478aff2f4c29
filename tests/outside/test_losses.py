"""Cases of SkyRL's, slime's and Liger's suites for losses, written anew; docs/outside_suites.md lists them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, policy_loss

SUM = {"aggregation": "token_sum"}


def loss_of(logprob: Any, advantage: Any, objective: Objective, normalizer: float = 1, **given: Any) -> Tensor:
    """Return the loss of tokens laid end to end, in fp64."""
    fields = PolicyFields.flat(
        torch.as_tensor(advantage, dtype=torch.float64),
        **{n: torch.as_tensor(v, dtype=torch.float64 if n.endswith("logprob") else None) for n, v in given.items()},
    )
    logprob = torch.as_tensor(logprob, dtype=torch.float64)
    return policy_loss(logprob, fields, objective, normalizer=normalizer).loss


# -- SkyRL, tests/train/algorithms/test_losses.py; slime, tests/test_policy_loss.py and test_cispo_loss.py -------------

OLD, NEW, GAIN = [-1.0, -1.0, -3.0], [-1.69315, -1.0, -0.69741], [1.0, -1.0, -4.0]  # ratios 0.5, 1 and 10


def test_dual_clip_by_hand() -> None:
    """-0.5 for the ratio 0.5; 1; and at most 3 * 4 for the ratio 10 of a bad token."""
    found = loss_of(NEW, GAIN, Objective.preset("dual_clip", **SUM), old_logprob=OLD)
    assert found.item() == pytest.approx(12.5, abs=1e-4)
    plain = loss_of(NEW, GAIN, Objective.preset("ppo", **SUM), old_logprob=OLD)
    assert plain.item() == pytest.approx(40.5, abs=2e-3)


@pytest.mark.parametrize(("ratio", "gain", "loss"), [(2.0, 2.0, -2.4), (2.0, -2.0, 3.0), (0.5, 2.0, -1.0)])
def test_slimes_dual_clip_token_by_token(ratio: float, gain: float, loss: float) -> None:
    objective = Objective.preset("dual_clip", clip_ratio_c=1.5, **SUM)
    assert loss_of([math.log(ratio)], [gain], objective, old_logprob=[0.0]).item() == pytest.approx(loss)


def test_cispo_by_hand() -> None:
    found = loss_of(NEW, GAIN, Objective.preset("cispo", **SUM), old_logprob=OLD)
    assert found.item() == pytest.approx(-2.9930, abs=1e-4)
    masked = loss_of(NEW, GAIN, Objective.preset("cispo", **SUM), old_logprob=OLD, mask=[True, False, True])
    assert masked.item() == pytest.approx(-2.9930 + 1, abs=1e-4)


def test_cispo_by_the_sampler() -> None:
    """Ratios against the sampler: its log-probs are the old ones."""
    sampler = torch.tensor([-1.30685, -1.5, -1.0], dtype=torch.float64)
    new, gain = torch.tensor(NEW, dtype=torch.float64), torch.tensor(GAIN, dtype=torch.float64)
    want = -((new - sampler).exp().clamp(0.8, 1.2) * gain * new).sum()
    torch.testing.assert_close(loss_of(NEW, GAIN, Objective.preset("cispo", **SUM), old_logprob=sampler), want)


@pytest.mark.parametrize(
    ("low", "high", "ratios", "clamped"),
    [(0.2, 0.28, [1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8]), (1.0, 4.0, [1.0, 3.0, 9.0, 0.4], [1, 3, 5, 0.4])],
)
def test_cispo_has_gradient_through_log_probs_alone(low: float, high: float, ratios: Any, clamped: Any) -> None:
    gain = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    logprob = torch.tensor([-0.7, -1.2, -0.4, -2.1], dtype=torch.float64, requires_grad=True)
    old = logprob.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    found = loss_of(logprob, gain, Objective.preset("cispo", eps_low=low, eps_high=high, **SUM), old_logprob=old)
    weight = torch.tensor(clamped, dtype=torch.float64)
    torch.testing.assert_close(found, -(weight * gain * logprob).sum())
    torch.testing.assert_close(torch.autograd.grad(found, logprob)[0], -weight * gain)


def test_sapo_by_its_formula() -> None:
    gain, ratio = [1.0, -1.0, 0.5], [math.exp(-0.5), math.exp(0.2), math.exp(-0.1)]
    want = 0.0
    for a, r in zip(gain, ratio, strict=True):
        tau = 1.0 if a > 0 else 2.0
        want -= a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    objective = Objective.preset("sapo", tau_pos=1.0, tau_neg=2.0, **SUM)
    found = loss_of([-1.5, -0.8, -1.1], gain, objective, old_logprob=[-1.0, -1.0, -1.0])
    assert found.item() == pytest.approx(want)


def test_gspo_has_one_ratio_a_sequence() -> None:
    lengths = [5, 2, 4]
    new = [0.2, -2.5, -0.3, 0.1, -1.8, 0.8, -0.2, -0.5, 0.3, -1.7, 0.4]
    gain = [1.5, 2.0, 1.0, 0.8, 0.5, 3.0, 1.5, 0.5, 0.8, 1.2, 2.5]
    old, cuts, want = [-1.0] * 11, [0, 5, 7, 11], 0.0
    for begin, length in zip(cuts, lengths, strict=False):
        r = math.exp(sum(new[begin : begin + length]) / length + 1)
        want -= sum(min(r * a, min(max(r, 0.8), 1.2) * a) for a in gain[begin : begin + length])
    given = {"old_logprob": old, "cu_seqlens": torch.tensor(cuts)}
    objective = Objective(ratio_level="sequence_token", **SUM)
    assert loss_of(new, gain, objective, **given).item() == pytest.approx(want)
    assert loss_of(new, gain, Objective(**SUM), **given).item() != pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "delta", "old", "new", "gain", "kept"),
    [
        ("dppo_tv", 0.2, [-1.0] * 3, [-0.3, -2.0, -0.9], [1.0, -1.0, 1.0], [0, 0, 1]),
        ("dppo_tv", 0.2, [-1.0] * 2, [-2.0, -0.3], [1.0, -1.0], [1, 1]),
        ("dppo_tv", 0.2, [-0.35, -1.0], [-0.3, -0.95], [1.0, 1.0], [1, 1]),
        ("dppo_kl", 0.05, [-1.0] * 2, [-0.1, -0.95], [1.0, 1.0], [0, 1]),
        ("dppo_kl", 0.5, [-1.0] * 2, [-1.01, -0.99], [1.0, -1.0], [1, 1]),
    ],
)
def test_dppo_masks_what_has_moved_with_the_advantage(
    kind: str, delta: float, old: Any, new: Any, gain: Any, kept: list[int]
) -> None:
    """A token that is kept has the gradient -A r: SkyRL's value is -A r, ours -A sg(r) logprob."""
    logprob = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    found = loss_of(logprob, gain, Objective.preset(kind, eps_low=delta, eps_high=delta, **SUM), old_logprob=old)
    want = [-a * math.exp(n - o) * k for a, n, o, k in zip(gain, new, old, kept, strict=True)]
    torch.testing.assert_close(torch.autograd.grad(found, logprob)[0], torch.tensor(want, dtype=torch.float64))


# -- SkyRL, tests/backends/skyrl_train/utils/test_ppo_utils.py ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_estimates_of_the_kl_and_a_masked_token_that_is_not_finite(kind: Any) -> None:
    new, reference = [-0.8, -0.7, -0.5, -0.3], [-0.9, -1.0, -0.1, math.nan]
    x = [r - n for n, r in zip(new[:3], reference, strict=False)]
    want = {
        "k1": [-v for v in x],
        "k2": [v * v / 2 for v in x],
        "k3": [math.exp(v) - v - 1 for v in x],
        "abs": [abs(v) for v in x],
    }
    objective = Objective(kl=kind, kl_coef=1.0, **SUM)
    mask = [True, True, True, False]
    found = loss_of(new, [0.0] * 4, objective, old_logprob=new, ref_logprob=reference, mask=mask)
    assert found.item() == pytest.approx(sum(want[kind]))


@pytest.mark.parametrize(
    ("kind", "gain", "mask", "normalizer", "want"),
    [
        ("token_mean", [1, 2, 3, 4, 5, 6], [1, 1, 0, 1, 1, 1], 5, 3.6),
        ("token_mean", [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0], 0, 0.0),
        ("seq_mean_token_mean", [1, 2, 3, 3, 4, 9], [1, 1, 0, 1, 0, 0], 2, 2.25),
        ("seq_mean_token_sum_norm", [2, 3, 9, 9, 12, 9], [1, 1, 0, 1, 0, 0], 2 * 10, 0.7),
    ],
)
def test_means_over_tokens_and_sequences(kind: Any, gain: Any, mask: Any, normalizer: float, want: float) -> None:
    """Two sequences of three tokens; the loss at ratio 1 is minus the weighted advantage."""
    given = {"mask": torch.tensor(mask, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 3, 6])}
    found = loss_of([-1.0] * 6, gain, Objective(aggregation=kind), normalizer, old_logprob=[-1.0] * 6, **given)
    assert found.item() == pytest.approx(-want, abs=1e-12)


def test_the_mean_of_micro_batches() -> None:
    """Micro-batches of 3 and 4 tokens with means 4 and 13: each has the normaliser tokens times micro-batches."""
    objective, found = Objective(aggregation="batch_token_mean"), 0.0
    for gain in ([2.0, 4.0, 6.0], [10.0, 12.0, 14.0, 16.0]):
        one = [-1.0] * len(gain)
        found -= loss_of(one, gain, objective, 2 * len(gain), old_logprob=one).item()
    assert found == pytest.approx(8.5)


def test_the_mean_of_prompts_is_a_mean_with_weights() -> None:
    """Two prompts, of 3 and 4 tokens with means 2 and 6.5."""
    gain, weight = [1.0, 2, 3, 5, 6, 7, 8], torch.tensor([1 / 3] * 3 + [1 / 4] * 4, dtype=torch.float64)
    found = loss_of([-1.0] * 7, gain, Objective(**SUM), 2, old_logprob=[-1.0] * 7, weight=weight)
    assert found.item() == pytest.approx(-4.25)


# -- Liger, test/chunked_loss/test_grpo_loss.py ------------------------------------------------------------------------

LENGTHS, LIMIT = (7, 3, 5), 9
LIGER = {
    "bnpo": ({"aggregation": "batch_token_mean"}, lambda per, mean, tokens: per.sum() / tokens),
    "grpo": ({"aggregation": "seq_mean_token_mean"}, lambda per, mean, tokens: mean(per).mean()),
    "dr_grpo": ({"aggregation": "seq_mean_token_sum_norm"}, lambda per, mean, tokens: per.sum() / (3 * LIMIT)),
    "dapo": ({"aggregation": "token_mean"}, lambda per, mean, tokens: per.sum() / tokens),
}


@pytest.mark.parametrize("delta", [None, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kind", LIGER)
def test_ligers_matrix(kind: str, beta: float, level: Any, delta: float | None) -> None:
    """Loss and gradient against the two-sided minimum written out; ``delta`` bounds the ratio of bad tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens, cuts = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    noise = torch.randn(3, tokens, generator=draw, dtype=torch.float64)
    logprob = (-noise[0].abs() - 0.1).requires_grad_()
    old, reference = logprob.detach() + 0.8 * noise[1], logprob.detach() + 0.4 * noise[2]
    gain = torch.tensor([-0.7, 1.2, -0.4], dtype=torch.float64)
    mask = torch.arange(tokens) % 4 != 1
    kept = mask.double()

    def mean(values: Tensor) -> Tensor:  # [tokens] -> [3]
        zero = torch.zeros(3, dtype=torch.float64)
        return zero.index_add(0, sequence, values * kept) / zero.index_add(0, sequence, kept)

    log_ratio = logprob - old
    ratio = (log_ratio if level == "token" else mean(log_ratio)[sequence]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    a = gain[sequence]
    per = -torch.minimum(bounded * a, clipped * a)
    x = reference - logprob
    per = torch.where(mask, per + beta * (x.exp() - x - 1), 0)
    options, reduce = LIGER[kind]
    want = reduce(per, mean, kept.sum())

    objective = Objective(ratio_level=level, clip_ratio_c=delta, kl_coef=beta, **options)
    count = {"grpo": 3.0, "dr_grpo": 3.0 * LIMIT}.get(kind, float(kept.sum()))
    given = {"old_logprob": old, "ref_logprob": reference, "mask": mask, "cu_seqlens": cuts}
    found = loss_of(logprob, gain, objective, count, **given)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    mine, theirs = (torch.autograd.grad(loss, logprob)[0] for loss in (found, want))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert ((ratio > 2) & (a < 0) & mask).any() or level == "sequence"  # delta acts
