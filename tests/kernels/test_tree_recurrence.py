"""Recurrences on trees against a loop over tokens in fp64: order, neighbours, chunk boundaries, and negatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rolltree.kernels.tree_recurrence import (
    RecurrencePlan,
    Segments,
    find_segments,
    tree_convolution,
    tree_recurrence,
)

from ..support.trees import random_trees
from .recurrences import by_token, convolved

RULES = ("delta", "kimi", "mamba")


def inputs(rule: str, rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor | None]:
    """Query, key, value, decay, beta; memories of tens of rows."""
    torch.manual_seed(seed)
    groups, heads, dk, dv = 2, 4, 5, 6
    made = [torch.randn(rows, groups, dk, dtype=dtype), F.normalize(torch.randn(rows, groups, dk, dtype=dtype), dim=-1)]
    made += [torch.randn(rows, heads, dv, dtype=dtype)]
    made += [-0.2 * torch.rand(*((rows, heads, dk) if rule == "kimi" else (rows, heads)), dtype=dtype)]
    return [*made, None if rule == "mamba" else torch.rand(rows, heads, dtype=dtype)]


def plan_of(end: Any, **options: Any) -> RecurrencePlan:
    return RecurrencePlan.make(find_segments(np.asarray(end)), **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "close"), [(300, 0.02), (150, 0.5), (1, 0.1)])
def test_values_and_gradients_equal_those_of_a_loop(rule: str, rows: int, close: float) -> None:
    end, _, parents = random_trees(rows, rows, close=close)
    given = inputs(rule, rows)
    asked = [x.requires_grad_() for x in given if x is not None]
    right, (found, _) = by_token(given, parents, 0.7), tree_recurrence(*given, plan_of(end), scale=0.7)
    weight = torch.randn_like(right)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), asked) for x in (right, found)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_by_differences(rule: str) -> None:
    end, _, _ = random_trees(24, 5, close=0.4)
    plan = RecurrencePlan.make(
        find_segments(end.numpy())._replace(initial=np.full(len(find_segments(end.numpy()).start), 0)),
        states=1, ends=np.array([0, 1]),
    )  # fmt: skip
    given = [*inputs(rule, 24), torch.randn(1, 4, 5, 6, dtype=torch.float64)]
    asked = [x.requires_grad_() for x in given if x is not None]

    def run(*some: Tensor) -> Any:
        q, k, v, g, *rest = some
        return tree_recurrence(q, k, v, g, rest[0] if len(rest) == 2 else None, plan, initial=rest[-1])

    assert torch.autograd.gradcheck(run, asked, fast_mode=True)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129])
def test_chunks_end_on_and_off_the_ends_of_segments(length: int) -> None:
    """A prompt and two responses; float32 within roundings of a loop in float64."""
    rows = 3 * length
    end = np.array([rows] * length + [2 * length] * length + [rows] * length)
    parents = [t - 1 for t in range(rows)]
    parents[2 * length] = length - 1
    given = inputs("delta", rows)
    right = by_token(given, parents, 1.0)
    found, _ = tree_recurrence(*(x.float() for x in given), plan_of(end))
    assert float((found.double() - right).abs().max()) < 3e-6 * float(right.abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_order_of_siblings_and_neighbours_change_no_bit(rule: str) -> None:
    lengths, prompt = [1, 70, 16, 3, 129], 80

    def run(order: list[int], before: int) -> dict[int, Tensor]:
        rows = before + prompt + sum(lengths)
        given = inputs(rule, prompt + sum(lengths), torch.float32)
        of = {i: torch.arange(n) + prompt + sum(lengths[:i]) for i, n in enumerate(lengths)}
        rows_in = torch.cat([torch.arange(prompt), *(of[i] for i in order)])
        neighbour = inputs(rule, before, torch.float32, seed=9) if before else [None] * 5
        joined = [
            None if x is None else torch.cat([*([] if n is None else [n]), x[rows_in]])
            for x, n in zip(given, neighbour, strict=True)
        ]
        end, at = [before] * before + [rows] * prompt, before + prompt
        for i in order:
            at += lengths[i]
            end += [at] * lengths[i]
        out, _ = tree_recurrence(*joined, plan_of(end))
        parts = out[before + prompt :].split([lengths[i] for i in order])
        return dict(zip(order, parts, strict=True))

    first = run([0, 1, 2, 3, 4], 0)
    for order, before in (([4, 2, 0, 3, 1], 0), ([1, 0, 3, 4, 2], 37)):
        again = run(order, before)
        assert all(torch.equal(first[i], again[i]) for i in first)


@pytest.mark.parametrize("wrong", ["nothing", "states", "history", "row order"])
def test_a_wrong_tree_is_seen(wrong: str) -> None:
    end, _, parents = random_trees(200, 3, close=0.1)
    segments = find_segments(end.numpy())
    cut = segments._replace(parent=np.full(len(segments.start), -1))
    rows = find_segments(np.full(200, 200))
    plan = RecurrencePlan.make({"nothing": segments, "row order": rows}.get(wrong, cut))
    given, x, w = inputs("delta", 200), torch.randn(200, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    bad = (tree_recurrence(*given, plan)[0] - by_token(given, parents, 1.0)).abs().max() > 0.1
    assert bool(bad) == (wrong != "nothing")
    found, _ = tree_convolution(x, w, None, plan)
    assert bool((found - convolved(x, w, parents)).abs().max() > 0.1) == (wrong != "nothing")


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolutions_follow_the_path(taps: int) -> None:
    end, _, parents = random_trees(60, 2, close=0.6)
    x, w = torch.randn(60, 3, dtype=torch.float64), torch.randn(3, taps, dtype=torch.float64)
    found, _ = tree_convolution(x, w, None, plan_of(end))
    torch.testing.assert_close(found, convolved(x, w, parents))
    plan = plan_of(end, ends=np.array([1, 4, 2]))
    given = [t.requires_grad_() for t in (x, w, torch.randn(3, dtype=torch.float64))]
    assert torch.autograd.gradcheck(lambda *some: tree_convolution(*some, plan), given, fast_mode=True)


@pytest.mark.parametrize("rule", RULES)
def test_states_are_handed_from_call_to_call(rule: str) -> None:
    """A row cut anywhere, with the states handed on, gives what one call gives."""
    rows, cut = 150, 71
    given, x, w = inputs(rule, rows), torch.randn(rows, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    whole, _ = tree_recurrence(*given, plan_of([rows] * rows))
    conv, _ = tree_convolution(x, w, None, plan_of([rows] * rows))
    first = RecurrencePlan.make(find_segments(np.full(cut, cut)), ends=np.array([0]))
    one = np.zeros(1, np.int64)
    later = RecurrencePlan.make(Segments(one, one + rows - cut, one - 1, one), states=1)
    a, state = tree_recurrence(*(None if t is None else t[:cut] for t in given), first)
    b, _ = tree_recurrence(*(None if t is None else t[cut:] for t in given), later, initial=state)
    torch.testing.assert_close(torch.cat([a, b]), whole)
    a, inputs_before = tree_convolution(x[:cut], w, None, first)
    b, _ = tree_convolution(x[cut:], w, None, later, history=inputs_before)
    torch.testing.assert_close(torch.cat([a, b]), conv)


def test_many_leaves_and_great_depth() -> None:
    """10,000 leaves of one row below a prompt, and a comb of depth 500: the first and last leaves as on their own."""
    leaves, prompt = 10_000, 20
    end = np.concatenate([np.full(prompt, prompt + leaves), prompt + 1 + np.arange(leaves)])
    given = [None if x is None else x.float() for x in inputs("delta", prompt + leaves)]
    out, _ = tree_recurrence(*given, plan_of(end))
    for row in (prompt, prompt + leaves - 1):
        path = [*range(prompt), row]
        alone = by_token([x[path].double() for x in given], list(range(-1, prompt)), 1.0)
        torch.testing.assert_close(out[row].double(), alone[-1], rtol=1e-5, atol=1e-5)
    depth = 500
    end = np.array([2 * depth if row % 2 == 0 else row + 1 for row in range(2 * depth)])
    given = inputs("mamba", 2 * depth)
    parents = [row - 1 if row % 2 else row - 2 for row in range(2 * depth)]
    parents[0] = -1
    torch.testing.assert_close(tree_recurrence(*given, plan_of(end))[0], by_token(given, parents, 1.0))


def test_no_state_is_saved_for_the_backward_pass() -> None:
    rows = 512
    given = [x.requires_grad_() for x in inputs("delta", rows, torch.float32)]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        tree_recurrence(*given, plan_of([rows] * rows))
    assert set(kept) == {x.data_ptr() for x in given}


def test_wrong_arguments_are_named() -> None:
    given, plan = inputs("delta", 10), plan_of([10] * 10)
    with pytest.raises(ValueError, match="the plan is for 9 rows"):
        tree_recurrence(*given, plan_of([9] * 9))
    with pytest.raises(ValueError, match=r"decay must be \[10, 4\]"):
        tree_recurrence(*given[:3], given[3][:, :2], given[4], plan)
    with pytest.raises(ValueError, match="the plan begins with 1 given states; give initial"):
        tree_recurrence(*given, RecurrencePlan.make(find_segments(np.full(10, 10)), states=1))
    elsewhere = RecurrencePlan.make(find_segments(np.full(10, 10)), device="meta")
    with pytest.raises(ValueError, match="the plan is on meta and query on cpu; make it there"):
        tree_recurrence(*given, elsewhere)
    with pytest.raises(ValueError, match="history"):
        tree_convolution(torch.zeros(10, 2), torch.zeros(2, 3), None, plan, history=torch.zeros(1, 2, 2))
