"""`exponentials.Products.apply_entropy` in Triton: one program for a row and some of its columns, elementwise in place.

Reads and writes 2 bytes a logit, and 8 for each row and tile of columns.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .exponentials import BLOCK

BLOCKS = 32  # of a program
SMALLEST = tl.constexpr(2.0**-126)  # so that the factor of 0 is finite


@triton.jit
def _apply(
    e,  # [C, V] bf16
    at_one,  # [C, V / TILE]
    slope,  # [C, V / TILE]
    V,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block * BLOCK < V
    tile = row * (V // TILE) + block * BLOCK // TILE
    offset = tl.load(at_one + tile, mask=inside, other=0.0)
    factor = tl.load(slope + tile, mask=inside, other=0.0)
    here = e + row * V + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(here, mask=inside[:, None], other=0.0).to(tl.float32)
    log2 = tl.log2(tl.maximum(value, SMALLEST))
    tl.store(here, (value * (offset[:, None] + factor[:, None] * log2)).to(tl.bfloat16), mask=inside[:, None])


def apply_entropy(
    e: Tensor,  # [C, V] bf16, in and out
    at_one: Tensor,  # [C, V / tile] fp32
    slope: Tensor,  # [C, V / tile] fp32
    tile: int,
) -> None:
    """See `exponentials.Products`."""
    C, V = e.shape
    _apply[C, triton.cdiv(V, BLOCK * BLOCKS)](e, at_one, slope, V, TILE=tile, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4)
