"""linear_policy_loss equals policy_loss of linear_logprob: value, gradients and metrics, whatever the schedule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels import (
    HeadLora,
    Objective,
    PathIndex,
    PolicyFields,
    PolicyLossOutput,
    linear_logprob,
    linear_policy_loss,
    plan_policy_loss,
    policy_loss,
    use_backend,
)
from rolltree.kernels.dispatch import Backend
from rolltree.kernels.linear_logprob import chunked
from rolltree.kernels.linear_policy_loss import api, op, plan
from rolltree.kernels.linear_policy_loss.fused import to_front
from rolltree.kernels.policy_loss import PRESETS

from .on_device import interpret_some
from .test_linear_logprob import BACKENDS, COMPILED, DEVICE, HAS_GPU, ROW_KERNELS, Inputs, inputs

ROOT = Path(__file__).parents[2]
TRAINED = ("hidden", "weight", "bias", "a", "b")
LENGTHS = [5, 1, 9, 0, 7, 6, 4, 3]  # sequences; the fourth has no token


def batch(
    shape: str = "flat", dtype: torch.dtype = torch.float32, V: int = 65, **options: Any
) -> tuple[Inputs, PolicyFields]:
    """Head inputs and fields on the same targets. "flat": sequences, a target a row; "tree": two with branches."""
    g = torch.Generator().manual_seed(4)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=g, dtype=torch.float64).to(DEVICE)

    if shape == "flat":
        M = sum(LENGTHS)
        given = inputs(M, 16, V, dtype=dtype, **options)
        cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=DEVICE)
        advantage = torch.tensor([1.5, 0.0, -1.0, 2.0, 0.0, -0.5, 0.7, 0.0], device=DEVICE, dtype=torch.float64)
        mask = uniform(M) < 0.8
        constants = dict(mask=mask, cu_seqlens=cu, weight=0.5 + uniform(len(LENGTHS)))
    else:
        # rows 0..11: a prompt row 0, then a trunk 1-3 that forks into 4-6 and 7-8; a second tree: 9, fork 10 and 11
        M = 11
        given = inputs(12, 16, V, dtype=dtype, **options)
        row = torch.tensor([0, 1, 2, 3, 4, 5, 3, 7, 9, 9, 11], device=DEVICE)
        g2 = torch.Generator().manual_seed(9)
        given |= {"row": row, "target": torch.randint(0, V, (M,), generator=g2).to(DEVICE)}
    with torch.no_grad():
        wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
        current = linear_logprob(**wide).logprob
    old, ref, behaviour = (current + scale * (uniform(M) - 0.5) for scale in (1.2, 0.8, 0.6))
    constants_of_targets = {"old_logprob": old, "ref_logprob": ref, "behaviour_logprob": behaviour}
    if shape == "flat":
        constants_of_targets |= {
            "teacher_logprob": current + 0.4 * (uniform(M) - 0.5),
            "pass_rate": 0.2 + 0.5 * uniform(M),
            "proximal_logprob": current + 0.3 * (uniform(M) - 0.5),
            "segment": torch.tensor([100 * s + t // 4 for s, n in enumerate(LENGTHS) for t in range(n)], device=DEVICE),
        }
    if shape == "flat":
        return given, PolicyFields.flat(advantage, **constants, **constants_of_targets)
    paths = PathIndex(
        target_end=torch.tensor([8, 8, 8, 6, 6, 6, 8, 8, 9, 11, 11], device=DEVICE),
        leaf_target=torch.tensor([5, 7, 8, 10], device=DEVICE),
        leaf_length=torch.tensor([6.0, 5.0, 1.0, 2.0], dtype=torch.float64, device=DEVICE),
        leaf_weight=torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=torch.float64, device=DEVICE),
        leaf_advantage=torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64, device=DEVICE),
    )
    A, w = paths.leaf_advantage, paths.leaf_weight
    assert A is not None
    assert w is not None
    return given, PolicyFields(
        paths.spread(w * A.clamp(min=0)), paths.spread(w * A.clamp(max=0)), paths.spread(w), paths=paths,
        **constants_of_targets,
    )  # fmt: skip


def cast(fields: PolicyFields, dtype: torch.dtype, aggregation: str) -> PolicyFields:
    tensors, names = fields.tensors()
    narrow = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return PolicyFields.from_tensors(narrow, names, fields.aggregation or (aggregation if "tree" in names else None))


def composed(fields: PolicyFields, objective: Objective, normalizer: float, **given: Any) -> PolicyLossOutput:
    out = linear_logprob(**given, want=("entropy",))
    assert out.entropy is not None
    entropy = out.entropy if given.get("row") is None else out.entropy[given["row"]]
    return policy_loss(out.logprob, fields, objective, normalizer=normalizer, entropy=entropy)


def composed_of_parts(
    at_once: int, fields: PolicyFields, objective: Objective, normalizer: float, **given: Any
) -> PolicyLossOutput:
    """`composed`, with products of at most ``at_once`` rows; a target a row."""
    of_rows = [given.pop(name).split(at_once) for name in ("hidden", "target", "temperature")]
    logprob, entropy = [], []
    for hidden, target, temperature in zip(*of_rows, strict=True):
        out = linear_logprob(hidden=hidden, target=target, temperature=temperature, want=("entropy",), **given)
        assert out.entropy is not None
        logprob.append(out.logprob)
        entropy.append(out.entropy)
    return policy_loss(torch.cat(logprob), fields, objective, normalizer=normalizer, entropy=torch.cat(entropy))


def fused(fields: PolicyFields, objective: Objective, normalizer: float, **given: Any) -> PolicyLossOutput:
    hidden, weight, target = given.pop("hidden"), given.pop("weight"), given.pop("target")
    return linear_policy_loss(hidden, weight, target, fields, objective, normalizer=normalizer, **given)


def run(f: Any, given: Inputs, fields: PolicyFields, objective: Objective, trained: tuple[str, ...]) -> dict[str, Any]:
    given = dict(given)
    leaves = {}
    for name in TRAINED:
        if name in given:
            leaves[name] = given[name] = given[name].detach().clone().requires_grad_(name in trained)
    if "a" in given:
        given["lora"] = HeadLora(given.pop("a"), given.pop("b"), 0.7)
    loss, metrics = f(fields, objective, 7.0, **given)
    (3 * loss).backward()
    assert all(leaf.grad is None for name, leaf in leaves.items() if name not in trained)
    return {"loss": loss.detach(), "metrics": metrics} | {f"d_{n}": leaves[n].grad for n in trained if n in leaves}


def same(
    got: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float,
    exact: dict[str, Any] | None = None,
    others: Sequence[dict[str, Any]] = (),
) -> None:
    """Assert equality to ``tolerance``; with ``exact`` (float64), an error at most twice that of ``expected`` or of
    one of ``others``: products of few rows and of many may be summed in other orders, five times as far from it."""
    for name, value in expected.items():
        if name == "metrics":
            continue
        center = value.double() if exact is None else exact[name].double()
        scale = center.abs().max().clamp(min=0.05 if name == "loss" else 1e-3)  # losses cancel
        usual = [value, *(other[name] for other in others)] if exact else []
        rounded = 2 * max(((x.double() - center).abs().max() for x in usual), default=0.0)
        assert (got[name].double() - center).abs().max() <= rounded + tolerance * scale, name
    assert got["metrics"].keys() == expected["metrics"].keys()
    for name in ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        torch.testing.assert_close(got["metrics"][name], expected["metrics"][name], rtol=1e-5, atol=1e-6)


def flat_or_tree(shape: str, objective: Objective, **options: Any) -> tuple[Inputs, PolicyFields]:
    given, fields = batch(shape, **options)
    if shape == "tree" and objective.aggregation == "seq_mean_token_mean":
        pytest.skip("trees fold this aggregation as they merge tokens: tests/engine/model/test_tree_equals_flat.py")
    return given, cast(fields, torch.float32, objective.aggregation)


EVERY_PRESET = [
    pytest.param(b.values[0], name, marks=[*b.marks, *late], id=f"{b.values[0]}-{name}")
    for b in BACKENDS
    for name in (PRESETS if b.values[0] in COMPILED else ("dapo", "cispo", "gspo"))
    for late in [[pytest.mark.slow] if (b.values[0], name) == ("triton", "cispo") and not HAS_GPU else []]
]


@pytest.mark.slow(but=1)
@pytest.mark.check(but=12)
@pytest.mark.parametrize(("backend", "name"), EVERY_PRESET)
@pytest.mark.parametrize("chunk", [5, 10, 1000])
def test_equals_the_two_ops(backend: Backend, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, fields = batch(bias=True, temperature="rows")
    share = torch.linspace(0, 1, sum(LENGTHS), dtype=torch.float64, device=DEVICE)  # 0: the first has no gradient
    needed = {"token_weight": share, "clip_low": 0.6 + 0.3 * share, "clip_high": 1.1 + 0.3 * share}
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: chunk)
    with use_backend(backend):
        for extra in ({}, {"kl_coef": 0.3, "entropy_coef": 0.2}):
            objective = Objective.preset(name, **extra)
            full = replace(fields, **{n: needed[n] for n in objective.needs})
            expected, others = run(composed, given, full, objective, TRAINED), []
            exact = None
            if backend == "reference":  # the only one that does not multiply a chunk at a time in the two ops
                others.append(run(partial(composed_of_parts, chunk), given, full, objective, TRAINED))
            if backend != "cpu":  # either is some 3e-6 from float64, and they round apart by nearly as much
                wide = {
                    k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()
                }
                with use_backend("reference"):
                    exact = run(composed, wide, full, objective, TRAINED)
            got, tolerance = run(fused, given, full, objective, TRAINED), 2e-6 if exact is None else 1e-6
            same(got, expected, tolerance, exact=exact, others=others)


SOME_TRAINED = [
    (name, trained)
    for name in ("dapo", "gspo")
    for trained in (("hidden",), ("weight", "bias"), ("hidden", "a", "b"), ("a", "b"), TRAINED)
]


@pytest.mark.check(but=20)
@pytest.mark.parametrize(("backend", "name", "trained"), interpret_some(BACKENDS, SOME_TRAINED, [0, 4, 8]))
def test_whatever_is_trained(backend: Backend, name: str, trained: tuple[str, ...]) -> None:
    g = torch.Generator().manual_seed(2)
    given, fields = batch(bias=True, softcap=4.0)
    given |= {"a": torch.randn(3, 16, generator=g).to(DEVICE), "b": torch.randn(65, 3, generator=g).to(DEVICE)}
    objective = Objective.preset(name, entropy_coef=0.1)
    with use_backend(backend):
        same(run(fused, given, fields, objective, trained), run(composed, given, fields, objective, trained), 3e-6)


TREE_OBJECTIVES = {
    "token": Objective(),
    "sequence": Objective(ratio_level="sequence", eps_low=0.1, eps_high=0.1),
    "token kl": Objective(kl_coef=0.3, entropy_coef=0.2, clip_ratio_c=1.5),
    "sequence kl": Objective(ratio_level="sequence", kl_coef=0.3, entropy_coef=0.2),
}


TREE_CASES = [(name, chunk, frozen) for frozen in (False, True) for chunk in (3, 8, 1000) for name in TREE_OBJECTIVES]


@pytest.mark.slow(but=29)
@pytest.mark.check(but=17)
@pytest.mark.parametrize(
    ("backend", "name", "chunk", "frozen"), interpret_some(BACKENDS, TREE_CASES, [0, 5, 10, 15, 17, 19])
)
def test_trees(backend: Backend, name: str, chunk: int, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = TREE_OBJECTIVES[name]
    given, fields = flat_or_tree("tree", objective)
    for module in (plan, chunked):
        monkeypatch.setattr(module, "chunk_rows", lambda N, V, device: chunk)
    trained = ("hidden",) if frozen else ("hidden", "weight")
    with use_backend(backend):
        same(run(fused, given, fields, objective, trained), run(composed, given, fields, objective, trained), 2e-6)


def test_targets_in_any_order() -> None:
    objective = Objective(kl_coef=0.1)
    given, fields = batch("tree")
    tensors, names = PolicyFields(*(getattr(fields, n) for n in ("adv_pos", "adv_neg", "weight")),
                                  old_logprob=fields.old_logprob, ref_logprob=fields.ref_logprob).tensors()  # fmt: skip
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = given | {"row": given["row"][order], "target": given["target"][order]}
    plain, mixed = (
        PolicyFields.from_tensors([t.float()[o] for t in tensors], names, None) for o in (torch.arange(11), order)
    )
    trained = ("hidden", "weight")
    same(run(fused, shuffled, mixed, objective, trained), run(fused, given, plain, objective, trained), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_no_worse_than_the_two_ops(backend: Backend) -> None:
    given, fields = batch(dtype=torch.bfloat16)
    objective = Objective.preset("dapo")
    trained = ("hidden", "weight")
    exact_given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    exact = run(composed, exact_given, fields, objective, trained)
    with use_backend(backend):
        got, two = run(fused, given, fields, objective, trained), run(composed, given, fields, objective, trained)
    for name in ("d_hidden", "d_weight"):
        error, usual = ((r[name].double() - exact[name]).abs().max() for r in (got, two))
        assert error <= max(2 * usual, 4e-3 * exact[name].abs().max()), name


def test_a_factor_of_the_loss_is_not_rounded_to_half_precision() -> None:
    """Bitwise: the gradient of hidden times the factor in fp32, rounded once."""
    given, fields = batch(dtype=torch.bfloat16)
    factor, found = torch.tensor(3 / 7, device=DEVICE), []
    for scale in (1, factor):
        hidden = given["hidden"].detach().clone().requires_grad_()
        loss = fused(fields, Objective.preset("dapo"), 1.0, **given | {"hidden": hidden}).loss
        found += torch.autograd.grad(scale * loss, hidden)
    assert found[1].equal((found[0].float() * factor).bfloat16())
    assert not found[1].equal(found[0] * factor.bfloat16())


def schedule_of(objective: Objective, shape: str = "flat", **options: Any) -> plan.HeadPlan:
    given, fields = batch(shape)
    fields = cast(fields, torch.float32, objective.aggregation)
    if shape == "flat":
        fields = fields.folded(objective.aggregation)
    return plan_policy_loss(
        fields, objective, num_rows=len(given["hidden"]), vocabulary=65, hidden_size=16, device="cpu",
        row=given.get("row"), **options,
    )  # fmt: skip


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    token, sequence = Objective.preset("dapo"), Objective.preset("gspo")
    assert schedule_of(token).schedule == "fused_forward"
    assert schedule_of(sequence).schedule == "sequence_aligned"
    assert schedule_of(token, gradient=False).schedule == "logprob_only"
    monkeypatch.setattr(plan, "chunk_rows", lambda N, V, device: 4)  # shorter than the longest sequence
    assert schedule_of(sequence).schedule == "sequence_aligned"
    assert schedule_of(Objective.preset("segment_ratio")).schedule == "sequence_aligned"
    assert schedule_of(sequence, frozen=True).schedule == "frozen_head"
    assert schedule_of(Objective.preset("gspo", entropy_coef=0.1), frozen=True).schedule == "sequence_aligned"
    assert schedule_of(Objective.preset("clip_cov")).schedule == "two_phase"
    assert schedule_of(Objective.preset("clip_cov"), frozen=True).schedule == "frozen_head"
    assert schedule_of(token, frozen=True).schedule == "fused_forward"


@pytest.mark.parametrize("name", ["gspo", "segment_ratio"])
def test_tokens_without_advantage_still_enter_the_ratio_of_their_sequence(name: str) -> None:
    given, fields = batch()
    advantage = torch.randn(35, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(DEVICE)
    advantage[torch.arange(35, device=DEVICE) % 3 > 0] = 0
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=DEVICE)
    fields = PolicyFields.flat(
        advantage, old_logprob=fields.old_logprob, mask=fields.mask, segment=fields.segment, cu_seqlens=cu
    )
    trained, objective = ("hidden", "weight"), Objective.preset(name)
    same(run(fused, given, fields, objective, trained), run(composed, given, fields, objective, trained), 2e-6)


def test_rows_that_cannot_learn_are_never_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    given, fields = batch()
    live = int(((fields.adv_pos - fields.adv_neg != 0) & fields.mask).sum())
    assert 0 < live < 0.6 * len(given["target"])
    made = schedule_of(Objective.preset("dapo"))
    assert made.row_cuts == (0, live)
    assert f"{live} of 35 rows" in made.explain()
    assert made.flop() == 6.0 * live * 65 * 16
    assert schedule_of(Objective.preset("dapo", kl_coef=0.1)).row_cuts[-1] == int(fields.mask.sum())
    multiplied: list[int] = []
    original = chunked.Head.logits
    monkeypatch.setattr(
        chunked.Head, "logits", lambda self, h, out: multiplied.append(len(h)) or original(self, h, out)
    )
    for options in ({}, {"plan": made}):
        multiplied.clear()
        run(fused, given | options, fields, Objective.preset("dapo"), ("hidden", "weight"))
        # without a plan from the host a GPU would have to be waited for
        assert multiplied == [live if options or DEVICE.type == "cpu" else 35]


def test_clipped_rows_leave_after_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("a GPU would have to be waited for")
    given, fields = batch()
    objective = Objective.preset("dapo", eps_low=0.05, eps_high=0.05)
    expected = run(composed, given, fields, objective, ("hidden", "weight"))
    kept = int((expected["d_hidden"].abs().sum(1) > 0).sum())
    live = int(objective.live(fields).sum())
    assert kept < 0.9 * live
    reached: list[int] = []
    original = chunked.Head.to_hidden
    monkeypatch.setattr(
        chunked.Head, "to_hidden", lambda self, d, out: reached.append(len(d)) or original(self, d, out)
    )
    same(run(fused, given, fields, objective, ("hidden", "weight")), expected, 2e-6)
    assert reached == [kept]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 1.0])
def test_rows_brought_to_the_front_copy_as_few_as_can_be(share: float) -> None:
    g = torch.Generator().manual_seed(int(100 * share))
    tile = torch.randn(97, 13, generator=g)
    before, rows = tile.clone(), (torch.rand(97, generator=g) < share).nonzero().flatten()
    order = to_front(tile, rows)
    assert order.sort().values.equal(rows)
    assert tile[: len(rows)].equal(before[order])
    stays = rows[rows < len(rows)]
    assert order[stays].equal(stays)
    moved = (tile != before).any(1)
    assert int(moved.sum()) == len(rows) - len(stays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_learn_from_is_a_differentiable_zero(backend: Backend) -> None:
    given, fields = batch()
    M = sum(LENGTHS)
    nobody = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    cu = torch.tensor([0, 5, M], device=DEVICE)
    masked = PolicyFields.flat(torch.ones(2, device=DEVICE), old_logprob=fields.old_logprob, mask=nobody, cu_seqlens=cu)
    objectives = Objective.preset("dapo"), Objective.preset("gspo"), Objective(surrogate="nll")
    for objective in objectives:
        with use_backend(backend):
            got = run(fused, given, masked, objective, ("hidden", "weight"))
        assert got["loss"] == 0
        assert not got["d_hidden"].any()
        assert not got["d_weight"].any()


def test_without_gradient() -> None:
    given, fields = batch()
    with torch.no_grad():
        quiet = fused(fields, Objective.preset("gspo"), 7.0, **given)
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, composed(fields, Objective.preset("gspo"), 7.0, **given).loss)


def test_a_second_backward_is_refused() -> None:
    given, fields = batch()
    given["hidden"].requires_grad_()
    loss = fused(fields, Objective.preset("dapo"), 7.0, **given).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward has used its gradients"):
        loss.backward()


@pytest.mark.parametrize("in_forward", [False, True])
def test_a_second_derivative_is_refused(in_forward: bool) -> None:
    given, fields = batch()
    leaves = [given[name].requires_grad_() for name in ("hidden", "weight")]
    into = {"weight_grad": torch.zeros_like(given["weight"]), "in_forward": True} if in_forward else {}
    loss = fused(fields, Objective.preset("dapo"), 7.0, **given, **into).loss
    with pytest.raises(RuntimeError, match="linear_policy_loss has no second derivative"):
        torch.autograd.grad(loss, leaves[0], create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accumulator_takes_the_weight_gradient_in_fp32(dtype: torch.dtype) -> None:
    given, fields = batch(dtype=dtype)
    objective = Objective.preset("dapo")
    want = run(fused, given, fields, objective, ("hidden", "weight"))["d_weight"]
    leaf = given["weight"].detach().clone().requires_grad_()
    accumulator = torch.ones(leaf.shape, device=DEVICE)
    hidden = given["hidden"].detach().clone().requires_grad_()
    for _ in range(2):
        out = linear_policy_loss(
            hidden, leaf, given["target"], fields, objective, normalizer=7.0, weight_grad=accumulator
        )
        (3 * out.loss).backward()
    assert leaf.grad is None
    torch.testing.assert_close(
        (accumulator - 1) / 2, want.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"weight_grad must be fp32, got torch.bfloat16"):
        linear_policy_loss(
            hidden, leaf, given["target"], fields, objective, normalizer=7.0, weight_grad=accumulator.bfloat16()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "shape"), [("dapo", "flat"), ("gspo", "flat"), ("ppo", "tree"), ("gspo", "tree")])
def test_the_forward_adds_to_an_accumulator(
    name: str, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients are as exact as those of a sum made apart and added in the backward."""
    monkeypatch.setattr(plan, "chunk_rows", lambda *_: 10)
    given, fields = batch(shape, dtype=dtype, bias=True)
    objective = Objective.preset(name)
    wide = {k: t.double() if t.is_floating_point() else t for k, t in given.items()}
    fine = run(fused, wide, cast(fields, torch.float64, "token_mean"), objective, TRAINED)
    exact = {"weight": 1 + 2 / 3 * fine["d_weight"]} | {k: 2 / 3 * fine[f"d_{k}"] for k in ("hidden", "bias")}
    error = {}
    for in_forward in (False, True):
        leaves = {k: given[k].detach().clone().requires_grad_() for k in ("hidden", "weight", "bias")}
        accumulator = torch.ones(leaves["weight"].shape, device=DEVICE)
        of_sums = {"weight_grad": accumulator, "in_forward": in_forward}
        for step in range(2):
            before = accumulator.clone()
            out = fused(cast(fields, torch.float32, "token_mean"), objective, 7.0, **given | leaves | of_sums)
            assert torch.equal(accumulator, before) != in_forward, step
            out.loss.backward()
            assert not torch.equal(accumulator, before)
            torch.testing.assert_close(out.loss.double(), fine["loss"].double(), rtol=1e-2, atol=1e-3)
        assert leaves["weight"].grad is None
        found = {"weight": accumulator, "hidden": leaves["hidden"].grad, "bias": leaves["bias"].grad}
        error[in_forward] = {k: (t.double() - exact[k]).abs().max().item() for k, t in found.items()}
    for k, apart in error[False].items():
        assert error[True][k] <= 2 * apart, k


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_the_forward_makes_no_sum_of_its_own(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the head's size: the products add to what is given."""
    given, fields = batch(V=97)
    made: list[torch.Size] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            known = {storage(t) for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            new = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            made.extend(t.shape for t in new if storage(t) not in known)  # views aside
            return out

    def storage(t: Tensor) -> int:
        return t.untyped_storage().data_ptr()

    call: list[Any] = []
    monkeypatch.setattr(op, "linear_terms_loss_into_op", lambda *args: call.extend(args) or op._one_pass(*args))
    given = {k: given[k].requires_grad_(k != "target") for k in ("hidden", "weight", "target")}
    zeros = torch.zeros_like(given["weight"])
    fused(fields, Objective.preset("dapo"), 7.0, **given, weight_grad=zeros, in_forward=True)
    for into in (None, zeros):
        made.clear()
        with torch.no_grad(), use_backend(backend), Sizes():
            op._one_pass(*call[:-1], into)
        assert (given["weight"].shape in made) == (into is None)


WITH_A_FACTOR = """
import torch
from tests.kernels.test_linear_policy_loss import Objective, batch, fused
given, fields = batch()
into = torch.zeros_like(given["weight"])
given["weight"].requires_grad_()
out = fused(fields, Objective.preset("dapo"), 7.0, **given, weight_grad=into, in_forward=True)
(3 * out.loss).backward()
torch.cuda.synchronize()
"""


def test_what_was_added_in_the_forward_takes_no_factor() -> None:
    given, fields = batch()
    into = torch.zeros_like(given["weight"])
    given["weight"].requires_grad_()
    options = {"fields": fields, "objective": Objective.preset("dapo"), "normalizer": 7.0, "in_forward": True}
    sentence = "the loss must be differentiated as it is; put other factors into normalizer"
    if DEVICE.type == "cuda":  # by an assertion on the device, which then does nothing more for the process
        done = subprocess.run([sys.executable, "-c", WITH_A_FACTOR], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode != 0
        assert sentence in done.stdout + done.stderr
    else:
        with pytest.raises(ValueError, match=sentence):
            (3 * fused(**options, **given, weight_grad=into).loss).backward()
    with pytest.raises(ValueError, match="in_forward adds to weight_grad in the forward; give weight_grad"):
        fused(**options, **given)
    with pytest.raises(ValueError, match="weight_grad must be contiguous"):
        fused(**options, **given, weight_grad=into.T.contiguous().T)
    with torch.no_grad():
        before = into.clone()
        fused(**options, **given, weight_grad=into)
    assert torch.equal(into, before)


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    original = api.linear_terms_loss_op
    monkeypatch.setattr(api, "linear_terms_loss_op", lambda *args: calls.append(args) or original(*args))
    for name, shape in (("dapo", "flat"), ("gspo", "flat"), ("ppo", "tree")):
        given, fields = batch(shape, bias=True)
        run(
            fused,
            given,
            cast(fields, torch.float32, "token_mean"),
            Objective.preset(name),
            ("hidden", "weight", "bias"),
        )
        for utils in ("test_schema", "test_faketensor", "test_autograd_registration"):
            torch.library.opcheck(op.linear_terms_loss_op, calls[-1], test_utils=utils)
        into = (*calls[-1][:-1], torch.zeros_like(given["weight"]))
        for utils in ("test_schema", "test_faketensor"):
            torch.library.opcheck(op.linear_terms_loss_into_op, into, test_utils=utils)


@pytest.mark.slow
def test_compile() -> None:
    given, fields = batch()
    objective = Objective.preset("dapo")
    plan_ = schedule_of(objective)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(
            hidden * 2, weight, given["target"], fields, objective, normalizer=7.0, plan=plan_
        ).loss

    results = []
    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [given[n].detach().clone().requires_grad_() for n in ("hidden", "weight")]
        results.append(torch.autograd.grad(f(*leaves), leaves))
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_compile_into_an_accumulator() -> None:
    given, fields = batch()
    objective, results = Objective.preset("dapo"), []
    plan_ = schedule_of(objective)

    def step(hidden: Tensor, weight: Tensor, into: Tensor) -> Tensor:
        return linear_policy_loss(
            hidden * 2, weight, given["target"], fields, objective, normalizer=7.0, plan=plan_, weight_grad=into,
            in_forward=True,
        ).loss  # fmt: skip

    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [given[n].detach().clone().requires_grad_() for n in ("hidden", "weight")]
        into = torch.ones_like(given["weight"])
        f(*leaves, into).backward()
        assert leaves[1].grad is None
        results.append([leaves[0].grad, into])
    torch.testing.assert_close(*results)


def test_a_plan_of_another_batch_is_refused() -> None:
    given, fields = batch()
    made = plan_policy_loss(fields, Objective.preset("dapo"), num_rows=35, vocabulary=64, hidden_size=16, device="cpu")
    with pytest.raises(ValueError, match=r"the plan is for 35 rows, 35 targets and a head of \[64, 16\]"):
        linear_policy_loss(**{k: given[k] for k in ("hidden", "weight", "target")}, fields=fields,
                           objective=Objective.preset("dapo"), normalizer=1.0, plan=made)  # fmt: skip
    with pytest.raises(ValueError, match="35 targets for 34 rows; give row="):
        plan_policy_loss(fields, Objective.preset("dapo"), num_rows=34, vocabulary=65, hidden_size=16, device="cpu")
