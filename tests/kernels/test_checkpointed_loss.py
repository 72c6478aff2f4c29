"""Losses that add to ``weight_grad`` in the forward, within activation checkpointing, which runs the forward twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rolltree.kernels import Objective, PolicyFields, linear_policy_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def again(reentrant: bool) -> Callable[[Loss], Loss]:
    return lambda loss: lambda hidden, weight: checkpoint(loss, hidden, weight, use_reentrant=reentrant)


def offloaded(loss: Loss) -> Loss:
    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss(hidden, weight)

    return run


def to_the_end(loss: Loss) -> Loss:
    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return again(False)(loss)(hidden, weight)

    return run


def of_another_library(loss: Loss) -> Loss:
    """Keeps the inputs and runs the loss again for its saved tensors, as torch's checkpointing does."""

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        saved: list[Tensor] = []

        def unpack(place: int) -> Any:
            found: list[Tensor] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
            with hooks, torch.enable_grad():
                loss(*(x.detach().requires_grad_() for x in (hidden, weight)))
            return found[place].detach()

        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or len(saved) - 1, unpack):
            return loss(hidden, weight)

    return run


NESTED = {
    "once": lambda loss: loss,
    "offloaded": offloaded,
    "to the end": to_the_end,
    **{f"reentrant {a}": again(a) for a in (False, True)},
    **{
        f"reentrant {a} within {b}": lambda loss, a=a, b=b: again(b)(again(a)(loss))
        for a in (False, True)
        for b in (False, True)
    },
}


def gradients(wrapped: Callable[[Loss], Loss], in_forward: bool, name: str) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(8, 4), torch.randn(9, 4), torch.randint(0, 9, (8,))
    fields = PolicyFields.flat(torch.randn(2), cu_seqlens=torch.tensor([0, 3, 8]))
    into = torch.zeros_like(weight)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(
            hidden.tanh(), weight, target, fields, Objective.preset(name), normalizer=8, weight_grad=into,
            in_forward=in_forward,
        ).loss  # fmt: skip

    hidden.requires_grad_()
    wrapped(loss)(hidden, weight.requires_grad_()).backward()
    return into, hidden.grad


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_the_gradient_is_added_once(name: str, nesting: str, in_forward: bool) -> None:
    want = gradients(NESTED["once"], False, name)
    torch.testing.assert_close(gradients(NESTED[nesting], in_forward, name), want)


def test_the_gradient_of_two_unknown_runs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight_grad holds weight's gradient twice; leave in_forward out"):
        gradients(of_another_library, True, "dapo")
    assert gradients(of_another_library, False, "dapo")[0].any()
