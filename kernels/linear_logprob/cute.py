"""Cute backend of `linear_logprob`'s forward: `exponentials` on quack's GEMMs, on Hopper and Blackwell.

What its kernels do not take runs on Triton and is said once: other dtypes, a bias, a softcap, an adapter, a vocabulary
that is no multiple of 128, a width that is none of 8, the sum of squared probabilities. The backward is Triton's.

Before the first result for a size of tiles is used, a small head is computed by it and by Triton's, both against the
reference in float64: one whose error is more than twice Triton's, or that fails, is not used in this process.
"""

from __future__ import annotations

import functools
import math
from typing import cast

import torch
from torch import Tensor

from ..dispatch import failed, fall_back, log_once, usable
from . import chunked, frozen, reference
from .exponentials import ROWS, Exponentials, Products, Scores, tile_of
from .head import Head, HeadGradient
from .targets import Targets

OP = "linear_logprob"
ERROR = 2.0  # times Triton's, which the kernels may have at their first use
FLOOR = {"logprob": 2e-6, "entropy": 2e-6, "d_hidden": 4e-3, "d_weight": 4e-3}
"""Or this: the roundings of fp32, and of bf16 operands."""


def kernels() -> Products:
    from . import cute_kernels  # optional dependency

    return cast(Products, cute_kernels)


def portable() -> chunked.RowKernels:
    """What runs where these kernels do not."""
    from . import triton

    return triton


def forward(
    hidden: Tensor,  # [N, H]
    head: Head,
    targets: Targets,
    temperature: Tensor,  # [N]
    softcap: float,
    want_entropy: bool,
    want_sum_p2: bool,
    frozen_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `chunked.forward`.

    The first product finds the logit of a row's first target; those of others are dot products of their own, in fp32.
    """
    reason = refusal(hidden, head, softcap)
    if reason is None and want_sum_p2:
        reason = "its kernels do not find the sum of squared probabilities"
    if reason is None and not frozen_head and chunked.kept_shape(hidden, head.weight) != (0, 0):
        reason = "logits of a vocabulary no wider than hidden are kept for the backward"
    if reason is not None:
        fall_back(OP, "cute", "triton", reason)
        given = hidden, head, targets, temperature, softcap, want_entropy, want_sum_p2, frozen_head
        return chunked.forward(portable(), *given)
    log_once(f"{OP} runs on quack's GEMMs.")
    N, V = len(hidden), len(head.weight)
    first = _first_targets(targets)
    C = chunked.chunk_rows(N, V, hidden.device)
    tile = Exponentials(kernels(), head.weight, C, store=frozen_head)
    found = [temperature.new_empty(N) for _ in Scores._fields]
    kept = torch.empty_like(hidden) if frozen_head else temperature.new_empty((0, 0))
    for c in chunked.chunks(N, C):
        scores = tile.form(hidden[c], temperature[c], first[c])
        for where, values in zip(found, scores, strict=True):
            where[c] = values
        if frozen_head:
            tile.gradient(torch.ones_like(scores.logprob))
            tile.to_hidden(kept[c])
    logprob, logsumexp, correction, entropy = found
    if not targets.one_a_row:
        logprob = _of_targets(hidden, head, targets, temperature, logprob, logsumexp, correction)
    entropy = entropy if want_entropy else temperature.new_empty(0)
    return logprob, logsumexp, correction, entropy, temperature.new_empty(0), kept


def _first_targets(targets: Targets) -> Tensor:  # [N] int64
    """Each row's first target, -1 where it has none."""
    if targets.one_a_row:
        return targets.target
    begin, end = targets.start[:-1], targets.start[1:]
    none = targets.target.new_full((1,), -1)
    return torch.cat([targets.target, none])[torch.where(begin < end, begin, len(targets.target))]


def _of_targets(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    temperature: Tensor,
    of_first: Tensor,  # [N]
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
) -> Tensor:
    """Log-probs ``[M]``: of every row's first target as found, of the others by a dot product."""
    row, M = targets.row, len(targets.target)
    V, logprob = len(head.weight), of_first.new_empty(M)
    inside = (targets.target >= 0) & (targets.target < V)
    column = targets.target.clamp(0, V - 1)
    for begin in range(0, M, frozen.TARGETS_AT_ONCE):
        some = slice(begin, begin + frozen.TARGETS_AT_ONCE)
        logit = (hidden[row[some]].float() * head.weight[column[some]].float()).sum(1)
        logprob[some] = (logit / temperature[row[some]] - logsumexp[row[some]]) - correction[row[some]]
    logprob = torch.where(inside, logprob, torch.nan)
    is_first = torch.arange(M, device=row.device) == targets.start[row]
    return torch.where(is_first, of_first[row], logprob)


def refusal(hidden: Tensor, head: Head, softcap: float, *, of_entropy: bool = False) -> str | None:
    """Why this head runs on Triton, or None; ``of_entropy``: whether gradients of an entropy will be asked for."""
    (V, H), weight = head.weight.shape, head.weight
    if hidden.dtype != torch.bfloat16:
        return f"its kernels take bfloat16, not {hidden.dtype}"
    options = {"a bias": len(head.bias), "a softcap": softcap, "an adapter": head.lora is not None}
    if given := [name for name, option in options.items() if option]:
        return f"its kernels do not take {given[0]}"
    if reason := _refusal_of_sizes(V, H):
        return reason
    tile = tile_of(V)
    assert tile is not None
    if not weight.is_contiguous() or weight.data_ptr() % 16 or hidden.data_ptr() % 16:
        return "its kernels take a contiguous weight, and tensors that begin at a multiple of 16 bytes"
    key = hidden.device, tile, of_entropy
    if key not in _checked:
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return "its first call lies within the capture of a CUDA graph"
        _checked[key] = _first_use(*key)
    return _checked[key]


def _refusal_of_sizes(V: int, H: int) -> str | None:
    if tile_of(V) is None:
        return f"its kernels take a vocabulary that is a multiple of {ROWS}, not {V}: pad the head's weight"
    return f"its kernels take a width that is a multiple of 8, not {H}" if H % 8 else None


def expected(V: int, H: int, device: torch.device) -> bool:
    """Whether a bf16 head of these sizes, without bias, softcap and adapter, will run on the kernels."""
    return usable("cute", device) and _refusal_of_sizes(V, H) is None


def rescaled(device: torch.device) -> bool:
    """Whether exponentials are scaled in a pass of their own before their products, as anywhere but on Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9


_checked: dict[tuple[object, ...], str | None] = {}
"""device, tile and whether an entropy has a gradient -> why the kernels are not used in this process, or None."""


def _first_use(device: torch.device, tile: int, of_entropy: bool) -> str | None:
    """Compares a small head with Triton's: why the kernels must not be used, or None."""
    N, H, V = 200, 72, 5 * math.lcm(tile, ROWS)  # which no other tile divides
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    hidden, weight = normal(N, H).bfloat16(), (3 * H**-0.5 * normal(V, H)).bfloat16()
    hidden[::3] *= 4  # sure ones
    a, b, temperature = normal(N), normal(N), 1 + 0.5 * normal(N).tanh()
    a[1::5] = 0
    b[1::10] = 0
    sizes = torch.arange(N + 1, device=device)
    likely = (hidden.float() @ weight.float().T).argmax(1)
    target = torch.where(sizes[:-1] % 2 == 0, likely, torch.randint(V, (N,), generator=generator).to(device))
    targets = Targets(sizes, target, None, True)

    def by_rows(rows: chunked.RowKernels | None, dtype: torch.dtype) -> list[Tensor]:
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        head = Head(weight.to(dtype), None, None, accumulator)
        given = hidden.to(dtype), head, targets, temperature.to(accumulator), 0.0
        found = (reference.forward if rows is None else functools.partial(chunked.forward, rows))(
            *given, True, False, False
        )
        need = HeadGradient(head, True, False, False)
        zero, nothing = torch.zeros_like(found[1]), found[1].new_empty(0)
        upstream = a.to(accumulator), zero, b.to(accumulator) if of_entropy else nothing, nothing
        run = reference.backward if rows is None else functools.partial(chunked.backward, rows)
        d_hidden = run(*given, *found[1:], *upstream, True, need)
        return [found[0], found[3], d_hidden, need.results()[0]]

    def by_products() -> list[Tensor]:
        both = Exponentials(kernels(), weight, ROWS, store=True)
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
        found = []
        for part in (slice(0, ROWS), slice(ROWS, N)):
            found.append(both.form(hidden[part], temperature[part], target[part]))
            both.gradient(a[part], b[part] if of_entropy else None)
            both.to_hidden(d_hidden[part])
            both.to_weight(d_weight, add=part.start > 0)
        return [torch.cat([s.logprob for s in found]), torch.cat([s.entropy for s in found]), d_hidden, d_weight]

    exact = by_rows(None, torch.float64)
    try:
        ours, twin = by_products(), by_rows(portable(), torch.bfloat16)
    except Exception as error:  # Triton goes on
        return failed("cute", error)
    for name, got, other, want in zip(FLOOR, ours, twin, exact, strict=True):
        mine, twins = (((x.double() - want).norm() / want.norm()).item() for x in (got, other))
        if not mine <= max(ERROR * twins, FLOOR[name]):
            return f"its {name} is off by {mine:.2g} at its first use, Triton's by {twins:.2g}"
    return None
