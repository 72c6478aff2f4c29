"""Forward, dQ and dK/dV of tree attention: head sizes 64 and 128 in bf16 with groups of 4 heads, and the options."""

from typing import Any

import torch

from rolltree.kernels.tree_attention.blocks import padded_width, tiles_for
from rolltree.kernels.tree_attention.triton import dkdv_kernel, dq_kernel, forward_kernel

from .harness import AotCase

FLOATS = {"scale": "fp32", "softcap": "fp32"}
LISTS = {"lists": "*i32", "full_counts": "*i32", "counts": "*i32", "list_stride": "i32"}
MASK = {"ends": "*i32", "positions": "*i32", "tokens": "i32", "window": "i32"}
Q_STRIDES = {f"{t}_{s}": "i32:16" for t in "qkv" for s in ("stride", "head")}
ALL_STRIDES = {**Q_STRIDES, "g_stride": "i32:16", "g_head": "i32:16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(dim: int, dtype: str, *, window: bool = False, softcap: bool = False) -> list[AotCase]:
    tiles = tiles_for(dim, DTYPES[dtype])
    option = (" window" if window else "") + (" softcap" if softcap else "")
    tensors = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
    constants: dict[str, Any] = {
        "HEADS": 32,
        "GROUP": 4,
        "DIM": dim,
        "WIDTH": padded_width(dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
    }
    forward = {**tensors, "out": f"*{dtype}", "lse": "*fp32", **MASK, **LISTS, **Q_STRIDES, **FLOATS}
    backward = {**tensors, "grad_out": f"*{dtype}", "lse": "*fp32", "delta": "*fp32", **MASK, **ALL_STRIDES, **FLOATS}
    dq = {**backward, "out": f"*{dtype}", "dq": f"*{dtype}", **LISTS}
    dkdv = {**backward, "dk_out": f"*{dtype}", "dv_out": f"*{dtype}", "lows": "*i32", "highs": "*i32"}
    return [
        AotCase(
            f"tree {name} D{dim} {dtype}{option}",
            kernel,
            signature,
            {**constants, "ROWS": tile.rows, "KEYS": tile.keys},
            tile.warps,
            needs_wgmma=dtype == "bf16",
        )
        for name, kernel, signature, tile in [
            ("forward", forward_kernel, forward, tiles.forward),
            ("dq", dq_kernel, dq, tiles.dq),
            ("dkdv", dkdv_kernel, dkdv, tiles.dkdv),
        ]
    ]


CASES = [
    *cases(64, "bf16"),
    *cases(128, "bf16"),
    cases(128, "bf16", window=True, softcap=True)[-1],  # the one that needs most registers
    *cases(64, "fp32"),
]
