"""linear_terms_loss: several terms in one pass of the head are the sum of each in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import (
    LogprobTerm,
    Objective,
    PolicyFields,
    PolicyLossOutput,
    Term,
    TermsLossOutput,
    linear_logprob,
    linear_policy_loss,
    linear_terms_loss,
    pair_loss,
    plan_terms_loss,
    policy_loss,
    use_backend,
)
from rolltree.kernels.dispatch import Backend, usable
from rolltree.kernels.linear_logprob import chunked
from rolltree.kernels.linear_policy_loss import plan
from rolltree.kernels.linear_policy_loss.terms import AnyTerm, live

from .test_linear_logprob import BACKENDS, COMPILED, DEVICE, Inputs
from .test_linear_policy_loss import batch, cast

TRAINED = ("hidden", "weight", "bias")


def selection(M: int, kind: str) -> Tensor:  # [M] bool
    if kind == "none":
        return torch.zeros(M, dtype=torch.bool, device=DEVICE)
    return torch.rand(M, generator=torch.Generator().manual_seed(len(kind))).to(DEVICE) < 0.4


def make_terms(names: str, shape: str, fields: PolicyFields) -> list[AnyTerm]:
    """Terms by their names, on the fields of `batch`, in fp32."""
    M = len(fields.weight)
    nothing = torch.zeros_like(fields.weight)
    quiet = PolicyFields(nothing, nothing, fields.weight, ref_logprob=fields.ref_logprob, paths=fields.paths)

    def of(name: str) -> AnyTerm:
        if name == "policy":
            return Term(fields, Objective.preset("dapo"), 11.0)
        if name == "sequence":
            return Term(fields, Objective(ratio_level="sequence", eps_low=0.1, eps_high=0.1), 3.0, 0.5)
        if name == "cov":
            return Term(fields, Objective.preset("clip_cov", covariance_low=0.0, covariance_high=5.0), 7.0)
        if name in ("nll", "nothing"):
            mask = selection(M, "some" if name == "nll" else "none")
            given = replace(quiet, mask=mask, aggregation=None)
            normalizer = torch.tensor(float(mask.sum()), device=DEVICE)
            return Term(given, Objective(surrogate="nll"), normalizer, 0.25, name="nll")
        if name == "kl":
            return Term(
                replace(quiet, mask=selection(M, "another")),
                Objective(kl="k3", kl_coef=1.0),
                5.0,
                0.1,
                name="kl",
            )
        if name == "entropy":
            return Term(quiet, Objective(entropy_coef=1.0), 35.0, 0.03, name="entropy")
        assert name == "pairs"
        assert fields.paths is not None
        chosen, rejected = (torch.tensor(x, device=DEVICE) for x in ([0, 2], [1, 4] if shape == "flat" else [1, 3]))
        mask = torch.ones(M, dtype=torch.bool, device=DEVICE) if fields.mask is None else fields.mask
        loss = partial(
            pair_loss, paths=fields.paths, chosen=chosen, rejected=rejected, normalizer=2.0, mask=mask,
            ref_logprob=fields.ref_logprob, beta=0.5,
        )  # fmt: skip
        return LogprobTerm(loss, mask, 0.7, name="rewards")

    made = [of(name) for name in names.split("+")]
    return [
        t._replace(fields=cast(t.fields, torch.float32, t.objective.aggregation)) if isinstance(t, Term) else t
        for t in made
    ]


def apart(terms: list[AnyTerm], **given: Any) -> TermsLossOutput:
    """Every term by itself, on log-probs of its own, in fp64."""
    losses: dict[str, Tensor] = {}
    total = 0.0
    for t in terms:
        out = linear_logprob(**given, want=("entropy",))
        assert out.entropy is not None
        entropy = out.entropy if given.get("row") is None else out.entropy[given["row"]]
        if isinstance(t, Term):
            exact = cast(t.fields, torch.float64, t.objective.aggregation)
            value = policy_loss(out.logprob, exact, t.objective, normalizer=t.normalizer, entropy=entropy)
        else:
            value = t.loss(out.logprob)
        total = total + t.weight * value.loss
        losses[t.name] = value.loss.detach()
    assert isinstance(total, Tensor)
    return TermsLossOutput(total, {}, losses, out.logprob.detach(), entropy.detach())


def together(terms: list[AnyTerm], **given: Any) -> TermsLossOutput:
    hidden, weight, target = given.pop("hidden"), given.pop("weight"), given.pop("target")
    return linear_terms_loss(hidden, weight, target, terms, **given)


def run(
    f: Callable[..., Any], given: Inputs, terms: list[AnyTerm], trained: tuple[str, ...], dtype: torch.dtype
) -> Any:
    given = dict(given)
    leaves = {}
    for name in TRAINED:
        leaves[name] = given[name] = given[name].detach().to(dtype).clone().requires_grad_(name in trained)
    out = f(terms, **given)
    (3 * out.loss).backward()
    return out, {name: leaves[name].grad for name in trained}


CASES = {  # terms, and the schedule they need with the head trained
    "policy": "fused_forward",
    "policy+nll": "fused_forward",
    "policy+nll+kl+entropy": "fused_forward",
    "policy+nothing": "fused_forward",
    "kl+nll": "fused_forward",
    "sequence+nll+entropy": "sequence_aligned",
    "sequence+kl": "sequence_aligned",
    "cov+nll": "two_phase",
    "policy+pairs": "two_phase",
    "pairs+nll+kl+entropy": "two_phase",
}


EVERY_CASE = [
    pytest.param(b.values[0], names, marks=b.marks, id=f"{b.values[0]}-{names}")
    for b in BACKENDS
    for names in (CASES if b.values[0] in COMPILED else ("policy+nll+kl+entropy", "sequence+kl", "policy+pairs"))
]


@pytest.mark.slow(but=31)
@pytest.mark.check(but=14)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", ["flat", "tree"])
@pytest.mark.parametrize(("backend", "names"), EVERY_CASE)
def test_one_pass_is_the_sum_of_its_terms(
    backend: Backend, names: str, shape: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, fields = batch(shape, bias=True)
    terms = make_terms(names, shape, fields)
    trained = ("hidden",) if frozen else TRAINED
    exact, gradients = run(apart, given, terms, trained, torch.float64)
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: 10)
    with use_backend(backend):
        got, found = run(together, given, terms, trained, torch.float32)
    assert abs(got.loss.item() - exact.loss.item()) <= 3e-6 * max(1.0, abs(exact.loss.item()))
    for name, value in exact.losses.items():
        torch.testing.assert_close(got.losses[name].double(), value.double(), rtol=3e-6, atol=3e-6)
    needed = torch.stack([live(t) for t in terms]).any(0)
    for mine, want in ((got.logprob, exact.logprob), (got.entropy, exact.entropy)):
        assert mine is not None
        assert want is not None
        assert not mine.requires_grad
        want = torch.where(needed, want, torch.nan)  # what no term needs is not computed
        torch.testing.assert_close(mine.double(), want, rtol=3e-6, atol=3e-6, equal_nan=True)
    for name in trained:
        scale = gradients[name].abs().max()
        assert scale > 0
        assert (found[name].double() - gradients[name]).abs().max() <= 3e-6 * scale, name


@pytest.mark.parametrize("names", ["policy", "policy+kl+entropy", "sequence", "policy+pairs"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.values[0] != "triton"])
def test_fp64_is_exact(backend: Backend, names: str) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("fp64 is for checking gradients on a CPU")
    given, fields = batch("flat", bias=True)
    terms = make_terms(names, "flat", fields)
    exact, gradients = run(apart, given, terms, TRAINED, torch.float64)
    with use_backend(backend):
        got, found = run(together, given, terms, TRAINED, torch.float64)
    torch.testing.assert_close(got.loss, exact.loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("names", CASES)
def test_what_the_plan_says(names: str) -> None:
    _, fields = batch("flat")
    terms = make_terms(names, "flat", fields)
    terms = [t._replace(fields=t.fields.folded(t.objective.aggregation)) if isinstance(t, Term) else t for t in terms]
    options = {"num_rows": 35, "vocabulary": 65, "hidden_size": 16, "device": "cpu"}
    made = plan_terms_loss(terms, **options)
    assert made.schedule == CASES[names]
    needed = torch.stack([t.objective.live(t.fields) if isinstance(t, Term) else t.mask for t in terms]).any(0)
    assert made.row_cuts[-1] == int(needed.sum())
    products = {"fused_forward": 6, "sequence_aligned": 6, "two_phase": 8}[made.schedule]
    assert made.flop() == products * int(needed.sum()) * 65 * 16
    assert f"{made.flop() / 1e12:.3g} TFLOP" in made.explain()
    frozen = plan_terms_loss(terms, **options, frozen=True).schedule
    of_entropy = "entropy" in names
    assert frozen == (("two_phase" if of_entropy else "frozen_head") if made.schedule == "two_phase" else made.schedule)


def test_the_products_are_those_of_one_term(monkeypatch: pytest.MonkeyPatch) -> None:
    given, fields = batch("flat", bias=True)
    terms = make_terms("policy+nll+kl+entropy", "flat", fields)
    multiplied: list[int] = []
    original = chunked.Head.logits
    monkeypatch.setattr(
        chunked.Head, "logits", lambda self, h, out: multiplied.append(len(h)) or original(self, h, out)
    )
    run(together, given, terms, TRAINED, torch.float32)
    assert multiplied == [35]


@pytest.mark.parametrize(("trained", "passes"), [(("hidden",), 1), (TRAINED, 2)])
def test_logits_are_formed_as_often_as_the_plan_says(
    trained: tuple[str, ...], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preference pairs they are formed once for a frozen head, else again in the backward for rows with a
    gradient."""
    given, fields = batch("flat", bias=True)
    terms = make_terms("pairs+entropy" if passes == 2 else "policy+pairs", "flat", fields)
    needed = torch.stack([t.objective.live(t.fields) if isinstance(t, Term) else t.mask for t in terms]).any(0)
    multiplied: list[int] = []
    original = chunked.Head.logits
    monkeypatch.setattr(
        chunked.Head, "logits", lambda self, h, out: multiplied.append(len(h)) or original(self, h, out)
    )
    with use_backend("cpu" if usable("cpu", DEVICE) else "triton"):  # the reference forms them at once
        run(together, given, terms, trained, torch.float32)
    assert sum(multiplied) == passes * int(needed.sum())


def test_metrics_of_a_term_bear_its_name_and_are_its_own() -> None:
    given, fields = batch("flat")
    terms = make_terms("policy+nll+kl+pairs", "flat", fields)
    got = together(terms, **given)
    policy = linear_policy_loss(
        given["hidden"], given["weight"], given["target"], terms[0].fields, terms[0].objective, normalizer=11.0
    )
    for name in ("actor/pg_loss", "actor/pg_clipfrac"):
        torch.testing.assert_close(got.metrics[name], policy.metrics[name])
    mask = terms[1].fields.mask
    logprob = linear_logprob(given["hidden"], given["weight"], given["target"]).logprob
    weight = terms[1].fields.weight[mask]
    torch.testing.assert_close(
        got.metrics["nll/pg_loss"][0], -(logprob[mask] * weight).double().sum(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(got.metrics["nll/pg_loss"][1], weight.double().sum())
    assert {"kl/kl_loss", "kl/entropy", "rewards/margins", "actor/ppo_kl"} <= got.metrics.keys()
    assert set(got.losses) == {"actor", "nll", "kl", "rewards"}
    assert not any(t.requires_grad for t in got.losses.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_normalizer_beside_a_large_one_keeps_half_precision(dtype: torch.dtype) -> None:
    """Gradients on their way are those of a sum over tokens; dividing by the tokens of an update is the last step."""
    given, fields = batch("flat", bias=True, dtype=dtype)
    terms = [t._replace(normalizer=1e7) for t in make_terms("policy+kl", "flat", fields) if isinstance(t, Term)]
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    _, exact = run(apart, wide, terms, TRAINED, torch.float64)
    given = given | {name: given[name].clone() for name in TRAINED}
    leaves = [given[name].requires_grad_() for name in TRAINED]
    found = torch.autograd.grad(1e7 * together(terms, **given).loss, leaves)
    for value, name in zip(found, TRAINED, strict=True):
        expected = exact[name] * (1e7 / 3)
        assert (value.double() - expected).abs().max() <= 1e-2 * expected.abs().max()


def test_a_weight_of_zero_takes_a_term_out() -> None:
    given, fields = batch("flat", bias=True)
    both = make_terms("policy+kl", "flat", fields)
    both[1] = both[1]._replace(weight=0.0)
    out, found = run(together, given, both, TRAINED, torch.float32)
    alone, expected = run(together, given, both[:1], TRAINED, torch.float32)
    torch.testing.assert_close(out.loss, alone.loss)
    torch.testing.assert_close(found, expected)


def test_an_accumulator_for_every_schedule() -> None:
    given, fields = batch("flat", bias=True)
    for names in ("policy+nll", "policy+pairs"):
        terms = make_terms(names, "flat", fields)
        _, expected = run(together, given, terms, TRAINED, torch.float32)
        accumulator = torch.ones_like(given["weight"])
        _, found = run(partial(together, weight_grad=accumulator), given, terms, TRAINED, torch.float32)
        assert found["weight"] is None
        torch.testing.assert_close(accumulator - 1, expected["weight"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["hidden"], expected["hidden"])


@pytest.mark.slow
def test_compile() -> None:
    given, fields = batch("flat")
    terms = make_terms("policy+nll+kl", "flat", fields)
    made = plan_terms_loss(terms, num_rows=35, vocabulary=65, hidden_size=16, device="cpu")

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_terms_loss(hidden * 2, weight, given["target"], terms, plan=made).loss

    results = []
    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [given[n].detach().clone().requires_grad_() for n in ("hidden", "weight")]
        results.append(torch.autograd.grad(f(*leaves), leaves))
    torch.testing.assert_close(*results)


def test_refusals() -> None:
    given, fields = batch("flat")
    terms = make_terms("policy+nll", "flat", fields)
    with pytest.raises(ValueError, match=r"terms must have names of their own, at least one, got \['actor', 'actor'\]"):
        together([terms[0], terms[0]], **given)
    with pytest.raises(ValueError, match="at least one, got"):
        together([], **given)
    bad = LogprobTerm(lambda logprob: PolicyLossOutput(logprob.sum(), {}), torch.ones(3, dtype=torch.bool), name="x")
    with pytest.raises(ValueError, match=r"the mask of term 'x' must be \[35\] like target, got \[3\]"):
        together([terms[0], bad], **given)
