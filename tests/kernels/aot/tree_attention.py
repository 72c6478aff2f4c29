"""Forward, dQ and dK/dV of tree attention: head sizes 64 and 128 in bf16 with groups of 4 heads, and the options."""

from typing import Any

import torch

from rolltree.kernels.tree_attention.blocks import LARGEST, padded_width, tiles_for
from rolltree.kernels.tree_attention.triton import ADDED_LINES
from rolltree.kernels.tree_attention.triton_backward import add_kernel, dkdv_kernel, dq_kernel
from rolltree.kernels.tree_attention.triton_forward import forward_kernel
from rolltree.kernels.tree_attention.visible import SPAN, list_blocks_kernel

from .harness import AotCase

FLOATS = {"scale": "fp32", "softcap": "fp32"}
LISTS = dict.fromkeys(("blocks", "full_counts", "partial_counts", "ends", "positions", "row_positions"), "*i32")
MASK = {**LISTS, "tokens": "i32", "offset": "i32", "width": "i32", "window": "i32"}
Q_STRIDES = {f"{t}_{s}": "i32:16" for t in "qkv" for s in ("stride", "head")}
ALL_STRIDES = {**Q_STRIDES, "g_stride": "i32:16", "g_head": "i32:16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(dim: int, dtype: str, *, window: bool = False, softcap: bool = False) -> list[AotCase]:
    return [case for archs in ((80,), (90,), (100,)) for case in _cases(dim, dtype, window, softcap, archs)]


def _cases(dim: int, dtype: str, window: bool, softcap: bool, archs: tuple[int, ...]) -> list[AotCase]:
    tiles = tiles_for(dim, DTYPES[dtype], major=archs[0] // 10, softcap=softcap)
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
    forward = {**tensors, "out": f"*{dtype}", "lse": "*fp32", "order": "*i32", **MASK, **Q_STRIDES, **FLOATS}
    backward = {**tensors, "grad_out": f"*{dtype}", "row_sums": "*fp32", **MASK, **ALL_STRIDES, **FLOATS}
    dq = {**backward, "out": f"*{dtype}", "dq": f"*{dtype}", "lse": "*fp32", "order": "*i32"}
    dkdv = {**backward, "sums": "*fp32", "items": "*i32", "slots": "i32"}
    dkdv |= dict.fromkeys(("dk_out", "dv_out"), f"*{dtype}")
    fill = {"FILL": LARGEST}
    parts = tiles.dkdv.parts
    parted = {**fill, "PARTS": parts, "DIM": dim // parts, "WIDTH": padded_width(dim) // parts}
    return [
        AotCase(
            f"tree {name} D{dim} {dtype}{option}",
            kernel,
            signature,
            {**constants, **more, "ROWS": tile.rows, "KEYS": tile.keys},
            tile.warps,
            tile.stages,
            needs_wgmma=dtype == "bf16" and tile.keys * tile.rows >= 64 * 32,
            multiply_adds=int(products * tile.rows * tile.keys * dim)
            if dim in (64, 128, 256) and dtype == "bf16"
            else None,
            # subtree_end where masked, and positions; lse and delta where dK/dV has no room to copy them by 16 bytes
            elements=(1 + window) * tile.keys if name != "dkdv" else 2 * (parts - 1) * tile.rows,
            archs=archs,
        )
        for name, kernel, signature, more, tile, products in [
            ("forward", forward_kernel, forward, {}, tiles.forward, 2),
            ("dq", dq_kernel, dq, {**fill, "PACK": tiles.dkdv.rows}, tiles.dq, 3),
            ("dkdv", dkdv_kernel, dkdv, parted, tiles.dkdv, 2 + 2 / parts),
        ]
    ]


EXTENTS = dict.fromkeys(("lows", "highs", "key_firsts", "key_lasts", "row_firsts", "row_lasts"), "*i32")
FOUND = dict.fromkeys(("blocks", "full_counts", "partial_counts"), "*i32")
SIZES = {"tokens": "i32", "offset": "i32", "window": "i32", "width": "i32"}


def list_blocks(by_key: bool, window: bool) -> AotCase:
    constants = {"ROWS": 128, "KEYS": 64, "SPAN": SPAN, "BY_KEY": by_key, "HAS_WINDOW": window}
    return AotCase(f"tree blocks {by_key} {window}", list_blocks_kernel, {**EXTENTS, **FOUND, **SIZES}, constants, 4)


def add(dim: int) -> AotCase:
    constants = {"DIM": dim, "WIDTH": padded_width(dim), "KEYS": 128, "LINES": ADDED_LINES}
    tensors = {"sums": "*fp32", "splits": "*i32", "dk_out": "*bf16", "dv_out": "*bf16"}
    return AotCase(
        f"tree add D{dim}",
        add_kernel,
        {**tensors, **dict.fromkeys(("tokens", "slots"), "i32"), "stride": "i32:16"},
        constants,
    )


CASES = [
    list_blocks(False, True),
    list_blocks(True, False),
    add(128),
    *cases(64, "bf16"),
    *cases(128, "bf16"),
    *cases(128, "bf16", window=True)[::3],  # forward: its copies fill shared memory
    *cases(128, "bf16", window=True, softcap=True),
    *cases(96, "bf16"),
    *cases(256, "bf16"),
    *cases(64, "fp32"),
]
