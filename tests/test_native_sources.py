"""What the native parts take from libtorch: only what its oldest supported headers have.

They are compiled here against newer headers, in which a name may be that did not exist then. TORCH_TARGET_VERSION hides
newer functions, but no macros and no files. So every name is listed; one that is added must stand in the headers of
torch 2.11 (``include/torch`` of its wheel).
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(f for f in ROOT.glob("csrc/c*/*") if f.suffix in (".cu", ".cuh", ".cpp", ".h"))
HEADERS = {
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/stable/accelerator.h",
    "torch/csrc/stable/library.h",
    "torch/csrc/stable/ops.h",
    "torch/csrc/stable/tensor.h",
    "torch/headeronly/core/ScalarType.h",
    "torch/headeronly/util/BFloat16.h",
    "torch/headeronly/util/Exception.h",
    "torch/headeronly/util/Half.h",
    "torch/headeronly/util/shim_utils.h",
}
MACROS = {
    "STABLE_TORCH_LIBRARY_FRAGMENT",
    "STABLE_TORCH_LIBRARY_IMPL",
    "STD_TORCH_CHECK",
    "TORCH_ABI_VERSION",
    "TORCH_BOX",
    "TORCH_ERROR_CODE_CHECK",
}
FUNCTIONS = {"aoti_torch_get_current_cuda_stream", "torch_call_dispatcher"}
NAMES = {
    "BFloat16",
    "Half",
    "ScalarType",
    "Tensor",
    "accelerator::DeviceGuard",
    "detail::from",
    "detail::to",
    "empty_like",
    "get_num_threads",
    "new_empty",
    "parallel_for",
}  # of torch::stable and torch::headeronly


def found(pattern: str) -> set[str]:
    return {name for file in SOURCES for name in re.findall(pattern, re.sub(r"//.*", "", file.read_text()))}


def test_headers() -> None:
    assert found(r"#include <(torch/[^>]+)>") == HEADERS
    assert not found(r"#include <((?:ATen|c10)/[^>]+)>")  # not of the stable ABI


def test_macros() -> None:
    assert found(r"\b(?:STABLE|STD_TORCH|TORCH|AT|C10|AOTI)_[A-Z_0-9]+\b") == MACROS


def test_functions() -> None:
    assert found(r"\b(?:aoti_torch|torch)_\w+") == FUNCTIONS


def test_names() -> None:
    assert found(r"\b(?:torch::)?(?:stable|headeronly)::([\w:]+)") == NAMES
