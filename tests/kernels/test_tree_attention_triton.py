"""tree_attention's Triton kernels: lists of blocks, cut blocks, tiles of other GPUs, products of 64 bits, alignment."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import dataclasses

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rolltree.kernels.tree_attention import triton as triton_backend
from rolltree.kernels.tree_attention import visible
from rolltree.kernels.tree_attention.blocks import Tile, Tiles, tiles_for
from rolltree.kernels.tree_attention.triton_tiles import wide_product

from ..gpu.test_kernels_gpu import ATTENTION
from ..support.trees import ancestors_mask, random_trees
from .on_device import device_of, needs_interpreter
from .test_tree_attention import CASES, Case, Inputs, error, make, plain, run


@pytest.mark.check(but=1)
@needs_interpreter
@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[9]], ids=str)
def test_lists_hold_exactly_what_is_visible(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Wholly visible blocks from the front, every other visible block from the back, each once and in order."""
    monkeypatch.setattr(visible, "SPAN", 4)
    x, offset, tile = make(case, seed=2), 21, Tile(16, 8, 4)
    seen = ancestors_mask(x.parents)
    if case.window is not None:
        seen &= x.position[:, None] - x.position[None, :] < case.window
    row = torch.arange(offset, case.tokens + (offset - case.tokens) % 16).clamp(max=case.tokens - 1)
    seen = F.pad(seen[row], (0, -case.tokens % 8))
    pairs = seen.view(len(seen) // 16, 16, -1, 8).float().mean((1, 3))  # [row blocks, key blocks]
    for by_key in (False, True):
        lists = visible.visible_blocks(x.subtree_end, x.position, case.window, tile, offset, by_key)
        for block, share in enumerate(pairs.T if by_key else pairs):
            full, partial = (int(counts[block]) for counts in (lists.full_count, lists.partial_count))
            front, back = lists.blocks[block, :full].tolist(), lists.blocks[block].flip(0)[:partial].tolist()
            assert front == sorted(front)
            assert back == sorted(back)
            assert sorted(front + back) == share.nonzero().flatten().tolist()
            assert (share[front] == 1).all()
            if by_key:  # whose rows are read without a mask
                assert all(offset + 16 * (i + 1) <= case.tokens for i in front)
    assert sorted(visible.heavy_first(x.subtree_end, x.position, case.window, tile, offset)[1].tolist()) == list(
        range(len(pairs))
    )


@needs_interpreter
@pytest.mark.parametrize("shortest", [1, 5, 10**6])
def test_work_items_share_out_every_tile_once(monkeypatch: pytest.MonkeyPatch, shortest: int) -> None:
    monkeypatch.setattr(visible, "SHORTEST_ITEM", shortest)
    monkeypatch.setattr(visible, "WANTED_ITEMS", 40)
    x, tile, heads, group = make(Case(400, 1, 1, 16, close=0.02)), Tile(16, 8, 4), 2, 3
    lists, work = visible.work_items(x.subtree_end, None, None, tile, 0, heads, group)
    tiles = group * (lists.full_count + lists.partial_count)
    items = [item for item in work.items.tolist() if item[0] >= 0]
    lengths = [end - begin for _, begin, end, _ in items]
    assert lengths == sorted(lengths, reverse=True)
    limit = max(shortest, -(-heads * int(tiles.sum()) // 40))
    assert max(lengths) <= limit
    slots = dict.fromkeys(range(work.slots), 0)
    for block, total in enumerate(tiles.tolist()):
        mine = sorted(item[1:] for item in items if item[0] == block)
        assert [begin for begin, _, _ in mine] == [0, *(end for _, end, _ in mine[:-1])]
        assert mine[-1][1] == total
        (split,) = [s for s in work.splits.tolist() if s[0] == block] or [None]
        if split is None:
            assert [slot for _, _, slot in mine] == [-1]
        else:
            assert [slot for _, _, slot in mine] == list(range(split[1], split[1] + split[2]))
            for _, _, slot in mine:
                slots[slot] += 1
    assert max(slots.values(), default=0) <= 1
    assert bool(slots) == (shortest < 10**6)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [Case(110, 4, 2, 16, close=0.02), Case(90, 3, 1, 40, window=50)],
    ids=str,
)
def test_partial_sums_of_a_cut_key_block(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """dK and dV as close to float64 as uncut, and the same bits each time."""
    monkeypatch.setattr(visible, "SHORTEST_ITEM", 2)
    x = make(case, seed=3)
    first, again = run(x, case, "triton"), run(x, case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for e in error(first, plain(x.to(torch.float64), case)):
        assert e < 2e-6


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "shortest"),
    [pytest.param(Case(90, 4, 2, 32), 2, marks=pytest.mark.slow), (Case(60, 2, 1, 64, window=20, softcap=5.0), 64)],
    ids=str,
)
def test_programs_that_share_columns(monkeypatch: pytest.MonkeyPatch, case: Case, shortest: int) -> None:
    """The case is Hopper's dK/dV of D = 256: each part is as close to float64 as the whole."""
    tile = Tile(16, 32, 4)
    shared = Tiles(tile, tile, dataclasses.replace(tile, parts=2))
    monkeypatch.setattr(triton_backend, "tiles_for", lambda *_, **__: shared)
    monkeypatch.setattr(visible, "SHORTEST_ITEM", shortest)
    x = make(case, seed=4)
    for e in error(run(x, case, "triton"), plain(x.to(torch.float64), case)):
        assert e < 2e-6


@needs_interpreter
def test_tiles_of_a_loop_short_of_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case is Hopper's dK/dV of D = 128, whose pointers are made anew from numbers of rows; views with strides."""
    tiles = Tiles(Tile(64, 64, 4), Tile(64, 64, 4), Tile(64, 128, 4))
    monkeypatch.setattr(triton_backend, "tiles_for", lambda *_, **__: tiles)
    case = Case(200, 2, 1, 128, close=0.02)
    x = make(case, seed=5)
    expected = plain(x.to(torch.float64), case)
    fused = torch.cat([x.q.transpose(0, 1), x.k.transpose(0, 1), x.v.transpose(0, 1)]).detach()  # [Hq + 2 Hkv, T, D]
    q, k, v = (t.transpose(0, 1).requires_grad_() for t in fused.split([2, 1, 1]))
    for e in error(run(Inputs(q, k, v, x.grad, x.subtree_end, x.position, x.parents), case, "triton"), expected):
        assert e < 2e-6


@triton.jit
def _products(first, out, factor):
    at = tl.arange(0, 8)
    tl.store(out + at, wide_product(tl.load(first + at), factor + tl.zeros([], tl.int32)))


@needs_interpreter
def test_products_of_64_bits() -> None:
    first, more = torch.tensor([0, 1, 65535, 2**31 - 1, 3 * 2**29], dtype=torch.int32), 2**31 + 5
    for factor in (0, 1, 16, 4096, 2**31 - 1, more):
        out = torch.zeros(8, dtype=torch.int64)
        _products[(1,)](F.pad(first, (0, 3)), out, factor)
        assert out[: len(first)].tolist() == [int(x) * factor for x in first]


def test_rows_of_gradients_are_aligned() -> None:
    """dK/dV copies rows of q and of the output's gradient by 16 bytes wherever the head dimension allows it."""
    whole = torch.randn(5, 2, 64).bfloat16()
    wide = torch.randn(5, 2, 72).bfloat16()
    assert triton_backend.aligned(whole) is whole
    assert triton_backend.aligned(wide[..., 8:]).data_ptr() == wide[..., 8:].data_ptr()
    for view in (wide[..., 1:65], torch.randn(5 * 132).bfloat16().as_strided((5, 2, 64), (132, 64, 1))):
        copy = triton_backend.aligned(view)
        assert torch.equal(copy, view)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == (128, 64, 1)
    odd = torch.randn(5, 2, 36).bfloat16()  # rows of 72 bytes begin anywhere
    assert triton_backend.aligned(odd) is odd


def test_lists_are_made_once_for_all_layers() -> None:
    x, tile = make(Case(90, 1, 1, 16)).on("triton"), Tile(16, 16, 4)
    first = visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False)
    assert visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False) is first
    x.subtree_end[0] = 1
    assert visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False) is not first


@pytest.mark.check
def test_a_gpu_checks_every_kind_of_tile() -> None:
    """`make gpu` compares attention with float64 first: its trees reach both loops of each kernel, and cut roots."""
    kinds = set()
    for tokens, (heads, kv_heads), dim, kind in ATTENTION:
        end = random_trees(tokens, seed=1, **kind)[0].to(device_of("triton"))
        tiles = tiles_for(dim, torch.bfloat16, major=9, softcap=False)
        programs = kv_heads * tiles.dkdv.parts
        of_keys, work = visible.work_items(end, None, None, tiles.dkdv, 0, programs, heads // kv_heads)
        of_rows = [visible.heavy_first(end, None, None, tile, 0)[0] for tile in (tiles.forward, tiles.dq)]
        full = [bool(blocks.full_count.any()) for blocks in (*of_rows, of_keys)]
        assert all(blocks.partial_count.any() for blocks in (*of_rows, of_keys))
        kinds.add((dim, *full, bool((work.splits[:, 0] >= 0).any())))
    assert kinds == {(128, False, False, False, False), *((dim, True, True, True, True) for dim in (64, 128, 256))}
