"""The kernels of a decoder's layer: norms of sums, heads and slots, products with several weights, gated units."""

from __future__ import annotations

from typing import Any

from rolltree.kernels.decoder_layer import triton
from rolltree.kernels.layer_ops.triton import BLOCK
from rolltree.kernels.linear import several
from rolltree.kernels.linear.tiles import Tile, order_of, tiles_for
from rolltree.kernels.linear.triton import GROUP

from .harness import AotCase


def _dtype(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _add_norm(width: int, dtype: str = "bf16", added: bool = True, parts: int = 0) -> AotCase:
    tile = triton.tile_of_sum(width, _dtype(dtype))
    warps = tile.pop("num_warps")
    constants: dict[str, Any] = tile | {"PARTS": parts} | ({} if added else {"x": None})
    pointers = dict.fromkeys(("residual", "x", "weight", "out"), f"*{dtype}") | ({"x": "*fp32"} if parts else {})
    signature = {k: v for k, v in pointers.items() if k not in constants} | {"N": "i32", "H": "i32:16", "eps": "fp32"}
    name = f"add norm {width} {dtype}{'' if added else ' first'}{f' of {parts} parts' if parts else ''}"
    return AotCase(name, triton.add_norm_kernel, signature, constants, num_warps=warps, fp_fusion=False)


def _store(heads: int, kv_heads: int, dim: int, normed: bool, dtype: str = "bf16") -> AotCase:
    pointers = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "k_pages", "v_pages"), f"*{dtype}")
    constants: dict[str, Any] = {
        "Q_HEADS": heads, "K_HEADS": kv_heads, "DIM": dim, "WIDTH": triton.triton.next_power_of_2(dim),
        "Q_TILE": min(triton.triton.next_power_of_2(heads), triton.HEADS),
        "K_TILE": min(triton.triton.next_power_of_2(kv_heads), triton.HEADS),
    }  # fmt: skip
    constants |= {} if normed else {"q_weight": None, "k_weight": None}
    signature = {k: v for k, v in pointers.items() if k not in constants}
    signature |= {"turns": "*i32", "slots": "*i32", "eps": "fp32"}
    signature |= dict.fromkeys(("q_row", "k_row", "v_row"), "i32:16")
    name = f"store {heads}/{kv_heads} D{dim} {dtype}{' normed' if normed else ''}"
    return AotCase(name, triton.store_kernel, signature, constants, fp_fusion=False)


def _several(widths: tuple[int, int, int], depth: int, dtype: str = "bf16", biased: bool = False) -> list[AotCase]:
    tiles = tiles_for(order_of(sum(widths), depth, _dtype(dtype))._replace(parts=1), _dtype(dtype), depth)
    return [_several_in(tile, widths, depth, dtype, biased, i) for i, tile in enumerate(tiles)]


def _several_in(tile: Tile, widths: tuple[int, int, int], depth: int, dtype: str, biased: bool, place: int) -> AotCase:
    order = order_of(sum(widths), depth, _dtype(dtype))
    pointers = ("x", "weight0", "weight1", "weight2", "bias0", "bias1", "bias2", "out")
    constants = {f"N{i}": width for i, width in enumerate(widths)} | {"HAS_BIAS": biased, "GROUP": GROUP}
    constants |= {"EVEN": depth % order.block == 0, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": order.block}
    numbers = {"M": "i32", "K": "i32:16" if depth % 16 == 0 else "i32"}
    wide = dtype == "bf16" and depth % 8 == 0
    return AotCase(
        f"several {'+'.join(str(w) for w in widths if w)}x{depth} {dtype}{' biased' if biased else ''}"
        + (f" {tile.rows}x{tile.columns}" if place else ""),
        several.several_kernel,
        dict.fromkeys(pointers, f"*{dtype}") | numbers,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        needs_wgmma=wide,
        multiply_adds=tile.rows * tile.columns * order.block if wide else None,
        elements=(tile.rows + tile.columns) * order.block if wide else 0,
    )


def _gate(dtype: str = "bf16") -> AotCase:
    signature = {"both": f"*{dtype}", "out": f"*{dtype}", "N": "i32", "F": "i32:16"}
    return AotCase(f"gate {dtype}", triton.gate_kernel, signature, {"BLOCK": BLOCK}, fp_fusion=False)


CASES = [
    *(_add_norm(width) for width in (576, 1024, 4096)),
    _add_norm(1024, added=False),
    _add_norm(1024, parts=4),
    _add_norm(4096, "fp32"),
    _store(16, 8, 128, normed=True),
    _store(32, 8, 128, normed=False),
    _store(14, 2, 64, normed=False),
    _store(32, 4, 80, normed=True, dtype="fp32"),
    *_several((2048, 1024, 1024), 1024),
    *_several((3072, 3072, 0), 1024),
    *_several((896, 128, 128), 896, biased=True),
    *_several((14336, 14336, 0), 4096),
    *_several((2048, 1024, 1024), 1024, "fp32"),
    _gate(),
    _gate("fp32"),
]
