"""Public entries of the recurrences over trees: check their arguments and run them with exact gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Arguments
from .op import Convolution, Recurrence, Rows
from .plan import RecurrencePlan


def tree_recurrence(
    query: Tensor,  # [T, G, Dk]
    key: Tensor,  # [T, G, Dk]
    value: Tensor,  # [T, H, Dv]
    decay: Tensor,  # [T, H] or [T, H, Dk]
    beta: Tensor | None,  # [T, H]
    plan: RecurrencePlan,
    *,
    initial: Tensor | None = None,  # [R, H, Dk, Dv]
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay along every path of packed trees: the gated delta rule and Mamba-2's scan.

    A segment begins with the state with which its parent ends; the gradient of that state is the sum over the children
    in the order of their rows. Saved for the backward pass are the inputs, no state.

    Args:
        query: [T, G, Dk], float32, bfloat16, float16 (computed in float32) or float64.
        key: [T, G, Dk]; value head h uses key head ``h // (H / G)``.
        value: [T, H, Dv].
        decay: logarithm of the factor of the state before each row, at most 0; [T, H, Dk] is one a channel of the key.
        beta: [T, H] strength of the delta rule; None adds values without it.
        plan: the rows' segments and chunks.
        initial: [R, H, Dk, Dv] states with which segments without a parent begin, as the plan says.
        scale: factor of the query.

    Returns:
        out [T, H, Dv] in the dtype of value, and the end states [E, H, Dk, Dv] that the plan asks for, in float32
        (float64 for float64).

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit together.
    """
    check = Arguments("tree_recurrence", "query", query)
    rows, groups, width = check.floats("query", query, ("T", "G", "Dk")).shape
    check.floats("key", key, query.shape, " like query")
    heads = check.floats("value", value, (rows, "H", "Dv"), " like query").shape[1]
    check.require(
        groups > 0 and heads % groups == 0, lambda: f"the {heads} value heads must be a multiple of {groups} key heads"
    )
    shape = (rows, heads, width) if isinstance(decay, Tensor) and decay.dim() == 3 else (rows, heads)
    check.floats("decay", decay, shape, " like value")
    if beta is not None:
        check.floats("beta", beta, (rows, heads), " like value")
    _check_plan(check, plan, rows, "query")
    if initial is None:
        check.require(plan.states == 0, lambda: f"the plan begins with {plan.states} given states; give initial")
    else:
        of_states = (plan.states, heads, width, value.shape[-1])
        check.floats("initial", initial, of_states, ", one for each given state of the plan")
    check.number("scale", scale)
    out, ends = Recurrence.apply(query, key, value, decay, beta, initial, plan, float(scale))
    return out, ends


def tree_convolution(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    plan: RecurrencePlan,
    *,
    history: Tensor | None = None,  # [R, K - 1, D]
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution along every path: the K - 1 inputs before a row are those of its ancestors.

    Args:
        x: inputs [T, D].
        weight: [D, K], the last column for a row's own input.
        bias: [D] or None.
        plan: the rows' segments.
        history: [R, K - 1, D] the inputs before segments without a parent, oldest first, as the plan says.

    Returns:
        out [T, D], and the last K - 1 inputs [E, K - 1, D] at each end that the plan asks for, oldest first.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit together.
    """
    check = Arguments("tree_convolution", "x", x)
    rows, width = check.floats("x", x, ("T", "D")).shape
    taps = check.floats("weight", weight, (width, "K"), " like x", (x.dtype,)).shape[1]
    check.require(taps > 0, "weight must have a column for a row's own input")
    if bias is not None:
        check.floats("bias", bias, (width,), " like x", (x.dtype,))
    _check_plan(check, plan, rows, "x")
    windows = plan.windows(taps)
    before = []
    if history is None:
        check.require(plan.states == 0, lambda: f"the plan begins with {plan.states} given states; give history")
    else:
        before.append(check.floats("history", history, (plan.states, taps - 1, width), "", (x.dtype,)).flatten(0, 1))
    extended = torch.cat([x, *before, x.new_zeros(1, width)])
    out = Convolution.apply(extended, weight, bias, windows)
    return out, Rows.apply(extended, windows.last.flatten()).view(*windows.last.shape, width)


def _check_plan(check: Arguments, plan: RecurrencePlan, rows: int, name: str) -> None:
    check.require(plan.num_rows == rows, lambda: f"the plan is for {plan.num_rows} rows, and {name} has {rows}")
    where = plan.place.device
    check.require(where == check.device, f"the plan is on {where} and {name} on {check.device}; make it there")
