"""Decode attention over pages: head sizes 64, 128 and 256 in bf16 with groups of 4 heads, the options, and fp32."""

from rolltree.kernels.tree_attention.blocks import padded_width
from rolltree.kernels.tree_decode.invariant import slots_kernel
from rolltree.kernels.tree_decode.items import CHUNK, FIELDS, queries_of
from rolltree.kernels.tree_decode.triton import merge_kernel, partial_kernel, tile_of

from .harness import AotCase
from .tree_attention import DTYPES

INTEGERS = dict.fromkeys(("page_ids", "query_position", "partial_begin", "items"), "*i32")
STRIDES = dict.fromkeys(("q_stride", "q_head", "page_stride", "slot_stride", "head_stride"), "i32:16")
FLOATS = {"scale": "fp32", "window": "i32", "softcap": "fp32"}
PARTS = {"partial_out": "*fp32", "partial_lse": "*fp32", "partial_begin": "*i32"}
GROUP = 4


def partial(dim: int, dtype: str, options: bool = False) -> AotCase:
    tensors = dict.fromkeys(("q", "k_pages", "v_pages"), f"*{dtype}")
    width, queries = padded_width(dim), queries_of(GROUP)
    keys, warps = tile_of(width, queries, DTYPES[dtype])
    return AotCase(
        f"decode partial D{dim} {dtype}{' window softcap' if options else ''}",
        partial_kernel,
        {**tensors, "out": "*fp32", "lse": "*fp32", **INTEGERS, **STRIDES, **FLOATS},
        {
            "PAGE": 16, "HEADS": 32, "GROUP": GROUP, "DIM": dim, "WIDTH": width, "QUERIES": queries,
            "KEYS": keys, "FIELDS": FIELDS, "HAS_WINDOW": options, "HAS_SOFTCAP": options,
        },
        warps,
        num_stages=3,
        needs_wgmma=dtype == "bf16",
        multiply_adds=2 * queries * keys * dim if dtype == "bf16" else None,
    )  # fmt: skip


def merge(dim: int) -> AotCase:
    constants = {"HEADS": 32, "SOME": 8, "DIM": dim, "WIDTH": padded_width(dim)}
    return AotCase(f"decode merge D{dim}", merge_kernel, {**PARTS, "out": "*bf16", "lse": "*fp32"}, constants)


def slots(page: int) -> AotCase:
    names = ("page_indptr", "page_ids", "node_offset", "node_position", "parent", "items", "out")
    constants = {"PAGE": page, "CHUNK": CHUNK, "FIELDS": FIELDS}
    return AotCase(f"decode slots of pages of {page}", slots_kernel, dict.fromkeys(names, "*i32"), constants)


CASES = [
    *(partial(dim, "bf16") for dim in (64, 128, 256)),
    partial(128, "bf16", options=True),
    partial(64, "fp32"),
    merge(128),
    merge(256),
    slots(16),
    slots(1),
]
