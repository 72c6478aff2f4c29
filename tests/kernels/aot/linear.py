"""Products of layers and heads: widths and depths of Qwen3-8B and SmolLM2, logits in fp32, an odd one with a bias,
and fp32."""

from __future__ import annotations

import torch

from rolltree.kernels.linear.triton import GROUP, linear_kernel, tile_of

from .harness import AotCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def product(width: int, depth: int, dtype: str, biased: bool = False, logits: bool = False) -> AotCase:
    tile = tile_of(width, depth, DTYPES[dtype])
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | ({"out": "*fp32"} if logits else {})
    stride = -(-width // 16) * 16 if logits else width
    given = (("N", width), ("K", depth), ("out_stride", stride))
    sizes = {"M": "i32"} | {name: "i32" if size % 16 else "i32:16" for name, size in given}
    constants = {"HAS_BIAS": biased, "EVEN": depth % tile.depth == 0, "GROUP": GROUP}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    whole = dtype == "bf16" and depth % tile.depth == 0
    return AotCase(
        f"linear {width}x{depth} {dtype}{' bias' if biased else ''}{' logits' if logits else ''}",
        linear_kernel,
        pointers | sizes,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        needs_wgmma=whole,
        multiply_adds=tile.rows * tile.columns * tile.depth if whole else None,
    )


CASES = [
    product(4096, 12288, "bf16"),
    product(151936, 4096, "bf16"),
    product(151936, 4096, "bf16", logits=True),
    product(576, 1536, "bf16", biased=True),
    product(50257, 767, "bf16", biased=True),
    product(576, 1536, "fp32"),
]
