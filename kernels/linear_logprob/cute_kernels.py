"""The products of `exponentials` on quack's GEMMs for Hopper and Blackwell (CuTe DSL: TMA, wgmma or tcgen05,
specialised warps).

Imported only where quack is installed. The first product's epilogue passes twice over the accumulators in registers or
tensor memory: for the largest of each row, then for exponentials, their sums and the target. On Hopper the two others
load ``e`` into registers, scale it there and multiply it from there; quack's GEMM for Blackwell has no transform of an
operand, so there ``e`` has been scaled before (`scale_operands`), as everywhere with an entropy. The weight's gradient
is added up in fp32 by the copy engine, by one CTA an element and chunk, so the order of its sum is that of the chunks.
The first is compiled once for each tile of `exponentials.TILES`, with and without ``e``, the others once, on Hopper
with a scale and without: rows and columns are run-time values. Kept on disk (`kernel_cache`).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernel_cache

kernel_cache.use_for_quack()  # before its import: it reads its settings once

import cutlass.cute as cute  # noqa: E402
from quack.cute_dsl_utils import get_device_capacity  # noqa: E402
from quack.epilogue.frontend import gemm_epilogue  # noqa: E402
from quack.epilogue.math import F2, pexp2  # noqa: E402
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect  # noqa: E402
from quack.epilogue.scaled_exp import MaxLog2  # noqa: E402
from quack.operand_transform import a_transform, transform_a_operand  # noqa: E402

from .entropy_factor import apply_entropy as apply_entropy  # noqa: E402
from .exponentials import PINGPONG, ROWS  # noqa: E402

LOG2E = 1.4426950408889634
MOST = 2.0  # above every exponential, as k is the rounded largest: what is not finite is stored as this
TILE_K = 64
HOPPER = 9
MOST_REGISTERS = (("num_regs_load", 24), ("num_regs_mma", 240))
"""Of a thread that copies, and of one that multiplies: on Hopper quack's own for GEMMs that need many."""

_largest = MaxLog2("largest")  # a row's over the tile, times log2 e, rounded to an integer
_target = ColVecLoad("target")


def _to_largest(acc, inverse):
    return {"largest": acc * inverse}


@gemm_epilogue(
    ops={"largest": _largest, "inverse": ColVecLoad("inverse")},
    prepass=_to_largest,
    prepass_outs=("largest",),
    reduces={"total": ColVecReduce("total"), "weighted": ColVecReduce("weighted", scaled=True)},
    outs={"at_target": ColVecSelect("at_target", idx_op=_target)},
    extra_ops=(_largest.out("exponent"), _target),
)
def _exponentials(acc, largest, inverse):
    z = acc * inverse
    d = z.fma(LOG2E, -largest) if isinstance(z, F2) else z * LOG2E - largest  # one FMA
    e = pexp2(d)
    return {"D": _finite(e), "total": e, "weighted": (e, d), "at_target": d}


def _finite(e):
    return F2(*map(_finite, e)) if isinstance(e, F2) else cute.arch.fmin(e, MOST)  # Blackwell takes them by pairs


@a_transform(vec_size=8, args={"scale": "colvec_ktile"})
def _rows_scaled(e, scale):
    return e * scale


@a_transform(vec_size=8, args={"scale": "kvec_m64"})
def _columns_scaled(e, scale):
    return e * scale


@gemm_epilogue(ops={"v": ColVecLoad("v")})
def _times_v(acc, v):
    return {"D": acc * v}


@gemm_epilogue()
def _product(acc):
    return {"D": acc}


def scale_operands(device: torch.device) -> bool:
    """See `exponentials.Products`."""
    return get_device_capacity(device)[0] == HOPPER


def exponentials(
    x: Tensor,  # [C, H]
    weight: Tensor,  # [V, H]
    inverse: Tensor,  # [C]
    target: Tensor,  # [C]
    tile: int,
    e: Tensor | None,  # [C, V]
    exponent: Tensor,  # [C, V / tile]
    total: Tensor,  # [C, V / tile]
    weighted: Tensor,  # [C, V / tile]
    at_target: Tensor,  # [C]
) -> None:
    """See `exponentials.Products`."""
    in_turns = tile <= PINGPONG and scale_operands(x.device)
    _exponentials.gemm(
        x,
        weight,
        e,
        epi_args={
            "largest": tile,
            "inverse": inverse.unsqueeze(0),
            "exponent": exponent,
            "total": total,
            "weighted": weighted,
            "target": target,
            "at_target": at_target,
        },
        tile_N=tile,
        **_by_rows(x.device),
        pingpong=in_turns,
        post_init_attrs=MOST_REGISTERS if in_turns and tile == PINGPONG and e is not None else (),
    )


def to_hidden(
    e: Tensor,  # [C, V]
    scale: Tensor | None,  # [V / 64, C]
    weight: Tensor,  # [V, H]
    v: Tensor,  # [C]
    out: Tensor,  # [C, H]
) -> None:
    """See `exponentials.Products`."""
    _times_v.gemm(
        e if scale is None else transform_a_operand(_rows_scaled, e, {"scale": scale}, ROWS, TILE_K),
        weight.mT,
        out,
        epi_args={"v": v.unsqueeze(0)},
        transform_a=None if scale is None else _rows_scaled,
        tile_N=256,
        tile_K=TILE_K,
        **_by_rows(e.device),
    )


def to_weight(
    e: Tensor,  # [C, V]
    scale: Tensor | None,  # [V / 64, C]
    x: Tensor,  # [C, H]
    out: Tensor,  # [V, H]
    add: bool,
) -> None:
    """See `exponentials.Products`."""
    tiles = _by_rows(e.device) if scale is None else {"tile_M": ROWS, "cluster_M": 1, "cluster_N": 2}
    _product.gemm(
        e.mT if scale is None else transform_a_operand(_columns_scaled, e.mT, {"scale": scale}, ROWS, TILE_K),
        x.mT,
        out,
        epi_args={},
        transform_a=None if scale is None else _columns_scaled,
        add_to_output=add,
        tile_N=256,
        tile_K=TILE_K,
        **tiles,
    )


def _by_rows(device: torch.device) -> dict[str, int]:
    """Clusters of two CTAs that share columns; on Blackwell they multiply one tile, and ask for the next."""
    if scale_operands(device):
        return {"tile_M": ROWS, "cluster_M": 2, "cluster_N": 1}
    return {"tile_M": 2 * ROWS, "cluster_M": 2, "cluster_N": 1, "is_dynamic_persistent": True}
