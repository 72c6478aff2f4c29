"""A plan made on the host: the loss refuses that of another batch, and never makes the host wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import (
    LogprobTerm,
    Objective,
    PathIndex,
    PolicyFields,
    Term,
    checks,
    linear_terms_loss,
    plan_terms_loss,
    use_backend,
)
from rolltree.kernels.linear_logprob import api as logprob_api
from rolltree.kernels.linear_logprob import op as logprob_op
from rolltree.kernels.linear_policy_loss import api, autograd, fused, op, plan
from rolltree.kernels.linear_policy_loss.terms import AnyTerm
from rolltree.kernels.policy_loss import api as policy_loss_api

from ..support.host_waits import waits
from .test_linear_logprob import Inputs
from .test_linear_shared_rows import GSPO, TREES, cast, forest
from .test_linear_terms_loss import make_terms

OPTIONS = {"vocabulary": 65, "hidden_size": 16, "device": "cpu"}


def planned(names: str, V: int = 65) -> tuple[Inputs, list[AnyTerm], plan.HeadPlan]:
    given, of_batch = forest(TREES["groups"], V=V)
    made_terms = make_terms(names, "tree", cast(of_batch, torch.float32, "token_mean"))
    given, terms = {name: t.cpu() for name, t in given.items()}, [moved(t, "cpu") for t in made_terms]
    options = OPTIONS | {"vocabulary": V}
    made = plan_terms_loss(terms, num_rows=len(given["hidden"]), row=given["row"], **options)
    return given, terms, made


def moved(x: Any, device: str) -> Any:
    """The same on ``device``; a normalizer, a single number, may stay on the host."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, PolicyFields):
        tensors, names = x.tensors()
        return PolicyFields.from_tensors([moved(t, device) for t in tensors], names, x.aggregation)
    if isinstance(x, PathIndex):
        return PathIndex(**{f.name: moved(getattr(x, f.name), device) for f in fields(x)})
    if isinstance(x, Term):
        normalizer = x.normalizer.cpu() if isinstance(x.normalizer, Tensor) else x.normalizer
        return x._replace(fields=moved(x.fields, device), normalizer=normalizer)
    if isinstance(x, LogprobTerm):
        loss: Any = x.loss
        keywords = {k: moved(v, device) for k, v in loss.keywords.items()}
        return x._replace(mask=moved(x.mask, device), loss=partial(loss.func, **keywords))
    return x


def host_waits(names: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the calls in which `linear_terms_loss`, forward and backward, makes the host wait with a plan from the
    host."""
    patch.setattr(plan, "chunk_rows", lambda N, V, device: 9)
    given, terms, made = planned(names, V=128)
    no_kernel = SimpleNamespace(ROW_MULTIPLE=16, statistics=lambda *_: None, gradient=lambda *_: None)
    for module in (op, logprob_op):
        patch.setattr(module, "row_kernels", lambda backend: no_kernel)
        patch.setattr(module, "backend_of", lambda name, values: "triton")
    patch.setattr(torch, "is_autocast_enabled", lambda device: False)  # neither knows the meta device
    patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    ran: list[str] = []

    def body(module: Any, name: str, setup: Any, backward: Any) -> None:
        """The op's own functions; on tensors without data torch would run its fake ones."""
        definition = getattr(module, name)

        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                ran.append(name)
                count = iter(inputs)
                rebuilt = [[next(count) for _ in range(n)] if is_list else next(count) for n, is_list in Op.shape]
                output = definition._init_fn(*rebuilt)
                setup(ctx, rebuilt, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                found = backward(ctx, *grads)
                return tuple(
                    g for value, (n, is_list) in zip(found, Op.shape, strict=True)
                    for g in (value if is_list and isinstance(value, list) else [value] * n)
                )  # fmt: skip

        def call(*inputs: Any) -> Any:
            Op.shape = [(len(x), True) if isinstance(x, list | tuple) else (1, False) for x in inputs]
            return Op.apply(*(y for x in inputs for y in (x if isinstance(x, list | tuple) else [x])))

        patch.setattr(module, name, call)

    body(api, "linear_terms_loss_op", op._setup_context, op._autograd_backward)
    body(autograd, "policy_loss_op", policy_loss_api._setup_context, policy_loss_api._autograd_backward)
    body(logprob_api, "linear_logprob_op", logprob_op._setup_context, logprob_op._autograd_backward)
    patch.setattr(logprob_op, "linear_logprob_backward_op", logprob_op.linear_logprob_backward_op._init_fn)
    patch.setattr(checks, "WITHOUT_VALUES", ())  # here they stand for a GPU's
    # the meta device stands for a GPU
    hidden, weight = (given[n].to("meta").requires_grad_() for n in ("hidden", "weight"))
    target, row, terms = given["target"].to("meta"), given["row"].to("meta"), [moved(t, "meta") for t in terms]
    made = made.to("meta")

    def step() -> None:
        with use_backend("reference"):
            linear_terms_loss(hidden, weight, target, terms, row=row, plan=made).loss.backward()

    seen = waits(step)
    assert ran
    return seen


CASES = ["policy", "policy+nll+kl+entropy", "sequence", "sequence+kl", "cov", "policy+pairs"]


@pytest.mark.check(but=1)
@pytest.mark.parametrize("names", CASES)
def test_the_host_never_waits(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_waits(names, monkeypatch) == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(), Tensor.tolist, Tensor.cpu, Tensor.nonzero, lambda t: bool(t.sum()),
        lambda t: t[t > 0], Tensor.unique, lambda t: torch.zeros(t.shape).copy_(t),
    ],
    ids=["item", "tolist", "cpu", "nonzero", "bool", "mask", "unique", "copy"],
)  # fmt: skip
def test_a_wait_is_seen(wait: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused.of_targets

    def waiting(entropy: Tensor, targets: Any) -> Tensor:
        wait(entropy)
        return original(entropy, targets)

    monkeypatch.setattr(fused, "of_targets", waiting)
    assert host_waits("policy", monkeypatch) != []


def test_a_plan_of_another_batch_is_refused() -> None:
    given, terms, made = planned("sequence")
    (term,) = terms
    assert isinstance(term, Term)
    usual = term.fields

    def loss(given_fields: PolicyFields, row: Tensor = given["row"], target: Tensor = given["target"]) -> Tensor:
        again = [Term(given_fields, GSPO, 3.0)]
        return linear_terms_loss(given["hidden"], given["weight"], target, again, row=row, plan=made).loss

    loss(usual)
    M = len(usual.weight)
    mask = torch.arange(M) != 4
    swapped = given["row"].clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    assert usual.paths is not None
    end = usual.paths.target_end.clone()
    end[:4] = 8
    for other in (
        lambda: loss(replace(usual, mask=mask)),
        lambda: loss(usual, swapped),
        lambda: loss(replace(usual, paths=replace(usual.paths, target_end=end))),
    ):
        with pytest.raises(ValueError, match="the plan is of other masks, advantages, rows or paths"):
            other()
    with pytest.raises(ValueError, match=r"the plan is for .* targets and a head of \[65, 16\]; here are .* plan this"):
        linear_terms_loss(given["hidden"][:-1], given["weight"], given["target"], terms, row=given["row"], plan=made)


def test_the_measured_share_of_clipped_rows_is_in_the_next_plan() -> None:
    given, terms, made = planned("policy")
    again = plan_terms_loss(terms, num_rows=len(given["hidden"]), row=given["row"], gradient_share=0.5, **OPTIONS)
    assert (made.products(), again.products()) == (6.0, 4.0)


def test_planned_from_arrays() -> None:
    """numpy arrays are tensors on the host."""
    given, terms, made = planned("sequence+kl")
    row = torch.from_numpy(given["row"].numpy())
    again = plan_terms_loss(terms, num_rows=len(given["hidden"]), row=row, **OPTIONS)
    assert again.batch == made.batch
    assert again.explain() == made.explain()
    assert Objective.preset("gspo").scope == "path"
