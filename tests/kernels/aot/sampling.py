"""The sampling kernels: what every row runs, and what filters add."""

from rolltree.kernels.sampling.triton import BLOCK, ROUND, finish_kernel, race_kernel, scan_kernel, select_kernel

from .harness import AotCase

BLOCKS = 64  # of a row of 151936
ROWS = {"temperature": "*fp32", "seed": "*i64", "step": "*i64"}
FILTERS = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
SIZES = {"row_stride": "i32:16", "vocab": "i32"}
SUMS = dict.fromkeys(("best", "mass", "moment", "raw"), "*fp32")
WINNERS = {"score": "*fp32", "chosen": "*i32", "least": "*fp32", "last": "*i32"}
OUTPUTS = {"token": "*i64", "logprob": "*fp32", "raw_logprob": "*fp32", "entropy": "*fp32", "last_kept": "*i64"}
CUT = {"cut": "*fp32", "cut_index": "*i32"}


def scan(dtype: str, race: bool) -> AotCase:
    signature = {"logits": f"*{dtype}", **ROWS, **SUMS, **WINNERS, **SIZES}
    return AotCase(
        f"sample scan {dtype}{' race' if race else ''}", scan_kernel, signature, {"BLOCK": BLOCK, "RACE": race}
    )


def select(dtype: str) -> AotCase:
    given = {"logits": f"*{dtype}", "temperature": "*fp32", **FILTERS, "best": "*fp32", "mass": "*fp32"}
    signature = {**given, **CUT, **SIZES, "blocks": "i32"}
    return AotCase(f"sample select {dtype}", select_kernel, signature, {"BLOCKS": BLOCKS, "ROUND": ROUND}, num_warps=8)


def race(dtype: str) -> AotCase:
    given = {"logits": f"*{dtype}", **ROWS, "min_p": "*fp32", "best": "*fp32", **CUT}
    signature = {**given, "kept": "*fp32", **WINNERS, **SIZES}
    return AotCase(f"sample race {dtype}", race_kernel, signature, {"BLOCKS": BLOCKS, "BLOCK": BLOCK})


def finish(filtered: bool) -> AotCase:
    given = {"logits": "*fp32", "temperature": "*fp32", **SUMS, **WINNERS, **OUTPUTS, **SIZES, "blocks": "i32"}
    constants = {"BLOCKS": BLOCKS, "ROUND": ROUND}
    if filtered:
        given |= {"top_p": "*fp32", "min_p": "*fp32", "kept": "*fp32"}
    else:
        constants |= dict.fromkeys(("top_p", "min_p", "kept"))
    return AotCase(f"sample finish{' filtered' if filtered else ''}", finish_kernel, given, constants)


CASES = [
    *(scan(dtype, race) for dtype in ("bf16", "fp32") for race in (True, False)),
    *(select(dtype) for dtype in ("bf16", "fp32")),
    *(race(dtype) for dtype in ("bf16", "fp32")),
    finish(False),
    finish(True),
]
