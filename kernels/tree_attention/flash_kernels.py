"""flash-attn 4's kernels (CuTe DSL: TMA, wgmma or tcgen05, specialised warps) under a tree's mask.

Imported only where flash-attn 4 is installed. Compiled once for each head size, dtype, group, softcap, and whether
there is a prefix or a window; T and N are run-time values. Compiled kernels are kept on disk (`kernel_cache`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from torch import Tensor

from .. import kernel_cache
from . import flash_lists
from .blocks import Tile
from .flash_lists import BlockLists

kernel_cache.use_for_flash()  # before its import: it reads its settings once

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from flash_attn.cute import interface, utils  # noqa: E402
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: E402

LOG2E = 1.4426950408889634
_SOURCE = hashlib.sha256(Path(__file__).read_bytes() + Path(flash_lists.__file__).read_bytes()).hexdigest()


def _load(tensor, index):
    return utils.scalar_to_ssa(tensor[utils.ssa_to_scalar(index)], cutlass.Int32)


@functools.cache
def mask_of(prefix: bool, window: bool):
    """Return `flash_lists.sees` as a mask function of flash-attn for the elements of a partial block."""

    @cute.jit
    def tree_mask(batch, head, row, key, lengths, tensors):
        return flash_lists.sees(row, key, tensors[0], tensors[1:], _load, prefix=prefix, window=window)

    return _named(tree_mask, prefix, window)


@functools.cache
def softcap_of(softcap: float):
    """Return softcap tanh(scores / softcap) and its derivative times the gradient, as functions of flash-attn.

    tanh is exact to 1e-7; flash-attn's own is an approximation to 5e-4, which the softcap multiplies.
    """

    def bent(scores):  # 1 - 2 / (e^(2 x) + 1); a division would cost more than all the rest
        root = cute.math.rsqrt(cute.math.exp2(scores * (2.0 * LOG2E / softcap), fastmath=True) + 1.0, fastmath=True)
        return 1.0 - 2.0 * root * root

    @cute.jit
    def capped(scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return bent(scores) * softcap

    @cute.jit
    def slope(grad, scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        tanh = bent(scores)
        return grad * (1.0 - tanh * tanh)

    return _named(capped, softcap), _named(slope, softcap)


def _named(function, *captured):
    """Set the name under which flash-attn keeps its compiled kernels: everything that the function is made from."""
    function.__cute_hash__ = f"{function.__name__} {captured} {_SOURCE}"
    return function


def forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    blocks: BlockLists,
    tile: Tile,
    mask: tuple[Tensor, ...],
    scale: float,
    window: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, Hq, D] and the log-sum-exp [Hq, T] fp32."""
    out, lse, *_ = interface._flash_attn_fwd(
        *(x.unsqueeze(0) for x in (q, k, v)),
        softmax_scale=scale,
        score_mod=None if softcap is None else softcap_of(softcap)[0],
        pack_gqa=False,
        return_lse=True,
        **_masked(blocks, tile, mask, window),
    )
    return out.squeeze(0), lse.squeeze(0)


def backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T] fp32
    blocks: BlockLists,  # by key
    tile: Tile,
    mask: tuple[Tensor, ...],
    scale: float,
    window: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous.

    The gradient of q, and with groups those of k and v, are added up in no fixed order.
    """
    capped, slope = (None, None) if softcap is None else softcap_of(softcap)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    interface._flash_attn_bwd(
        *(x.unsqueeze(0) for x in (q, k, v, out, grad_out, lse)),
        softmax_scale=scale,
        score_mod=capped,
        score_mod_bwd=slope,
        **{name: x.unsqueeze(0) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))},
        **_masked(blocks, tile, mask, window),
    )
    return dq, dk, dv


def _masked(blocks: BlockLists, tile: Tile, mask: tuple[Tensor, ...], window: bool) -> dict:
    prefix = len(mask) == 2 + 2 * window
    return {
        "mask_mod": mask_of(prefix, window),
        "aux_tensors": list(mask),
        "block_sparse_tensors": BlockSparseTensorsTorch(*blocks, block_size=(tile.rows, tile.keys)),
    }
