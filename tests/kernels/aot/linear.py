"""Products of layers and heads: widths and depths of Qwen3-8B, Qwen3-0.6B and SmolLM2, logits in fp32, an odd one with
a bias, and fp32; each in all tiles of its weight."""

from __future__ import annotations

import torch

from rolltree.kernels.linear.tiles import Tile, order_of, tiles_for
from rolltree.kernels.linear.triton import ADDED, GROUP, add_kernel, linear_kernel

from .harness import AotCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def products(width: int, depth: int, dtype: str, biased: bool = False, logits: bool = False) -> list[AotCase]:
    tiles = tiles_for(order_of(width, depth, DTYPES[dtype]), DTYPES[dtype], depth)
    return [_product(width, depth, dtype, biased, logits, tile, i) for i, tile in enumerate(tiles)]


def _product(width: int, depth: int, dtype: str, biased: bool, logits: bool, tile: Tile, place: int) -> AotCase:
    order = order_of(width, depth, DTYPES[dtype])
    wide = logits or tile.apart
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | ({"out": "*fp32"} if wide else {})
    stride = -(-width // 16) * 16 if logits else width
    numbers = (("N", width), ("K", depth), ("out_stride", stride), ("part", 16 * order.block))
    sizes = {"M": "i32"} | {name: "i32" if size % 16 else "i32:16" for name, size in numbers}
    even = depth % order.block == 0
    constants = {"HAS_BIAS": biased and not tile.apart, "EVEN": even, "PARTS": order.parts, "APART": tile.apart}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": order.block, "GROUP": GROUP}
    options = f"{' bias' if biased else ''}{' logits' if logits else ''}"
    of = f" {tile.rows}x{tile.columns}" if place else ""
    return AotCase(
        f"linear {width}x{depth} {dtype}{options}{of}",
        linear_kernel,
        pointers | sizes,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        needs_wgmma=dtype == "bf16" and even,
        multiply_adds=tile.rows * tile.columns * order.block if dtype == "bf16" and even else None,
    )


def added(biased: bool) -> AotCase:
    pointers = {"sums": "*fp32", "bias": "*bf16", "out": "*bf16"}
    sizes = {"M": "i32", "N": "i32:16", "out_stride": "i32:16"}
    constants = {"HAS_BIAS": biased, "PARTS": 4, "BLOCK": ADDED}
    return AotCase(f"linear parts{' bias' if biased else ''}", add_kernel, pointers | sizes, constants)


CASES = [
    *products(4096, 12288, "bf16"),
    *products(151936, 4096, "bf16"),
    *products(151936, 4096, "bf16", logits=True),
    *products(1024, 3072, "bf16"),
    *products(576, 1536, "bf16", biased=True),
    *products(50257, 767, "bf16", biased=True),
    *products(576, 1536, "fp32"),
    added(biased=True),
    added(biased=False),
]
