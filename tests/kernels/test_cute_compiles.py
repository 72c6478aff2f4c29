"""The head's products on quack's GEMMs, compiled for a Hopper that is not there, and their machine code: `make hopper`.

One process a vocabulary, as CuTe DSL compiles for one GPU in a process; all share a cache.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolltree.kernels.linear_logprob.exponentials import ROWS, TILES

from . import cute_figures
from .aot import harness

pytest.importorskip("quack", reason="quack is not installed: `make hopper`")
pytestmark = pytest.mark.hopper

BUILD = """
import json, pathlib, sys
from rolltree.kernels import ahead
model = ahead.Model(heads=8, kv_heads=4, head_dim=1, vocab=int(sys.argv[1]))  # flash-attn has nothing for this head
for built in ahead.build_hopper(ahead.TARGETS["90a"], model):
    print(json.dumps(built._asdict()))
    for file in pathlib.Path(sys.argv[2]).glob("*.cubin"):  # the next step may write another kernel of this name
        file.rename(pathlib.Path(sys.argv[2], "read", built.name.rpartition(" ")[2] + file.name[-150:]))
"""
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

host.launch_gemm = launch
V = int(sys.argv[1])
for H, rows in ((64, 256), (4096, 300)):
    hidden, weight = torch.zeros(rows + 5, H).bfloat16()[5:], torch.zeros(V, H).bfloat16()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty(V, H)
    Exponentials(cute_kernels, weight, rows, store=False).form(hidden, torch.ones(rows), torch.arange(rows))
    tile = Exponentials(cute_kernels, weight, 400, store=True)
    tile.form(hidden, torch.ones(()).expand(rows), torch.arange(rows))
    tile.gradient(torch.ones(rows))
    tile.to_hidden(d_hidden)
    tile.to_weight(d_weight, add=False)
    tile.to_weight(d_weight, add=True)
"""
STEPS = ["exponentials", "scores", "gradients", "another size"]


def run(program: str, root: Path, tile: int, *arguments: str, **environment: str) -> list[Any]:
    """What ``program`` prints, given a vocabulary of this tile; its kernels are kept below ``root``."""
    environment = os.environ | {"ROLLTREE_CACHE_DIR": str(root / "cache")} | environment
    command = [sys.executable, "-c", program, str(5 * math.lcm(tile, ROWS)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", '"'))]


def build(root: Path, tile: int) -> tuple[list[int], Path]:
    """Kernels that each of `STEPS` compiled for a vocabulary of this tile, and the folder of their machine code."""
    dump = root / f"tile-{tile}"
    (dump / "read").mkdir(parents=True, exist_ok=True)
    rows = run(BUILD, root, tile, str(dump), CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=str(dump))
    assert [row["name"] for row in rows] == [f"head, cute, {step}" for step in STEPS]
    return [row["compiled"] for row in rows], dump / "read"


@functools.cache
def built(root: Path) -> dict[int, tuple[list[int], Path]]:
    return {tile: build(root, tile) for tile in TILES}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("head")


def test_products_compile_once_for_all_sizes(root: Path) -> None:
    """The first product once a tile, with exponentials and without; the others, one of which adds, once for all."""
    counts = [compiled for compiled, _ in built(root).values()]
    assert counts == [[1, 1, 3, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    again, _ = build(root, TILES[0])
    assert again == [0, 0, 0, 0]


def test_launches_are_taken_up_to_the_driver(root: Path) -> None:
    """The compiled kernels check shapes, dtypes, strides, alignment and devices of what they are given; then they ask
    CUDA, which has no GPU here. Tensors of the host are refused, so the checks do come first."""
    built(root)
    arch = {"QUACK_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
    said = run(LAUNCH, root, TILES[0], **arch)
    assert len(said) == 2 * 2 * 5
    for refused, taken in zip(said[::2], said[1::2], strict=True):
        assert refused.startswith("Mismatched Tensor")
        assert "expected device_type=cuda" in refused
        assert "Cuda Runtime Error" in taken


@pytest.mark.parametrize("tile", TILES)
def test_machine_code(root: Path, tile: int) -> None:
    """wgmma in every main loop, where nothing is spilled, and nothing in an epilogue but the one of most accumulators a
    thread, 192, beside exponentials; and no worse than what is written down."""
    kernels = cute_figures.read(built(root)[tile][1])
    gradients = {"to_hidden", "to_weight", "to_weight adding"} if tile == TILES[0] else set()
    assert set(kernels) == {"exponentials", "scores"} | gradients
    written = {row["case"]: harness.AotResult.of(row) for row in cute_figures.written()}
    for name, kernel in kernels.items():
        found = cute_figures.figures(name, tile, kernel)
        assert found.registers <= 168  # of the 64 K for three warp groups
        assert found.stack <= (written[found.case].stack if (name, tile) == ("exponentials", 192) else 0)
        assert found.wgmma
        assert not any(loop.local for loop in found.loops)
        assert all(loop.tensor_clocks == loop.useful_clocks for loop in found.loops)
        assert harness.worse(found, written[found.case]) == []
