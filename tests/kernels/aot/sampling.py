"""The sampling kernel, with every filter and with none."""

from rolltree.kernels.sampling.triton import BLOCK, sample_kernel

from .harness import AotCase

ROWS = {"temperature": "*fp32", "seed": "*i64", "step": "*i64"}
OUTPUTS = {"token": "*i64", "logprob": "*fp32", "raw_logprob": "*fp32", "entropy": "*fp32", "last_kept": "*i64"}
SIZES = {"row_stride": "i32", "vocab": "i32"}
FILTERS = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
PLAIN = {"logits": "*bf16", **ROWS, **OUTPUTS, **SIZES}

CASES = [
    AotCase("sample plain bf16", sample_kernel, PLAIN, {**dict.fromkeys(FILTERS), "BLOCK": BLOCK}, num_warps=8),
    AotCase("sample filtered bf16", sample_kernel, {**PLAIN, **FILTERS}, {"BLOCK": BLOCK}, num_warps=8),
    AotCase(
        "sample filtered fp32", sample_kernel, {**PLAIN, **FILTERS, "logits": "*fp32"}, {"BLOCK": BLOCK}, num_warps=8
    ),
]
