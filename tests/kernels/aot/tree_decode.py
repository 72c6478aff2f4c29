"""Decode attention over pages: head sizes 64, 128 and 256 in bf16 with groups of 4 heads, the options, and fp32."""

from rolltree.kernels.tree_attention.blocks import padded_width
from rolltree.kernels.tree_attention.path_blocks import FIELDS as BLOCK_FIELDS
from rolltree.kernels.tree_attention.triton_paths import paths_kernel, values_of
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
            "PAGE": 16, "HEADS": 32, "GROUP": GROUP, "DIM": dim, "WIDTH": width, "QUERIES": queries, "KEYS": keys,
            "FIELDS": FIELDS, "HAS_WINDOW": options, "HAS_SOFTCAP": options,
        },
        warps,
        num_stages=3,
        needs_wgmma=dtype == "bf16",
        multiply_adds=2 * queries * keys * dim if dtype == "bf16" else None,
    )  # fmt: skip


def merge(dim: int) -> AotCase:
    constants = {"HEADS": 32, "SOME": 8, "DIM": dim, "WIDTH": padded_width(dim)}
    return AotCase(f"decode merge D{dim}", merge_kernel, {**PARTS, "out": "*bf16", "lse": "*fp32"}, constants)


def paths(dim: int, dtype: str, options: bool = False) -> AotCase:
    """All chunks of a path in one program."""
    tensors = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
    width, queries, values = padded_width(dim), queries_of(GROUP), values_of(dim)
    keys, warps = tile_of(width, queries, DTYPES[dtype])
    strides = dict.fromkeys(("q_stride", "q_head", "k_stride", "k_head"), "i32:16")
    lists = dict.fromkeys(("keys", "chunks", "blocks"), "*i32")
    return AotCase(
        f"decode paths D{dim} {dtype}{' window softcap' if options else ''}",
        paths_kernel,
        {**tensors, "out": f"*{dtype}", "lse": "*fp32", **lists, "rows": "i32", **strides, **FLOATS},
        {
            "HEADS": 32, "GROUP": GROUP, "DIM": dim, "WIDTH": width, "VALUES": values, "QUERIES": queries, "KEYS": keys,
            "CHUNK": CHUNK, "FIELDS": BLOCK_FIELDS, "HAS_WINDOW": options, "HAS_SOFTCAP": options,
        },
        warps,
        num_stages=3,
        needs_wgmma=dtype == "bf16",
        multiply_adds=queries * keys * (dim + values) if dtype == "bf16" else None,
    )  # fmt: skip


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
    *(paths(dim, "bf16") for dim in (64, 128, 256)),
    paths(128, "bf16", options=True),
    paths(64, "fp32"),
    slots(16),
]
