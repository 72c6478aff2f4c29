"""Preference losses against formulas of their own, on sequences and on trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels.policy_loss import PathIndex
from rolltree.kernels.policy_loss.pairs import pair_loss

LENGTHS = [4, 1, 6, 3]
CHOSEN, REJECTED = torch.tensor([0, 2]), torch.tensor([1, 3])


def sequences(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, PathIndex]:
    g = torch.Generator().manual_seed(0)
    M = sum(LENGTHS)
    logprob = -torch.rand(M, generator=g, dtype=torch.float64) * 2 - 0.05
    ref, mask = logprob + 0.3 * torch.randn(M, generator=g, dtype=torch.float64), torch.rand(M, generator=g) < 0.8
    mask[4] = True
    ends = torch.tensor(LENGTHS).cumsum(0)
    index = PathIndex(torch.repeat_interleave(ends, torch.tensor(LENGTHS)), ends - 1, torch.tensor(LENGTHS), None, None)
    return logprob.to(dtype), ref.to(dtype), mask, index


def sums(values: Tensor, mask: Tensor, mean: bool = False) -> tuple[Tensor, Tensor]:
    parts = [
        v[m].sum() / (m.sum() if mean else 1) for v, m in zip(values.split(LENGTHS), mask.split(LENGTHS), strict=True)
    ]
    of = torch.stack(parts)
    return of[CHOSEN], of[REJECTED]


def h(lp: Tensor, ref: Tensor, mask: Tensor, mean: bool = False) -> Tensor:
    better, worse = sums(lp - ref, mask, mean)
    return better - worse


def sigmoid_loss(x: Tensor, s: float = 0.0) -> Tensor:
    return -(1 - s) * x.sigmoid().log() - s * (-x).sigmoid().log()


def orpo(lp: Tensor, mask: Tensor) -> Tensor:
    p, q = (x.exp() for x in sums(lp, mask, mean=True))
    return -0.3 * (p / (1 - p) / (q / (1 - q))).log().sigmoid().log()


def simpo(lp: Tensor, mask: Tensor) -> Tensor:
    better, worse = sums(lp, mask, mean=True)
    return sigmoid_loss(0.3 * (better - worse) - 0.1)


CASES: list[tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    ({"kind": "sigmoid"}, lambda lp, ref, m: sigmoid_loss(0.3 * h(lp, ref, m))),
    ({"kind": "sigmoid", "margin": 0.2}, lambda lp, ref, m: sigmoid_loss(0.3 * h(lp, ref, m) - 0.2)),
    ({"kind": "sigmoid", "label_smoothing": 0.1}, lambda lp, ref, m: sigmoid_loss(0.3 * h(lp, ref, m), 0.1)),
    ({"kind": "robust", "label_smoothing": 0.1},
     lambda lp, ref, m: (0.9 * sigmoid_loss(0.3 * h(lp, ref, m)) - 0.1 * sigmoid_loss(-0.3 * h(lp, ref, m))) / 0.8),
    ({"kind": "hinge"}, lambda lp, ref, m: (1 - 0.3 * h(lp, ref, m)).relu()),
    ({"kind": "ipo"}, lambda lp, ref, m: (h(lp, ref, m, mean=True) - 1 / 0.6).square()),
    ({"kind": "simpo", "margin": 0.1}, lambda lp, ref, m: simpo(lp, m)),
    ({"kind": "orpo"}, lambda lp, ref, m: orpo(lp, m)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_formulas(case: int) -> None:
    options, formula = CASES[case]
    lp, ref, mask, index = sequences()
    lp.requires_grad_()
    reference = {} if options["kind"] in ("simpo", "orpo") else {"ref_logprob": ref}
    out = pair_loss(lp, index, CHOSEN, REJECTED, normalizer=5, mask=mask, beta=0.3, **options, **reference)
    want = formula(lp, ref, mask).sum() / 5
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(torch.autograd.grad(out.loss, lp), torch.autograd.grad(want, lp))
    assert torch.autograd.gradcheck(
        lambda x: pair_loss(x, index, CHOSEN, REJECTED, normalizer=5, mask=mask, beta=0.3, **options, **reference).loss,
        (lp,),
    )


def test_certain_and_empty_sequences_stay_finite() -> None:
    lp, _, mask, index = sequences()
    lp[:5] = 0.0  # the first two sequences are certain
    mask[5:11] = False  # nothing of the third is left
    lp.requires_grad_()
    loss = pair_loss(lp, index, CHOSEN, REJECTED, "orpo", normalizer=1, mask=mask).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, lp)[0].isfinite().all()


def test_metrics_and_weights() -> None:
    lp, ref, mask, index = sequences()
    out = pair_loss(
        lp, index, CHOSEN, REJECTED, normalizer=1, ref_logprob=ref, mask=mask, weight=torch.tensor([2.0, 0.5])
    )
    better, worse = sums(lp - ref, mask)
    losses = sigmoid_loss(0.1 * (better - worse))
    torch.testing.assert_close(out.loss, 2 * losses[0] + 0.5 * losses[1])
    means = {name: float(total / count) for name, (total, count) in out.metrics.items()}
    assert means == pytest.approx({
        "rewards/chosen": float(0.1 * better.mean()), "rewards/rejected": float(0.1 * worse.mean()),
        "rewards/margins": float(0.1 * (better - worse).mean()),
        "rewards/accuracies": float((better > worse).double().mean()),
    })  # fmt: skip


def test_what_siblings_share_cancels_exactly() -> None:
    """Trunk 0-2, leaves 3-4 and 5: the loss is that of the flat pair, and the trunk's gradient is exactly 0."""
    g = torch.Generator().manual_seed(1)
    lp, ref = -torch.rand(2, 6, generator=g)
    lp.requires_grad_()
    tree = PathIndex(torch.tensor([6, 6, 6, 5, 5, 6]), torch.tensor([4, 5]), torch.tensor([5, 4]), None, None)
    one, two = torch.tensor([0]), torch.tensor([1])
    loss = pair_loss(lp, tree, one, two, normalizer=1, ref_logprob=ref).loss
    index = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])
    flat = PathIndex(torch.tensor([5] * 5 + [9] * 4), torch.tensor([4, 8]), torch.tensor([5, 4]), None, None)
    expanded = pair_loss(lp[index], flat, one, two, normalizer=1, ref_logprob=ref[index]).loss
    torch.testing.assert_close(loss, expanded)
    gradient = torch.autograd.grad(loss, lp)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expanded, lp)[0])
    assert gradient[:3].equal(torch.zeros(3))
    assert (gradient[3:] != 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kto"}, "kind 'kto' is not known; choose one of sigmoid"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "kind 'ipo' does not take label_smoothing"),
        ({"ref_logprob": None}, "kind 'sigmoid' needs ref_logprob"),
        ({"kind": "orpo"}, "kind 'orpo' takes no ref_logprob"),
        ({"beta": 0.0}, "beta must be positive"),
        ({"rejected": torch.tensor([1])}, r"rejected must be \[2\] like chosen"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask must be \[14\] like logprob"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    lp, ref, _, index = sequences()
    given = {"chosen": CHOSEN, "rejected": REJECTED, "ref_logprob": ref, "normalizer": 1} | options
    with pytest.raises(ValueError, match=message):
        pair_loss(lp, index, **given)


@pytest.mark.parametrize(("kind", "change", "sentence"), [
    ("ipo", {"margin": 0.1}, "kind 'ipo' does not take margin"),
    ("orpo", {"margin": torch.zeros(2)}, "kind 'orpo' does not take margin"),
    ("sigmoid", {"ref_logprob": torch.zeros(14, requires_grad=True)}, "ref_logprob is a constant of the loss"),
    ("sigmoid", {"margin": torch.zeros(2, requires_grad=True)}, "margin is a constant of the loss"),
    ("sigmoid", {"weight": torch.zeros(2, requires_grad=True)}, "weight is a constant of the loss"),
    ("sigmoid", {"normalizer": torch.ones((), requires_grad=True)}, "normalizer is a constant of the loss"),
    ("sigmoid", {"paths": torch.tensor([0, 4, 14])}, "paths must be a PathIndex, such as PolicyFields.flat"),
])  # fmt: skip
def test_what_a_kind_does_not_take_is_refused(kind: Any, change: dict[str, Any], sentence: str) -> None:
    lp, ref, _, index = sequences()
    given = {"paths": index, "normalizer": 1, **({} if kind == "orpo" else {"ref_logprob": ref}), **change}
    with pytest.raises((TypeError, ValueError), match=sentence):
        pair_loss(lp, chosen=CHOSEN, rejected=REJECTED, kind=kind, **given)
