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
STEPS = ["exponentials", "scores", "gradients", "another size"]


def build(root: Path, tile: int) -> tuple[list[int], Path]:
    """Kernels that each of `STEPS` compiled for a vocabulary of this tile, and the folder of their machine code."""
    dump = root / f"tile-{tile}"
    (dump / "read").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "ROLLTREE_CACHE_DIR": str(root / "cache"), "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": str(dump),
    }  # fmt: skip
    command = [sys.executable, "-c", BUILD, str(5 * math.lcm(tile, ROWS)), str(dump)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
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
