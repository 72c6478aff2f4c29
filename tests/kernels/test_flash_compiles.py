"""flash-attn 4 under a tree's mask, compiled for GPUs that are not there, and its machine code: `make hopper`."""

from __future__ import annotations

import pytest

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper`")

import itertools
import json
import os
import shutil
from pathlib import Path

import torch

from rolltree.kernels.tree_attention.flash_lists import TILES, mask_tensors

from ..support.trees import ancestors_mask, random_trees
from . import blackwell_figures, flash_figures
from .aot import harness
from .flash_figures import table_file
from .hopper_builds import SOFTCAP, Hopper, Job, build

pytestmark = pytest.mark.hopper

CASES = [f"90a-{dim}" for dim in TILES[9]] + [f"100a-{dim}" for dim in TILES[10]]


@pytest.mark.parametrize("case", CASES)
def test_both_directions_compile_once_for_all_lengths(hopper: Hopper, case: str) -> None:
    compiled = {name: count for name, count in hopper.first[case].items() if name.startswith("attention, flash, ")}
    names = [f"attention, flash, {d}{p}" for p in ("", ", prefix") for d in ("forward", "backward")]
    assert [*names, "attention, flash, another length"] == list(compiled)
    assert all(compiled[name] >= 1 for name in names)
    assert compiled["attention, flash, another length"] == 0


@pytest.mark.parametrize("case", CASES)
def test_softcap_and_window_compile(hopper: Hopper, case: str) -> None:
    compiled = hopper.first[f"{case}-softcap"]
    assert tuple(compiled) == SOFTCAP
    assert all(compiled.values())


@pytest.mark.parametrize(("dim", "option"), itertools.product(TILES[10], flash_figures.OPTIONS))
def test_machine_code_of_blackwell(hopper: Hopper, dim: int, option: str) -> None:
    """tcgen05 and nothing older, nothing spilled beside it; and no worse than what is written down."""
    kernels = flash_figures.read(hopper.code, 10, dim, option)
    assert sorted(kernels) == ["bwd", "fwd"]
    for direction, kernel in kernels.items():
        blackwell_figures.check(flash_figures.case_of(direction, dim, option), kernel)


def test_the_page_of_blackwell_shows_the_rows() -> None:
    page = blackwell_figures.page([*blackwell_figures.written().values()])
    assert (blackwell_figures.FOLDER / "table.md").read_text() == page


@pytest.mark.parametrize("dim", TILES[9])
def test_machine_code(hopper: Hopper, dim: int) -> None:
    """wgmma in every main loop, nothing spilled in the forward's; and no worse than what is written down."""
    kernels = flash_figures.read(hopper.code, 9, dim)
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


def test_a_second_process_compiles_nothing(hopper: Hopper) -> None:
    """Attention in all head dimensions for both GPUs; with D = 128 also Triton's kernels of attention, the head,
    decoding and sampling. Losses, which need the engine, are in test_ahead.py."""
    assert {job: list(steps) for job, steps in hopper.first.items()} == {
        job: list(steps) for job, steps in hopper.second.items()
    }
    again = "attention, flash, another length"
    assert all(count for steps in hopper.first.values() for name, count in steps.items() if name != again)
    assert {"head", "decode attention", "sampling, top_k, top_p"} <= set(hopper.first["90a-128"])
    assert {count for steps in hopper.second.values() for count in steps.values()} == {0}


def test_spoilt_entries_are_compiled_again(hopper: Hopper, tmp_path: Path) -> None:
    """Cut off, as by a full disk; the new ones take their place."""
    cache = shutil.copytree(hopper.cache, tmp_path / "cache")
    entries = list(cache.glob("**/*.o"))
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert "flash" in {part for entry in entries for part in entry.parts}
    steps = ("attention, flash, forward",)
    jobs = [Job(name, "90a", 64, steps=steps) for name in ("first", "again")]
    assert build(jobs, cache) == {"first": dict.fromkeys(steps, 1), "again": dict.fromkeys(steps, 0)}


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
