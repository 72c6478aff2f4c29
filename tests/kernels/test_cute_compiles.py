"""The head's products on quack's GEMMs, compiled for GPUs that are not there, and their machine code: `make hopper`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rolltree.kernels.linear_logprob.exponentials import TILES

from . import blackwell_figures, cute_figures
from .aot import harness
from .hopper_builds import Hopper, vocabulary

pytest.importorskip("quack", reason="quack is not installed: `make hopper`")
pytestmark = pytest.mark.hopper

LAUNCH = """
import ctypes, json, sys
import cutlass, torch, tvm_ffi

class Absent:
    def __init__(self, device=0): ...
    def get_max_active_clusters(self, cluster_size): return 132 // cluster_size

cutlass.utils.HardwareInfo = Absent
import quack.gemm_runtime.host as host
from rolltree.kernels.linear_logprob import cute_kernels
from rolltree.kernels.linear_logprob.exponentials import Exponentials

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

class Elsewhere:  # a tensor of the host that says it is a GPU's
    def __init__(self, tensor):
        self.capsule = torch.utils.dlpack.to_dlpack(tensor)
        ctypes.c_int32.from_address(pointer(self.capsule, b"dltensor") + 8).value = 2
    def __dlpack__(self, **_): return self.capsule
    def __dlpack_device__(self): return 2, 0

def away(x):
    if isinstance(x, torch.Tensor):
        return tvm_ffi.from_dlpack(Elsewhere(x))
    if isinstance(x, tuple):
        return type(x)(*map(away, x)) if hasattr(x, "_fields") else tuple(map(away, x))
    return x

def launch(plan, *arguments):
    for given in (arguments, [away(x) for x in arguments]):
        try:
            plan.compiled_fn(*given)
        except Exception as error:
            print(json.dumps(str(error)))

host.launch_gemm, cute_kernels.apply_entropy = launch, lambda *_: None  # which is Triton's
V = int(sys.argv[1])
for H, rows in ((64, 256), (4096, 300)):
    hidden, weight = torch.zeros(rows + 5, H).bfloat16()[5:], torch.zeros(V, H).bfloat16()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty(V, H)
    Exponentials(cute_kernels, weight, rows, store=False).form(hidden, torch.ones(rows), torch.arange(rows))
    tile = Exponentials(cute_kernels, weight, 400, store=True)
    tile.form(hidden, torch.ones(()).expand(rows), torch.arange(rows))
    for of_entropy in (None, torch.ones(rows)):
        tile.gradient(torch.ones(rows), of_entropy)
        tile.to_hidden(d_hidden)
        tile.to_weight(d_weight, add=False)
        tile.to_weight(d_weight, add=True)
"""
STEPS = ["exponentials", "scores", "gradients", "gradients with an entropy", "another size"]
GRADIENTS = {"to_hidden", "to_weight", "to_weight adding"}


@pytest.mark.parametrize("arch", ["90a", "100a"])
def test_products_compile_once_for_all_sizes(hopper: Hopper, arch: str) -> None:
    """The first product once a tile, with exponentials and without; the others, one of which adds, once for all, on
    Hopper with scaled operands and without."""
    counts = {tile: hopper.first[f"{arch}-tile-{tile}"] for tile in TILES}
    assert all(list(steps) == [f"head, cute, {step}" for step in STEPS] for steps in counts.values())
    others = [[3, 3] if arch == "90a" else [3, 0], [0, 0], [0, 0]]
    assert [list(steps.values()) for steps in counts.values()] == [[1, 1, *of_tile, 0] for of_tile in others]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_launches_are_taken_up_to_the_driver(hopper: Hopper, arch: str) -> None:
    """The compiled kernels check shapes, dtypes, strides, alignment and devices of what they are given; then they ask
    CUDA, which has no GPU here. Tensors of the host are refused, so the checks do come first."""
    environment = os.environ | {"ROLLTREE_CACHE_DIR": str(hopper.cache), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"QUACK_ARCH": arch, "CUTE_DSL_ARCH": arch}
    command = [sys.executable, "-c", LAUNCH, str(vocabulary(TILES[0]))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(said) == 2 * 2 * 8
    for refused, taken in zip(said[::2], said[1::2], strict=True):
        assert refused.startswith("Mismatched Tensor")
        assert "expected device_type=cuda" in refused
        assert "Cuda Runtime Error" in taken


@pytest.mark.parametrize("tile", TILES)
def test_machine_code(hopper: Hopper, tile: int) -> None:
    """wgmma in every main loop, where nothing is spilled, and nothing in an epilogue but the one of most accumulators a
    thread, 192, beside exponentials; and no worse than what is written down."""
    kernels = cute_figures.read(hopper.code, 9, tile)
    gradients = GRADIENTS | {f"{name} plain" for name in GRADIENTS} if tile == TILES[0] else set()
    assert set(kernels) == {*cute_figures.FIRST} | gradients
    written = {row["case"]: harness.AotResult.of(row) for row in cute_figures.written()}
    for name, kernel in kernels.items():
        found = cute_figures.figures(name, tile, kernel)
        assert found.registers <= 168  # of the 64 K for three warp groups
        assert found.stack <= (written[found.case].stack if (name, tile) == ("exponentials", 192) else 0)
        assert found.wgmma
        assert not any(loop.local for loop in found.loops)
        assert all(loop.tensor_clocks == loop.useful_clocks for loop in found.loops)
        assert harness.worse(found, written[found.case]) == []


@pytest.mark.parametrize("tile", TILES)
def test_machine_code_of_blackwell(hopper: Hopper, tile: int) -> None:
    """tcgen05 and nothing older, nothing spilled beside it; and no worse than what is written down."""
    kernels = cute_figures.read(hopper.code, 10, tile)
    assert set(kernels) == {*cute_figures.FIRST} | (GRADIENTS if tile == TILES[0] else set())
    for name, kernel in kernels.items():
        blackwell_figures.check(cute_figures.case_of(name, tile), kernel)
