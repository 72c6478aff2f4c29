"""The native parts take from libtorch only what its oldest supported headers have.

They are compiled here against newer headers, in which a name may be that did not exist then. TORCH_TARGET_VERSION hides
newer functions, but no macros and no files. So every name is listed; one that is added must stand in the headers of
torch 2.11 (``include/torch`` of its wheel).
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[1]
SOURCES = sorted(f for f in ROOT.glob("csrc/c*/**/*") if f.suffix in (".cu", ".cuh", ".cpp", ".h"))
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
    "empty",
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


@pytest.mark.aot
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for the narrowest vectors of x86")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("source", sorted(ROOT.glob("csrc/cpu/**/*.cpp")), ids=lambda file: file.stem)
def test_no_vector_is_compared_one_number_at_a_time(source: Path) -> None:
    """GCC splits the arithmetic of vectors wider than the machine's, but not what compares and selects: it says so."""
    flags = ["-std=c++20", "-march=x86-64-v2", "-Wvector-operation-performance", *(f"-I{p}" for p in include_paths())]
    command = ["g++", *flags, "-S", "-o", "/dev/null", str(source)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr
    assert "vector condition will be expanded piecewise" not in said
