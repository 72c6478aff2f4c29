"""fp16: gradients of the fused loss have the error of the two ops, whatever the sizes of loss, normalizer and scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import (
    Objective,
    PolicyFields,
    Term,
    linear_logprob,
    linear_policy_loss,
    linear_terms_loss,
    policy_loss,
    value_loss,
)

CU = torch.tensor([0, 20, 64])


def gradients(fused: bool, name: str, size: float, normalizer: float, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the loss, made with its factor ``scale`` and divided by it; advantages are of ``size``."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).half().to(dtype).requires_grad_() for n in (64, 50))
    target = torch.randint(0, 50, (64,), generator=g)
    objective = Objective.preset(name)
    given: dict[str, Any] = {"mask": torch.rand(64, generator=g) < 0.8, "cu_seqlens": CU}
    advantage = size * torch.randn(2, generator=g)
    with torch.no_grad():
        given["old_logprob"] = linear_logprob(hidden, weight, target).logprob.float() + 0.1
    fields = PolicyFields.flat(advantage, **given)
    if fused:
        loss = linear_policy_loss(hidden, weight, target, fields, objective, normalizer=normalizer).loss
    else:
        loss = policy_loss(
            linear_logprob(hidden, weight, target).logprob, fields, objective, normalizer=normalizer
        ).loss
    return [x.double() / scale for x in torch.autograd.grad(loss * scale, (hidden, weight))]


@pytest.mark.parametrize(
    ("size", "normalizer", "scale"),
    [(1, 64, 1024), (1e-4, 8192, 2.0**24), (1e5, 1e5, 1), (1e-6, 1e-6, 1), (1e-3, 1e6, 2.0**30), (0, 1, 1)],
)
@pytest.mark.parametrize("name", ["dapo", "gspo", "grpo"])
def test_the_error_is_that_of_two_steps(name: str, size: float, normalizer: float, scale: float) -> None:
    exact = gradients(False, name, size, normalizer, scale, torch.float64)
    error = [
        [
            (a - b).abs().max()
            for a, b in zip(gradients(f, name, size, normalizer, scale, torch.float16), exact, strict=True)
        ]
        for f in (True, False)
    ]
    for fused, two_steps in zip(*error, strict=True):
        assert fused <= 2 * two_steps


def test_terms_of_different_sizes() -> None:
    hidden, weight = (torch.randn(n, 16).half().requires_grad_() for n in (64, 50))
    target, found = torch.randint(0, 50, (64,)), []
    for dtype in (torch.float16, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        fields = [PolicyFields.flat(size * torch.ones(64)) for size in (1e5, 1e-3)]
        terms = [
            Term(f, Objective.preset("reinforce"), n, w, t)
            for f, n, w, t in zip(fields, (1e5, 1e-3), (1.0, 0.3), "ab", strict=True)
        ]
        loss = linear_terms_loss(*leaves, target, terms).loss
        found.append([loss.double(), *(g.double() for g in torch.autograd.grad(loss, leaves))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * b.detach().abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_value_loss(dtype: torch.dtype) -> None:
    """Squares and their sum are formed in fp32, and so is the loss."""
    value, returns, old = (8 * torch.randn(4096).to(dtype) for _ in range(3))
    found = []
    for wanted in (dtype, torch.float64):
        v = value.to(wanted).requires_grad_()
        out = value_loss(v, returns.to(wanted), old_value=old.to(wanted), normalizer=4096)
        assert out.loss.dtype == (torch.float64 if wanted == torch.float64 else torch.float32)
        found.append([out.loss.double(), torch.autograd.grad(1024 * out.loss, v)[0].double()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)
