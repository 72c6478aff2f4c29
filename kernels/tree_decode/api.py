"""Public entry of tree decode attention, and its custom op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments
from ..tree_attention.api import check_sink
from ..tree_attention.op import with_sink
from . import reference
from .plan import DecodePlan
from .schedule import Nodes, Work

_compiled = dispatch.compiled_op("cpu", "tree_decode")


def _cpu(q: Tensor, k_pages: Tensor, v_pages: Tensor, nodes: Nodes, work: Work, *scoring: Any) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_decode` in csrc/cpu/attention/tree_decode.cpp, which walks the nodes without items."""
    result: tuple[Tensor, Tensor] = _compiled(q, k_pages, v_pages, nodes, *scoring)
    return result


_BACKENDS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "invariant": dispatch.imported(__package__, "invariant", "tree_decode"),
    "triton": dispatch.imported(__package__, "triton", "tree_decode"),
    "cpu": _cpu,
    "reference": reference.tree_decode,
}


def _decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    page_indptr: Tensor,  # [K + 1] int32
    page_ids: Tensor,  # [*] int32
    node_offset: Tensor,  # [K] int32
    node_length: Tensor,  # [K] int32
    node_position: Tensor,  # [K] int32
    row_begin: Tensor,  # [K] int32
    row_end: Tensor,  # [K] int32
    query_position: Tensor,  # [N] int32
    partial_begin: Tensor | None,  # [N + 1] int32
    items: Tensor | None,  # [1 + I, FIELDS] int32
    partials: int,
    parent: Tensor | None,  # [K] int32
    slots: Tensor | None,  # [I CHUNK] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return out [N, Hq, D] and the log-sum-exp [N, Hq], both contiguous. For generation only: it has no gradient."""
    nodes = Nodes(
        page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position
    )  # fmt: skip
    # Only the reference has float64; it exists for checks.
    if q.dtype == torch.float64:
        run = _BACKENDS["reference"]
    else:
        run = dispatch.choose("tree_decode_attention", _BACKENDS, q.device)
    return run(q, k_pages, v_pages, nodes, Work(partial_begin, items, partials, parent, slots), scale, window, softcap)


tree_decode_op = torch.library.custom_op("rolltree::tree_decode_attention", _decode, mutates_args=())


@tree_decode_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype)


def tree_decode_attention(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    plan: DecodePlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,  # [Hq]
) -> tuple[Tensor, Tensor]:
    """Compute attention of query rows over the paged keys and values of their paths; shared nodes are read once.

    Row i sees key x of node n iff ``row_begin[n] <= i < row_end[n]`` and ``position(x) <= query_position[i]``. So one
    call serves decoding rows and prefill chunks (several consecutive rows of one sequence) alike; the keys and values
    of the rows' own tokens are already in the pages. A row's result does not depend on the other rows. It has no
    gradient.

    Args:
        q: queries [N, Hq, D], float32, bfloat16 or float16 (float64 runs on the reference), last dimension contiguous.
        k_pages: keys [P, page, Hkv, D] in q's dtype; Hkv a divisor of Hq.
        v_pages: values [P, page, Hkv, D], of the strides of the keys.
        plan: nodes and rows. A plan made on a GPU is not checked; others were checked when they were made.
        scale: factor of the scores; ``D ** -0.5`` if None.
        window: keys with ``query_position[i] - position(x) >= window`` are hidden too.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sink: [Hq] float, a logit per query head that takes part in the softmax and adds nothing to the output.

    Returns:
        out [N, Hq, D] in q's dtype, and the natural log-sum-exp of the scores and the sink [N, Hq] in float32. A row
        that sees no key gives 0 and -inf, without a sink.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit together.
    """
    check = Arguments("tree_decode_attention", "q", q)
    _check(check, q, k_pages, v_pages, plan)
    check.window(window)
    check.softcap(softcap)
    check_sink(check, sink, q.shape[1])
    scale = float(q.shape[-1] ** -0.5 if scale is None else check.number("scale", scale))
    # Outside of a compiler the op's own function is called: the dispatcher takes longer than a small step.
    op: Callable[..., tuple[Tensor, Tensor]] = tree_decode_op if torch.compiler.is_compiling() else _decode
    work = plan.work(q.shape[1] // k_pages.shape[2])
    with torch.no_grad():
        out, lse = op(q, k_pages, v_pages, *plan.tensors().values(), *work, scale, window, softcap)
        if sink is None:
            return out, lse
        factor, lse = with_sink(lse, sink)
        return (out * factor[..., None]).to(out.dtype), lse


def _check(check: Arguments, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: DecodePlan) -> None:
    N, heads, D = check.floats("q", q, ("N", "Hq", "D")).shape
    pages, page, kv_heads, _ = check.floats("k_pages", k_pages, ("P", "page", "Hkv", D), " like q", (q.dtype,)).shape
    check.floats("v_pages", v_pages, k_pages.shape, " like k_pages", (q.dtype,))
    check.require(
        kv_heads > 0 and heads % max(kv_heads, 1) == 0,
        lambda: f"the query heads must be a multiple of the key heads, not {heads} and {kv_heads}",
    )
    check_plan(check, plan, N, pages, page)
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        check.last_contiguous(name, x)


def check_plan(check: Arguments, plan: DecodePlan, rows: int, pages: int, page: int) -> None:
    """Check that ``plan`` is for ``rows`` rows, and reads at most ``pages`` pages of ``page`` keys."""
    if not isinstance(plan, DecodePlan):
        check.wrong_type("plan", "a DecodePlan", plan)
    positions = plan.query_position.numel()
    if positions != rows:  # not in one call: a compiler traces no message with numbers
        check.require(False, f"the plan has {positions} query positions, q has {rows} rows; plan this step")
    check.tensor("the plan", plan.page_ids)
    if plan.extent is not None and not (plan.extent[0] <= pages and plan.extent[1] <= page):
        check.require(
            False,
            f"the plan reads {plan.extent[0]} pages of at least {plan.extent[1]} keys, there are {pages} of {page}; "
            "plan with these pages",
        )
