"""Whole steps under torch.compile: one graph for any number of rows, and the results of the same step without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from rolltree.kernels import (
    Objective,
    PolicyFields,
    gae,
    linear_divergence,
    linear_logprob,
    linear_policy_loss,
    linear_topk_divergence,
    logprob_from_logits,
    pair_loss,
    policy_loss,
    value_loss,
)

from ..support.thinned import thinned

pytestmark = pytest.mark.check
ROWS = (32, 17, 9, 30, 5, 23)
WEIGHT = torch.randn(61, 16, generator=torch.Generator().manual_seed(0))
OBJECTIVE = {name: Objective.preset(name) for name in ("dapo", "gspo", "grpo", "reinforce")}
Step = Callable[..., Tensor]


def fields(b: dict[str, Tensor], **more: Any) -> PolicyFields:
    return PolicyFields.flat(b["advantage"], old_logprob=b["old"], mask=b["mask"], cu_seqlens=b["cu"], **more)


def fused(name: str) -> Step:
    return lambda h, w, b: linear_policy_loss(h, w, b["target"], fields(b), OBJECTIVE[name], normalizer=7.0).loss


def two_steps(name: str) -> Step:
    def step(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
        scored = linear_logprob(h, w, b["target"], want=("entropy",))
        return policy_loss(scored.logprob, fields(b), OBJECTIVE[name], normalizer=7.0, entropy=scored.entropy).loss

    return step


def critic(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    value = h @ w[0]
    _, returns = gae(b["old"], value, b["cu"], gamma=0.9, lam=0.95, mask=b["mask"], bootstrap=b["advantage"])
    return value_loss(value, returns, normalizer=7.0, mask=b["mask"]).loss


def pairs(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    logprob = logprob_from_logits(h @ w.T, b["target"], want=("entropy",)).logprob
    paths = fields(b).paths
    assert paths is not None
    one = torch.tensor([0]), torch.tensor([2])
    return pair_loss(logprob, paths, *one, normalizer=2.0, ref_logprob=b["old"], mask=b["mask"]).loss


def of_rows(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    row = torch.arange(len(h), device=h.device).flip(0)
    return linear_policy_loss(h, w, b["target"], fields(b), OBJECTIVE["dapo"], normalizer=7.0, row=row).loss


def accumulated(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    return linear_policy_loss(
        h, w, b["target"], fields(b), OBJECTIVE["dapo"], normalizer=7.0, weight_grad=b["into"], in_forward=True
    ).loss


def divergence(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    options = {"kind": "jsd", "beta": 0.3, "mask": b["mask"], "weights": b["old"], "teacher_temperature": 0.7}
    return linear_divergence(h, w, b["teacher"], 2 * WEIGHT, normalizer=7.0, **options).loss


def divergence_accumulated(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    options = {
        "mask": b["mask"],
        "weight_grad": b["into"],
        "in_forward": True,
        "row": b["row"],
        "teacher_row": b["row"],
    }
    return linear_divergence(h, w, b["teacher"], w, kind="reverse_kl", normalizer=7.0, **options).loss


def topk_divergence(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
    logprob = b["old"][:, None] - 1
    return linear_topk_divergence(h, w, b["target"][:, None], logprob, rest=True, mask=b["mask"], normalizer=7.0).loss


STEPS = {
    **{f"fused {name}": fused(name) for name in ("dapo", "gspo", "reinforce")},
    **{f"two steps {name}": two_steps(name) for name in ("grpo", "gspo")},
    "critic": critic,
    "pairs": pairs,
    "rows": of_rows,
    "accumulated": accumulated,
    "divergence": divergence,
    "divergence, accumulated": divergence_accumulated,
    "divergence of the top": topk_divergence,
}


def batch(n: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor]]:
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 16, generator=g).to(dtype)
    made = {
        "target": torch.randint(0, 61, (n,), generator=g),
        "advantage": torch.randn(3, generator=g),
        "old": -4 - torch.rand(n, generator=g),
        "mask": torch.rand(n, generator=g) < 0.8,
        "cu": torch.tensor([0, 2, n // 2, n]),
        "into": torch.zeros_like(WEIGHT),
        "teacher": torch.randn(n, 16, generator=g).to(dtype),
        "row": torch.arange(n).flip(0),
    }
    return [hidden.requires_grad_(), WEIGHT.to(dtype).requires_grad_()], made


def results(step: Step, n: int, dtype: torch.dtype) -> list[Tensor | None]:
    leaves, b = batch(n, dtype)
    loss = step(*leaves, b)
    loss.backward()
    return [loss.detach(), *(x.grad for x in leaves), b["into"]]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    thinned(
        itertools.product(STEPS, [True, None]),
        lambda number, case: case == ("divergence", True),
    ),
)
def test_one_graph(name: str, dynamic: bool | None) -> None:
    """With ``dynamic=None`` the first size has a graph of its own, and every other one shares the second."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(STEPS[name], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in ROWS:
        torch.testing.assert_close(results(compiled, n, torch.float32), results(STEPS[name], n, torch.float32))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


@pytest.mark.slow
def test_half_precision() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused("dapo"), fullgraph=True, backend="aot_eager", dynamic=True)
    for n in ROWS[:2]:
        torch.testing.assert_close(results(compiled, n, torch.float16), results(fused("dapo"), n, torch.float16))


def test_an_objective_made_within_is_refused() -> None:
    def step(h: Tensor, w: Tensor, b: dict[str, Tensor]) -> Tensor:
        return linear_policy_loss(h, w, b["target"], fields(b), Objective(), normalizer=7.0).loss

    torch._dynamo.reset()
    leaves, b = batch(9)
    with pytest.raises(Exception, match="make it outside of the compiled function"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, b)
