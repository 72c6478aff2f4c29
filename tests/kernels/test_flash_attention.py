"""tree_attention's flash backend up to its kernels: lists, mask, memory, refused arguments, the first-use check."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import itertools
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import hypothesis.strategies as st
import torch
from hypothesis import Phase, given, settings
from packaging.requirements import Requirement
from torch import Tensor

from rolltree.kernels import dispatch
from rolltree.kernels.libraries import log_once
from rolltree.kernels.tree_attention import flash, flash_lists, op, reference, tree_attention
from rolltree.kernels.tree_attention.blocks import Tile
from rolltree.kernels.tree_attention.flash_lists import TILES, BlockLists, block_lists, list_bytes, mask_tensors, sees
from rolltree.kernels.tree_attention.reference import Scoring

from ..support.trees import ancestors_mask, random_trees
from .on_device import needs_interpreter, needs_triton
from .test_tree_attention import Case, error, in_pieces, make, plain, run

T = TypeVar("T")
SHAPES = sorted({(t.rows, t.keys) for tiles in TILES.values() for pair in tiles.values() for t in pair})


def read(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[index]


def seen_by_parents(parents: list[int], position: Tensor, window: int | None) -> Tensor:
    seen = ancestors_mask(parents)
    return seen if window is None else seen & (position[:, None] - position[None, :] < window)


def by_element(mask: tuple[Tensor, ...], rows: int, keys: int, prefix: bool, window: bool) -> Tensor:
    """[rows, keys]: the mask function, element by element, also beyond the last row and key."""
    row, key = torch.arange(rows)[:, None].expand(rows, keys), torch.arange(keys)[None, :].expand(rows, keys)
    return sees(row, key, mask[0], mask[1:], read, prefix=prefix, window=window)


def listed(lists: BlockLists, kind: str, block: int) -> list[int]:
    """The entries of one block's list, as the kernels read it."""
    counts, indices = getattr(lists, f"{kind}_count"), getattr(lists, kind)
    assert counts.shape[:2] == indices.shape[:2] == (1, 1)
    assert indices.stride(-1) == 1
    return indices[0, 0, block, : counts[0, 0, block]].tolist()


@pytest.mark.slow
@needs_interpreter
@given(
    tokens=st.integers(1, 700),
    seed=st.integers(0, 10**6),
    close=st.sampled_from([0.0, 0.01, 0.1, 0.9]),
    restart=st.sampled_from([0.0, 0.004, 0.3]),
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([None, None, 1, 150, 2**31 - 1]),
    cut=st.sampled_from([0, 0, 1, 62, 63, 64, 126, 127, 128, 300]),
)
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
def test_lists_and_mask_are_those_of_the_forest(
    tokens: int, seed: int, close: float, restart: float, shape: tuple[int, int], window: int | None, cut: int
) -> None:
    forest = random_trees(tokens, seed, close=close, restart=restart)
    lists_and_mask_are_right(*forest, Tile(*shape, 4), window, min(cut, tokens - 1))


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@needs_interpreter
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_where_paths_and_rows_end_with_blocks(shape: tuple[int, int]) -> None:
    """Two paths; where they end, where rows begin, and how far a window reaches: at a block's edge and beside it."""
    rows, keys = shape
    for by in (-1, 0, 1):
        for first, tokens, offset, window in (
            (2 * rows + by, 3 * rows, 0, None),
            (3 * rows, 3 * rows + by, 0, None),
            (3 * rows + keys, 3 * rows + keys, keys + by, None),
            (3 * rows + keys, 3 * rows + keys, keys - 1 + by, None),
            (2 * rows, 2 * rows, 0, 2 * rows - 1 + by),
        ):
            position = torch.arange(tokens, dtype=torch.int32)
            end = torch.where(position < first, first, tokens).clamp(max=tokens).int()
            parents = [-1 if token in (0, first) else token - 1 for token in range(tokens)]
            position = torch.where(position < first, position, position - first)
            lists_and_mask_are_right(end, position, parents, Tile(*shape, 4), window, offset)


def lists_and_mask_are_right(
    end: Tensor, position: Tensor, parents: list[int], tile: Tile, window: int | None, offset: int
) -> None:
    """Full: every pair sees each other; partial: some do; both ascending. Under a window, which is known to a block by
    its nearest positions alone, a partial block may show nothing, where without the window it would."""
    tokens = len(end)
    rows = tokens - offset
    seen = seen_by_parents(parents, position, window)[offset:]

    mask = mask_tensors(end, position, window, offset)
    padded = [-(-n // size) * size for n, size in ((rows, tile.rows), (tokens, tile.keys))]
    found = by_element(mask, *padded, offset > 0, window is not None)
    assert torch.equal(found[:rows, :tokens], seen)
    assert not found[:, tokens:].any()

    within = torch.zeros(padded, dtype=torch.bool)
    within[:rows, :tokens] = seen
    exists = torch.zeros(padded, dtype=torch.bool)
    exists[:rows] = True  # rows past the last are never written, keys past it are real to the kernel's full blocks
    blocks = within.view(padded[0] // tile.rows, tile.rows, -1, tile.keys)
    some = blocks.any(3).any(1)
    without = torch.zeros(padded, dtype=torch.bool)
    without[:rows, :tokens] = ancestors_mask(parents)[offset:]
    possible = without.view_as(blocks).any(3).any(1)
    whole = (blocks | ~exists.view_as(blocks)).all(3).all(1)
    complete = blocks.all(3).all(1)
    for by_key in (False, True):
        lists = block_lists(end, position, window, tile, offset, by_key)
        visible, full = (some.T, complete.T) if by_key else (some, whole)
        most = possible.T if by_key else possible
        for block in range(len(visible)):
            assert listed(lists, "full", block) == (visible & full)[block].nonzero().flatten().tolist()
            partial = listed(lists, "partial", block)
            least = (visible & ~full)[block].nonzero().flatten().tolist()
            assert partial == sorted(partial)
            if window is None:
                assert partial == least
            else:
                assert set(least) <= set(partial) <= set((most & ~full)[block].nonzero().flatten().tolist())


@needs_interpreter
def test_lists_take_the_bytes_that_are_bounded() -> None:
    end, _, _ = random_trees(1000, 3)
    for tiles, offset in itertools.product((TILES[9][64], TILES[9][256], TILES[10][128]), (0, 300)):
        lists = [block_lists(end, None, None, tiles[by_key], offset, bool(by_key)) for by_key in (0, 1)]
        held = sum(x.untyped_storage().nbytes() for each in lists for x in (each.partial, each.full))
        assert held == list_bytes(1000 - offset, 1000, tiles)
    assert list_bytes(2**17, 2**17, TILES[9][128]) == 4 * 4 * 1024 * 1025
    assert list_bytes(2**20 - 256, 2**20 - 256, TILES[9][128]) < flash_lists.LIST_BYTES
    assert list_bytes(2**21, 2**21, TILES[9][128]) > flash_lists.LIST_BYTES


class Walked:
    """flash-attn's kernels in plain PyTorch: which pairs see each other comes from walking the lists as they do, full
    blocks whole, partial ones by `sees`; the rest is the reference's. ``wrong`` spoils one thing."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.calls = wrong, 0

    def _run(self, backward: bool, q: Tensor, k: Tensor, blocks: BlockLists, tile: Tile, mask: tuple[Tensor, ...],
             window: bool, function: Callable[[Tensor], T]) -> T:  # fmt: skip
        self.calls += 1
        rows, keys = len(q), len(k)
        high, wide = -(-rows // tile.rows) * tile.rows, -(-keys // tile.keys) * tile.keys
        seen = torch.zeros(high, wide, dtype=torch.bool)
        element = by_element(mask, high, wide, prefix=keys > rows, window=window)
        for block in range(blocks.full_count.shape[2]):
            for kind in ("full", "partial"):
                for other in listed(blocks, kind, block):
                    i, j = (other, block) if backward else (block, other)
                    part = slice(i * tile.rows, (i + 1) * tile.rows), slice(j * tile.keys, (j + 1) * tile.keys)
                    seen[part] = True if kind == "full" or self.wrong == "mask" else element[part]
        if self.wrong == "raises":
            raise RuntimeError("no such kernel\nin two lines")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "visible_keys", lambda *_: seen[:rows, :keys])
            return function(mask[0])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, tile: Tile, mask: tuple[Tensor, ...],
                scale: float, window: bool, softcap: float | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        def forward(ends: Tensor) -> tuple[Tensor, Tensor]:
            return reference.tree_attention_forward(q, k, v, Scoring(ends, None, scale, None, softcap))

        return self._run(False, q, k, blocks, tile, mask, window, forward)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
                 tile: Tile, mask: tuple[Tensor, ...], scale: float, window: bool, softcap: float | None
                 ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        def backward(ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scoring = Scoring(ends, None, scale, None, softcap)
            return reference.tree_attention_backward(grad, q, k, v, out, lse, scoring)

        dq, dk, dv = self._run(True, q, k, blocks, tile, mask, window, backward)
        return dq, dk * 1.02 if self.wrong == "dk" else dk, dv


class Twin:
    """Triton's place: the reference, which counts its calls. The interpreter would take a minute for these sizes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def tree_attention_forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return reference.tree_attention_forward(q, *args)

    def tree_attention_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        return reference.tree_attention_backward(*args)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Walked:
    return install(monkeypatch, Walked())


def install(monkeypatch: pytest.MonkeyPatch, kernels: Walked) -> Walked:
    """The flash backend usable on CPU tensors, on a GPU of 9.0 whose kernels are ``kernels``."""
    monkeypatch.setattr(flash, "_kernels", lambda: kernels)
    monkeypatch.setattr(flash, "triton", Twin())
    monkeypatch.setattr(flash, "_major", lambda device: 9)
    monkeypatch.setattr(flash, "_checked", {})
    monkeypatch.setattr(dispatch, "_flash_unusable", lambda device: None)
    log_once.cache_clear()
    return kernels


def inputs(rows: int, keys: int, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> SimpleNamespace:
    end, position, _ = random_trees(keys, 5, close=0.01, restart=0.003)
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, 4, dim), (keys, 2, dim), (keys, 2, dim)]
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return SimpleNamespace(q=q, k=k, v=v, end=end, position=position, grad=torch.randn(q.shape, generator=generator))


def through(x: SimpleNamespace, backend: str = "flash", **options: object) -> list[Tensor]:
    """out, dq, dk, dv by the public op."""
    P = len(x.k) - len(x.q)
    prefix = (x.k[:P], x.v[:P]) if P else None
    with dispatch.use_backend(backend):  # type: ignore[arg-type]
        out = tree_attention(x.q, x.k[P:], x.v[P:], x.end, position=x.position, prefix_kv=prefix, **options)
        return [out.detach(), *torch.autograd.grad(out, (x.q, x.k, x.v), x.grad.to(out.dtype))]


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@needs_interpreter
@pytest.mark.parametrize("options", [{}, {"window": 90}, {"softcap": 7.0, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("prefix", [0, 140])
def test_the_op_on_kernels_that_walk_its_lists(
    walked: Walked, caplog: pytest.LogCaptureFixture, prefix: int, options: dict[str, object]
) -> None:
    x = inputs(400 - prefix, 400)
    got = through(x, **options)
    assert walked.calls == 4  # both directions, and both at the first-use check
    assert [r.message for r in caplog.records if "rolltree" in r.name] == ["tree_attention runs on flash-attn 4."]
    for mine, want in zip(got, through(x, "reference", **options), strict=True):
        assert mine.dtype == want.dtype
        assert (mine.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    through(x, **options)
    assert walked.calls == 6
    assert flash.triton.calls == ["forward", "backward"]  # the check's
    assert len(caplog.records) == 1


@needs_interpreter
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("mask", "its out is off by"),
        ("dk", "its dk is off by"),
        ("raises", "(RuntimeError: no such kernel), and flash-attn-4 is 4.1, not 4.0.0b36"),
        ("is another version", "(ImportError: no such name), and flash-attn-4 is 4.1, not 4.0.0b36"),
    ],
)
def test_kernels_that_disagree_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, said: str
) -> None:
    kernels, x = install(monkeypatch, Walked(wrong)), inputs(300, 300)
    monkeypatch.setattr(dispatch.importlib.metadata, "version", lambda name: "4.1")
    if wrong == "is another version":

        def fail() -> None:
            raise ImportError("no such name")

        monkeypatch.setattr(flash, "_kernels", fail)
    calls = set()
    for _ in range(2):
        with pytest.raises(dispatch.BackendError, match="Backend 'flash' cannot run tree_attention: its") as refused:
            through(x)
        assert said in str(refused.value)
        calls.add(kernels.calls)
    assert len(calls) == 1  # the check is made once
    assert not caplog.records


@needs_interpreter
def test_arguments_that_the_kernels_do_not_take_are_refused(walked: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(300, 300)
    for shape, options, said in (
        (inputs(260, 260, torch.float32), {}, "not torch.float32"),
        (inputs(260, 260, dim=80), {}, "not 80"),
        (inputs(256, 256), {}, "fewer than 257 rows"),
        (x, {"scale": 0.0}, "the scale is not positive"),
    ):
        with pytest.raises(dispatch.BackendError, match=f"{said}.*; use backend 'triton'"):
            through(shape, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(flash, "LIST_BYTES", list_bytes(300, 300, TILES[9][64]) - 1)
    with pytest.raises(dispatch.BackendError, match="the lists of blocks of 300 rows and 300 keys take"):
        through(x)
    assert walked.calls == 0
    assert flash.triton.calls == []


@needs_interpreter
def test_deterministic_algorithms_refuse_its_backward_pass(walked: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(300, 300)
    through(x)
    calls = walked.calls
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(dispatch.BackendError, match="backward pass: deterministic algorithms are wanted"):
        through(x)
    assert walked.calls == calls + 1  # the forward pass alone


def test_why_flash_cannot_run_here() -> None:
    with pytest.raises(dispatch.BackendError, match="Backend 'flash' cannot run tree_attention on a cpu tensor"):
        through(inputs(2, 2))


def test_why_a_gpu_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the package's own name, as flash-attn 2 has the same module; then of the GPU."""
    why, gpu = dispatch._flash_unusable.__wrapped__, torch.device("cuda", 0)
    installed = {"flash-attn-4": "4.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise dispatch.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(dispatch.importlib.metadata, "version", version)
    for capability, reason in (
        ((8, 0), "it needs a Hopper or Blackwell GPU"),
        ((9, 0), None),
        ((10, 0), None),
        ((12, 0), "it needs a Hopper or Blackwell GPU"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert why(gpu) == reason
    installed.clear()
    assert "Hopper" in why(gpu)  # the GPU first: on another one no package would help
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "flash-attn-4 is not installed; `pip install --pre rolltree[hopper]`" in why(gpu)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> torch.device:
    """A GPU of that capability, with flash-attn 4 and the compiled CUDA kernels installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(dispatch.importlib.metadata, "version", lambda name: dispatch.FLASH_VERSION)
    monkeypatch.setattr(dispatch, "load_library", lambda name: True)
    monkeypatch.setattr(dispatch, "_flash_unusable", dispatch._flash_unusable.__wrapped__)
    return torch.device("cuda", 0)


@needs_triton
@pytest.mark.parametrize("major", [8, 9, 10])
def test_flash_is_never_chosen_by_default(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with everything installed, tree attention runs on Triton in both directions."""
    gpu = pretend_gpu(monkeypatch, major)
    monkeypatch.delenv("ROLLTREE_BACKEND", raising=False)
    for table in (op._FORWARD, op._BACKWARD):
        assert {"flash", "triton"} <= set(table)
        assert dispatch.choose("tree_attention", table, gpu) is table["triton"]


@needs_triton
@pytest.mark.parametrize("by", ["use_backend", "ROLLTREE_BACKEND"])
def test_flash_is_tree_attentions_alone(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ops run on their default backend although flash is named."""
    gpu, other = pretend_gpu(monkeypatch, 9), {"triton": print, "reference": repr}
    if by == "ROLLTREE_BACKEND":
        monkeypatch.setenv(by, "flash")
    with dispatch.use_backend("flash") if by == "use_backend" else nullcontext():
        assert dispatch.choose("tree_attention", op._FORWARD, gpu) is op._FORWARD["flash"]
        assert dispatch.choose("another", other, gpu) is print
        assert dispatch.usable("triton", gpu)
        with pytest.raises(dispatch.BackendError, match="has no 'cuda' backend"), dispatch.use_backend("cuda"):
            dispatch.choose("another", other, gpu)


def test_versions_are_those_of_the_extra() -> None:
    extra = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line) for line in extra["optional-dependencies"]["hopper"]]
    assert dispatch.FLASH_VERSION in next(r for r in asked if r.name == dispatch.FLASH_PACKAGE).specifier


ON_GPU = [
    Case(700, 4, 2, 64),
    Case(1000, 8, 2, 128, window=200, close=0.01, restart=0.002),
    Case(900, 4, 1, 128, softcap=20.0, close=0.005),
    Case(800, 4, 4, 96, close=0.3),
    Case(600, 2, 2, 256, scale=0.05),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_err_at_most_twice_as_plain_pytorch(case: Case, dtype: torch.dtype) -> None:
    """Whole, and as two pieces of which the second sees the first's keys as its prefix."""
    if reason := dispatch._unusable("flash", torch.device("cuda")):
        pytest.skip(reason)
    x = make(case, dtype)
    truth = plain(x.to(torch.float64), case)
    allowed = [2 * e + 4 * torch.finfo(dtype).eps for e in error(plain(x, case), truth)]
    for got in (run(x, case, "flash"), in_pieces(x, case, "flash", [case.tokens // 2])):
        assert [e <= most for e, most in zip(error(got, truth), allowed, strict=True)] == [True] * 4
