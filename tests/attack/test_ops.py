"""The attack on the ops: what is odd must agree with the reference, what is wrong must be refused by name.

Every argument of every op is in the table of `ops` with its kind; `arguments` says what is odd or wrong with a kind, so
a new op or argument is attacked by a line there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolltree.kernels import (
    LogprobTerm,
    Objective,
    PolicyFields,
    PolicyLossOutput,
    Term,
    linear_logprob,
    linear_policy_loss,
    linear_terms_loss,
    plan_policy_loss,
    use_backend,
)

from ..support.arguments import Floats, odd, refusal
from .ops import OPS, Maker, Op

by_op = pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
SEEDS = st.integers(0, 2**32)
PHASES = (Phase.explicit, Phase.generate)  # a mistake in a table needs no shrinking


@pytest.mark.slow(but=2)
@pytest.mark.check(but=2)
@by_op
def test_odd_arguments_agree_with_the_reference(op: Op, cases: int) -> None:
    @settings(max_examples=cases, phases=PHASES)
    @given(SEEDS, st.data())
    def attack(seed: int, data: st.DataObject) -> None:
        right, kinds = op.make(Maker(seed))
        for name in data.draw(st.sets(st.sampled_from(sorted(kinds)), max_size=2), label="of one value"):
            if isinstance(kinds[name], Floats) and isinstance(right[name], Tensor) and right[name].numel():
                right[name] = right[name].flatten()[:1].expand(right[name].shape).clone()
        with use_backend("reference"):
            want = op.values(right, kinds)
        strange = {n: odd(data, kinds[n], v) if n in kinds else v for n, v in right.items()}
        backend = data.draw(st.sampled_from(op.backends), label="backend")
        if op.alike is not None:
            one, other = op.alike
            strange[other] = torch.empty_strided(right[other].shape, strange[one].stride()).copy_(right[other])
        with contextlib.nullcontext() if backend == "" else use_backend(backend):
            got = op.values(strange, kinds)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=3e-4, atol=3e-5, equal_nan=True)

    attack()


@by_op
def test_wrong_arguments_are_refused_by_name(op: Op, cases: int) -> None:
    @settings(max_examples=cases, phases=PHASES)
    @given(SEEDS, st.data())
    def attack(seed: int, data: st.DataObject) -> None:
        right, kinds = op.make(Maker(seed))
        name = data.draw(st.sampled_from(sorted(kinds)), label="argument")
        label, wrong = data.draw(st.sampled_from(list(kinds[name].wrong(right[name]))), label="mistake")
        message = refusal(lambda: op.values(right | {name: wrong}, {}))
        named = kinds[name].message or name.rpartition("_")[2]
        assert kinds[name].message == "" or named in message, (label, message)

    attack()


def test_sums_need_memory_of_their_own() -> None:
    x, target, fields = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64), PolicyFields.flat(torch.ones(3))
    weight, into = torch.ones(9, 4, requires_grad=True), torch.zeros(()).expand(9, 4)
    for call in (
        lambda: linear_logprob(x, weight, target, weight_grad=into),
        lambda: linear_policy_loss(
            x, weight, target, fields, Objective.preset("dapo"), normalizer=3.0, weight_grad=into
        ),
    ):
        assert "weight_grad is expanded" in refusal(call)


def test_a_row_out_of_range_does_not_take_part() -> None:
    """There are as many distinct rows as rows, and one of them is out of range."""
    m = Maker(0)
    given = {"hidden": m.floats(3, 4), "weight": m.floats(9, 4), "target": m.index(9, 3), "normalizer": 3.0}
    given |= {"fields": PolicyFields.flat(torch.ones(3)), "objective": Objective.preset("dapo")}
    for last in (3, -1, 2**40):
        with pytest.raises(IndexError, match=r"row must be in 0..2, got .*; it names rows of hidden"):
            linear_policy_loss(**given, row=torch.tensor([0, 1, last]))


OBJECTIVE = {f.name: f.default for f in dataclasses.fields(Objective) if f.init}
WRONG_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, "1", True, 1j, [1.0], torch.ones(())]


@pytest.mark.parametrize("name", OBJECTIVE)
def test_an_objective_takes_no_coefficient_that_is_none(name: str) -> None:
    default = OBJECTIVE[name]
    wrong: list[Any] = ["unknown", 3, None, ["ppo"]]
    if isinstance(default, bool):
        wrong = [1, 0.0, None, "yes"]
    elif isinstance(default, float) or default is None:
        wrong = [*WRONG_NUMBERS, *([None] if default is not None else [])]
    elif isinstance(default, tuple):
        wrong = ["needs", 3, None, (math.nan, 1.0), (1.0,), ("1", "2"), (1.0, 2.0, 3.0)]
    for bad in wrong:
        assert name in refusal(lambda: Objective(**{name: bad}))  # noqa: B023


def test_a_term_that_is_none_is_refused() -> None:
    m = Maker(0)
    given = {"hidden": m.floats(3, 4).requires_grad_(), "weight": m.floats(9, 4), "target": m.index(9, 3)}
    fields, mask = PolicyFields.flat(torch.ones(3)), torch.ones(3, dtype=torch.bool)
    right = Term(fields, Objective.preset("dapo"), 3.0)

    def of(loss: Any) -> LogprobTerm:
        return LogprobTerm(loss, mask, 1.0, "own")

    for terms, said in (
        ([], "terms"), (right, "terms"), ([right, right], "names of their own"), ([right, None], "terms"), (3, "terms"),
        ([right._replace(name=[1])], "name"), ([right._replace(name=None)], "name"),
        ([right._replace(fields=None)], "fields"), ([right._replace(objective="dapo")], "objective"),
        ([of(3)], "loss"), ([of(lambda x: x.sum())], "PolicyLossOutput"),
        ([of(lambda x: PolicyLossOutput(x, {}))], "single number"),
        ([of(lambda x: PolicyLossOutput(x.sum(), {}))._replace(mask=mask[:2])], "mask"),
    ):  # fmt: skip
        assert said in refusal(lambda: linear_terms_loss(**given, terms=terms))  # noqa: B023
    with pytest.raises(TypeError, match="plan must be a HeadPlan"):
        linear_terms_loss(**given, terms=[right], plan=3)  # type: ignore[arg-type]


@settings(max_examples=20)
@given(SEEDS)
def test_a_plan_of_other_data_is_refused(seed: int) -> None:
    """A plan leaves out what cannot learn: used with another mask, rows or sequences it would lose gradients."""
    m = Maker(seed)
    N, V, M = 6, 12, 8
    dapo, row = Objective.preset("dapo"), m.index(N, M)
    advantage = torch.tensor([0.0] + [1.0] * (M - 1))
    given = {"hidden": m.floats(N, 4).requires_grad_(), "weight": m.floats(V, 4), "target": m.index(V, M)}
    given |= {"normalizer": 5.0, "objective": dapo, "row": row}
    sizes = {"num_rows": N, "vocabulary": V, "hidden_size": 4, "device": "cpu"}
    plan = plan_policy_loss(PolicyFields.flat(advantage), dapo, **sizes, row=row)
    fields, others = PolicyFields.flat(advantage), PolicyFields.flat(advantage.flip(0))
    assert linear_policy_loss(**given, fields=fields, plan=plan).loss.isfinite()
    moved = torch.cat([row[:-1], (row[-1:] + 1) % N])
    sequences = PolicyFields.flat(advantage, cu_seqlens=torch.tensor([0, 3, M]))
    for change in (
        {"fields": others},
        {"fields": fields, "row": moved},
        {"fields": sequences, "objective": Objective.preset("gspo")},
    ):
        with pytest.raises(ValueError, match="the plan is of other masks, advantages, rows or paths: plan this"):
            linear_policy_loss(**given | change, plan=plan)
