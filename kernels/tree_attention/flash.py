"""Flash backend: flash-attn 4's kernels with the tree's interval as their mask, on Hopper and Blackwell.

It runs only under ``use_backend("flash")`` or ``ROLLTREE_BACKEND=flash``: its backward pass adds up dq, and with groups
dk and dv, in the order in which blocks arrive. Arguments that its kernels do not take are an error: other head sizes
and dtypes, few rows, a scale that is not positive, lists past `LIST_BYTES`, and the backward pass under
``torch.use_deterministic_algorithms``.

Before a kernel's first result is used, a small forest is computed by it and by Triton in the same dtype, both against
the reference in float64. A kernel whose error is more than twice Triton's, or that fails, is an error in this process.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from .. import machine
from ..dispatch import FLASH_PACKAGE, FLASH_VERSION, BackendError, flash_version
from ..libraries import log_once
from . import reference, triton
from .flash_lists import LIST_BYTES, TILES, FlashTiles, block_lists, list_bytes, mask_tensors
from .reference import Scoring

OP = "tree_attention"
FEWEST_ROWS = 257  # fewer fill one block, for which flash-attn compiles other kernels
ERROR = 2.0  # times Triton's, which a kernel may have at its first use
LSE_ERROR = 1e-3  # of the log-sum-exp at least; Blackwell's exponentials are polynomials to 1e-4


def _kernels() -> ModuleType:
    from . import flash_kernels  # optional dependency

    return flash_kernels


@functools.cache
def _major(device: torch.device) -> int:
    return machine.gpu_capability(device)[0]


def _tiles(q: Tensor) -> FlashTiles:
    return TILES[_major(q.device)][q.shape[2]]


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_attention_forward`, in bfloat16 or float16.

    Raises:
        BackendError: its kernels do not take these arguments.
    """
    _require_supported(q, k, scoring)
    log_once(f"{OP} runs on flash-attn 4.")
    return _forward(q, k, v, scoring)


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `reference.tree_attention_backward`, in bfloat16 or float16.

    Raises:
        BackendError: its kernels do not take these arguments, or deterministic algorithms are wanted.
    """
    _require_supported(q, k, scoring)
    if torch.are_deterministic_algorithms_enabled():
        raise BackendError(
            f"Backend 'flash' cannot run {OP}'s backward pass: deterministic algorithms are wanted, and it adds up in "
            "the order in which blocks arrive; use backend 'triton'."
        )
    return _backward(grad_out, q, k, v, out, lse, scoring)


def _require_supported(q: Tensor, k: Tensor, scoring: Scoring) -> None:
    if reason := refusal(q, k, scoring):
        raise BackendError(f"Backend 'flash' cannot run {OP}: {reason}; use backend 'triton'.")


def refusal(q: Tensor, k: Tensor, scoring: Scoring) -> str | None:
    """Return why flash-attn's kernels do not take these arguments, or None if they do."""
    dims = TILES[_major(q.device)]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {q.dtype}"
    if q.shape[2] not in dims:
        return f"its kernels take head dimensions {', '.join(map(str, dims))} under a mask here, not {q.shape[2]}"
    if len(q) < FEWEST_ROWS:
        return f"a call has fewer than {FEWEST_ROWS} rows"
    if scoring.scale <= 0:
        return "the scale is not positive"
    if (size := list_bytes(len(q), len(k), _tiles(q))) > LIST_BYTES:
        return f"the lists of blocks of {len(q)} rows and {len(k)} keys take {size} bytes, more than {LIST_BYTES}"
    window, softcap = scoring.window is not None, scoring.softcap
    options = (q.dtype, q.shape[2], q.shape[1] // k.shape[1], window, softcap, len(k) > len(q))
    if (q.device, *options) not in _checked:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return "its first call lies within the capture of a CUDA graph"
        _checked[q.device, *options] = _first_use(q.device, *options)
    return _checked[q.device, *options]


_checked: dict[tuple[object, ...], str | None] = {}
"""device and options of a kernel -> why it is not used in this process, or None."""


def _forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    subtree_end, position, scale, window, softcap = scoring
    offset, tile = len(k) - len(q), _tiles(q).forward
    blocks = block_lists(subtree_end, position, window, tile, offset, by_key=False)
    mask = mask_tensors(subtree_end, position, window, offset)
    out, lse = _kernels().forward(q, k, v, blocks, tile, mask, scale, window is not None, softcap)
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    subtree_end, position, scale, window, softcap = scoring
    offset, tile = len(k) - len(q), _tiles(q).backward
    blocks = block_lists(subtree_end, position, window, tile, offset, by_key=True)
    mask = mask_tensors(subtree_end, position, window, offset)
    dq, dk, dv = _kernels().backward(
        grad_out, q, k, v, out, lse.contiguous(), blocks, tile, mask, scale, window is not None, softcap
    )
    return dq, dk, dv


def _first_use(
    device: torch.device, dtype: torch.dtype, dim: int, group: int, window: bool, softcap: float | None, prefix: bool
) -> str | None:
    """Compare both directions with Triton's on a small forest; return why they must not be used, or None."""
    rows, offset = 600, 100 if prefix else 0
    keys = offset + rows
    ends = torch.full((keys,), keys, dtype=torch.int32)  # a trunk, three branches, one of them forked, and a tree
    for first, end in ((80, 260), (260, 430), (300, 350), (430, 560), (560, keys)):
        ends[first:end] = end
    ends[:80] = 560
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 2 * group, dim), *[(keys, 2, dim)] * 2, (rows, 2 * group, dim)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    # any positions are a window: these let it cut paths in the middle of blocks
    position = torch.arange(keys, dtype=torch.int32, device=device) if window else None
    scoring = Scoring(ends.to(device), position, dim**-0.5, 150 if window else None, softcap)

    def both(run: tuple, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        forward, backward = run
        out, lse = forward(q, k, v, scoring)
        return [out, lse, *backward(grad, q, k, v, out, lse, scoring)]

    portable = triton.tree_attention_forward, triton.tree_attention_backward
    definition = reference.tree_attention_forward, reference.tree_attention_backward
    exact = both(definition, *(x.double() for x in (q, k, v, grad)))
    try:
        ours, twin = both((_forward, _backward), q, k, v, grad), both(portable, q, k, v, grad)
    except Exception as error:  # of another project's kernels, whatever it is
        return _failure(error)
    for name, got, other, want in zip(("out", "lse", "dq", "dk", "dv"), ours, twin, exact, strict=True):
        flash_error, twins = (((x.double() - want).norm() / want.norm()).item() for x in (got, other))
        if not flash_error <= max(ERROR * twins, LSE_ERROR if name == "lse" else 0.0):
            return f"its {name} is off by {flash_error:.2g} at its first use, Triton's by {twins:.2g}"
    return None


def _failure(error: Exception) -> str:
    """Return a sentence about ``error`` at the kernels' first use, with the package's version if it is another."""
    version = flash_version()
    other = f", and {FLASH_PACKAGE} is {version}, not {FLASH_VERSION}" if version != FLASH_VERSION else ""
    first_line = (str(error).splitlines() or [""])[0][:200]
    return f"its kernels fail at their first use ({type(error).__name__}: {first_line}){other}"
