"""flash-attn 4 under a tree's mask, compiled for GPUs that are not there, and its machine code: `make hopper`.

One process a GPU and head size, as CuTe DSL compiles for one GPU in a process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rolltree.kernels.tree_attention.flash_lists import TILES, mask_tensors

from . import flash_figures
from .aot import harness, machine_code
from .flash_figures import table_file
from .trees import ancestors_mask, random_trees

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper`")
pytestmark = pytest.mark.hopper

BUILD = """
import json, sys
from rolltree.kernels import ahead
target, model, everything = ahead.TARGETS[sys.argv[1]], ahead.Model(8, 4, int(sys.argv[2]), 5000), sys.argv[3] == "all"
all_kernels = ahead.build(target, model, flash=True, filters=[(), ("top_k", "top_p")])
for built in all_kernels if everything else ahead.build_hopper(target, model):
    print(json.dumps(built._asdict()))
"""


def build(where: Path, arch: str, dim: int, what: str = "flash") -> dict[str, int]:
    """Step -> kernels it compiled, in a process of its own with caches and machine code below ``where``."""
    dump = where / "machine code"
    dump.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "ROLLTREE_CACHE_DIR": str(where),
        "TRITON_CACHE_DIR": str(where / "triton"),
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(dump),
    }
    command = [sys.executable, "-c", BUILD, arch, str(dim), what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row["compiled"] for row in rows}


@functools.cache
def built(root: Path, arch: str, dim: int) -> tuple[dict[str, int], dict[str, machine_code.Kernel]]:
    """What was compiled, and on sm_90a the kernels of both directions."""
    where = root / f"{arch}-{dim}"
    return build(where, arch, dim), flash_figures.read(where / "machine code") if arch == "90a" else {}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hopper")


CASES = [("90a", dim) for dim in TILES[9]] + [("100a", dim) for dim in TILES[10]]


@pytest.mark.parametrize(("arch", "dim"), CASES, ids=str)
def test_both_directions_compile_once_for_all_lengths(root: Path, arch: str, dim: int) -> None:
    compiled, _ = built(root, arch, dim)
    names = [f"attention, flash, {d}{p}" for p in ("", ", prefix") for d in ("forward", "backward")]
    assert [*names, "attention, flash, another length"] == list(compiled)
    assert all(compiled[name] >= 1 for name in names)
    assert compiled["attention, flash, another length"] == 0


@pytest.mark.parametrize("dim", TILES[9])
def test_machine_code(root: Path, dim: int) -> None:
    """wgmma in every main loop, nothing spilled in the forward's; and no worse than what is written down."""
    _, kernels = built(root, "90a", dim)
    written = {row["case"]: harness.AotResult.of(row) for row in map(json.loads, table_file().read_text().splitlines())}
    for direction, kernel in kernels.items():
        found = flash_figures.figures(dim, direction, kernel)
        assert found.registers <= 168  # of the 64 K for three warp groups
        assert found.loops
        assert found.wgmma
        if direction == "fwd":
            assert not any(loop.local for loop in found.loops)
        assert harness.worse(found, written[found.case]) == []
    assert sorted(kernels) == ["bwd", "fwd"]


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Attention of both backends, the head's row kernels, decoding and sampling, by their launch code; losses, which
    need the engine, are in test_ahead.py."""
    first, second = (build(tmp_path, "90a", 128, "all") for _ in range(2))
    assert list(first) == list(second)
    assert all(n >= 1 for name, n in first.items() if "another length" not in name)
    assert set(second.values()) == {0}


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("offset", [0, 11])
def test_the_mask_in_its_own_language_is_the_forests(offset: int, window: int | None) -> None:
    """The function that the kernels trace, run by CuTe DSL on the CPU for every row and key."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack
    from flash_attn.cute import utils

    from rolltree.kernels.tree_attention import flash_kernels

    end, position, parents = random_trees(60, 4, close=0.2, restart=0.05)
    mask = flash_kernels.mask_of(offset > 0, window is not None)
    tensors = mask_tensors(end, position, window, offset)

    @cute.jit
    def enumerate_pairs(out, tensors):  # type: ignore[no-untyped-def]  # CuTe DSL reads annotations
        for row in range(out.shape[0]):
            for key in range(out.shape[1]):
                pair = [utils.scalar_to_ssa(cutlass.Int32(i), cutlass.Int32) for i in (row, key)]
                seen = utils.ssa_to_scalar(mask(None, None, pair[0], pair[1], None, tensors))
                out[row, key] = cutlass.Int32(cutlass.Boolean(seen))

    out = torch.full((60 - offset, 60), 7, dtype=torch.int32)
    enumerate_pairs(from_dlpack(out), [from_dlpack(t) for t in tensors])
    seen = ancestors_mask(parents)
    if window is not None:
        seen &= position[:, None] - position[None, :] < window
    assert torch.equal(out, seen[offset:].int())
