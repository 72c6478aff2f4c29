"""Compiles the kernels of a training step for a GPU that is not there, into the caches that a run reads.

    for built in build(TARGETS["90a"], Model(heads=16, kv_heads=8, head_dim=128, vocab=151936)):
        print(built.name, built.seconds, built.compiled)

Each op runs once on tensors that hold nothing, with launches replaced by compilation: the launch code itself decides
what is compiled. Triton keeps its kernels in its own folder (``TRITON_CACHE_DIR``, ``~/.triton/cache``), flash-attn 4
and quack in `kernel_cache.directory`; both names hold the versions of all that they are made from, Python's among them.
A kernel compiled for a pointer on a multiple of 16 bytes is another one than for a pointer that is not: the row kernels
of the head are built for both, as chunks of any size have them.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

ROWS, PREFIX = 600, 100  # tokens of what is launched; kernels do not depend on them


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    arch: str  # as CuTe DSL writes it
    capability: int
    sms: int  # multiprocessors: sizes of grids that are compiled in

    @property
    def major(self) -> int:
        return self.capability // 10


TARGETS = {
    "90a": Target("sm_90a", 90, 132),  # H100 SXM, H200
    "100a": Target("sm_100a", 100, 148),  # B200
}


@dataclass(frozen=True)
class Model:
    """What kernels depend on of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None  # of attention
    window: bool = False  # whether some layers are sliding-window ones
    logit_softcap: float | None = None


class Built(NamedTuple):
    name: str
    seconds: float
    compiled: int  # kernels that were not in a cache before


def build(target: Target, model: Model, *, flash: bool) -> Iterator[Built]:
    """Fill the caches; with ``flash`` those of flash-attn 4 and quack too, which must be installed.

    Raises:
        RuntimeError: this process has imported CuTe DSL for another target, or interprets Triton.
    """
    from .dispatch import interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter replaces the compiler; unset it.")
    with _triton_compiles(target) as compiled:
        steps: list[tuple[str, Callable[[], object]]] = [
            ("head", lambda: _head(model)),
            ("policy loss", _loss),
            *((f"attention, triton{name}", step) for name, step in _attention(target, model)),
        ]
        if flash:
            steps += [("attention, flash: lists", lambda: _lists(target, model))]
        for name, step in steps:
            yield _timed(name, step, compiled)
    if flash:
        yield from build_hopper(target, model)


def build_hopper(target: Target, model: Model) -> Iterator[Built]:
    """The kernels of flash-attn 4 and, for Hopper, of quack, which it needs, alone."""
    if "cutlass" in sys.modules and os.environ.get("CUTE_DSL_ARCH") != target.arch:
        raise RuntimeError(f"CuTe DSL is imported for another GPU than {target.arch}; build in a process of its own.")
    os.environ |= {  # read once, at the import
        "CUTE_DSL_ARCH": target.arch,
        "FLASH_ATTENTION_ARCH": target.arch,
        "FLASH_ATTENTION_NUM_SMS": str(target.sms),
        "QUACK_ARCH": target.arch,
    }
    with _cute_compiles(target) as compiled:
        for name, step in _products(target, model):
            yield _timed(f"head, cute{name}", step, compiled)
        for name, step in _flash(target, model):
            yield _timed(f"attention, flash{name}", step, compiled)


def _timed(name: str, step: Callable[[], object], compiled: list[str]) -> Built:
    before, began = len(compiled), time.perf_counter()
    step()
    return Built(name, time.perf_counter() - began, len(compiled) - before)


@contextmanager
def _triton_compiles(target: Target) -> Iterator[list[str]]:
    """Launches of Triton kernels compile for ``target`` and do no more; yields the names of those not cached before."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from .tree_attention import blocks, triton

    compiled: list[str] = []

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])

    active = SimpleNamespace(
        get_current_device=lambda: target.arch,  # kernels in memory are kept by it
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", target.capability, 32),
    )
    launch = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    def tiles(q: Tensor, softcap: float | None) -> blocks.Tiles:
        return blocks.tiles_for(q.shape[2], q.dtype, major=target.major, softcap=softcap is not None)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", active))
        stack.enter_context(mock.patch.object(jit.JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(knobs.compilation, "listener", listener))
        stack.enter_context(mock.patch.object(triton, "_tiles", tiles))
        yield compiled


def _head(model: Model) -> None:
    """The row kernels, on tiles as a GPU has them: fp32 logits, their gradient in the head's dtype."""
    from .linear_logprob import chunked, triton
    from .linear_logprob.head import Head

    head = Head(torch.empty(model.vocab, 1, dtype=model.dtype), None, None, torch.float32)
    head.mixed, head.dtype = model.dtype != torch.float32, model.dtype
    softcap = model.logit_softcap or 0.0
    for C in (16, 15):
        tile, d_tile = chunked.new_tiles(triton, head, C)
        temperature, start, target = torch.ones(C), torch.arange(C + 1), torch.zeros(C, dtype=torch.long)
        logsumexp, correction, entropy = tile.new_empty(3, C)
        logprob, nothing = torch.empty(C), torch.empty(0)
        scaling = (tile, head.bias, temperature, softcap, start, target)
        for of_entropy in (entropy, nothing):
            triton.statistics(*scaling, logprob, logsumexp, correction, of_entropy, nothing)
            triton.gradient(*scaling, logsumexp, correction, logprob, logprob, of_entropy, nothing, d_tile)


def _loss() -> None:
    """GRPO's terms, with old log-probs and without."""
    from . import dispatch
    from .policy_loss import Objective, PolicyFields, policy_loss

    with mock.patch.object(dispatch, "_unusable", return_value=None), dispatch.use_backend("triton"):
        for old in (torch.zeros(ROWS), None):
            sequences = torch.tensor([0, ROWS])
            fields = PolicyFields.flat(torch.ones(ROWS), old_logprob=old, cu_seqlens=sequences)
            policy_loss(torch.zeros(ROWS), fields, Objective.preset("grpo"), normalizer=1.0)


def _attention(target: Target, model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """Triton's kernels of both directions, for the model's heads and for those that flash-attn is compared on."""
    from .tree_attention import triton

    def both(heads: int, kv_heads: int, window: int | None) -> None:
        shapes = [(ROWS, heads, model.head_dim), *[(ROWS, kv_heads, model.head_dim)] * 2]
        q, k, v = (torch.empty(s, dtype=model.dtype) for s in shapes)
        ends = torch.full((ROWS,), ROWS, dtype=torch.int32)
        options = (ends, torch.zeros_like(ends) if window else None, 1.0, window, model.softcap)
        out, lse = triton.tree_attention_forward(q, k, v, *options)
        triton.tree_attention_backward(q, q, k, v, out, lse, *options)

    compared = (2 * model.heads // model.kv_heads, 2)
    for window in _windows(model):
        for heads in dict.fromkeys([(model.heads, model.kv_heads), compared]):
            name = f", {heads[0]} heads of {heads[1]}" + (", window" if window else "")
            yield name, functools.partial(both, *heads, window)


def _lists(target: Target, model: Model) -> None:
    from .tree_attention.flash_lists import TILES, block_lists

    tiles = TILES[target.major].get(model.head_dim, ())
    ends = torch.full((ROWS,), ROWS, dtype=torch.int32)
    for window in _windows(model):
        for by_key, tile in enumerate(tiles):
            block_lists(ends, ends if window else None, window, tile, 0, bool(by_key))


def _windows(model: Model) -> list[int | None]:
    return [None, ROWS] if model.window else [None]


@contextmanager
def _cute_compiles(target: Target) -> Iterator[list[str]]:
    """flash-attn and quack compile and launch nothing; yields the names of what was not in their caches."""
    import warnings

    from .linear_logprob import cute_kernels  # noqa: F401  # their caches' settings, before flash-attn and quack
    from .tree_attention import flash_kernels  # noqa: F401

    import cutlass  # isort: skip
    from flash_attn.cute import tile_scheduler
    from quack.epilogue.frontend import EpiMod
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Absent:
        """What is asked of the GPU while compiling for it."""

        def __init__(self, device: int = 0) -> None: ...

        def get_device_multiprocessor_count(self) -> int:
            return target.sms

        def get_max_active_clusters(self, cluster_size: int) -> int:
            return target.sms // cluster_size

    compiled: list[str] = []
    compiler = cutlass.cute.compile

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        compiled.append(type(kernel).__name__)
        return compiler(kernel, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cutlass.cute, "compile", counted))
        stack.enter_context(mock.patch.object(EpiMod, "gemm", functools.partialmethod(EpiMod.gemm, _launch=False)))
        stack.enter_context(mock.patch.object(cutlass.utils, "HardwareInfo", Absent))
        stack.enter_context(mock.patch.object(tile_scheduler, "HardwareInfo", Absent))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # that tensors without memory are asked where it is
        stack.enter_context(FakeTensorMode())
        yield compiled


def _products(target: Target, model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """The head's products around exponentials, where they take the model's head."""
    from .linear_logprob import cute_kernels
    from .linear_logprob.exponentials import BLOCK, ROWS, tile_of

    V, tile = model.vocab, tile_of(model.vocab)
    if target.major != 9 or tile is None or model.dtype != torch.bfloat16 or model.logit_softcap:
        return

    def bf16(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda")

    def form(e: Tensor | None, rows: int = 4 * ROWS, width: int = 64) -> None:
        statistics = *(fp32(rows, V // tile) for _ in range(3)), fp32(rows)
        ids = torch.empty(rows, dtype=torch.int32, device="cuda")
        cute_kernels.exponentials(bf16(rows, width), bf16(V, width), fp32(rows), ids, tile, e, *statistics)

    def gradients(rows: int = 4 * ROWS, width: int = 64) -> None:
        e, scale, x = bf16(rows, V), bf16(V // BLOCK, rows), bf16(rows, width)
        cute_kernels.to_hidden(e, scale, bf16(V, width), fp32(rows), x)
        for add in (False, True):
            cute_kernels.to_weight(e, scale, x, fp32(V, width), add)

    def another_size() -> None:
        form(bf16(5 * ROWS, V), 5 * ROWS, 128)
        form(None, 5 * ROWS, 128)
        gradients(5 * ROWS, 128)

    yield ", exponentials", lambda: form(bf16(4 * ROWS, V))
    yield ", scores", functools.partial(form, None)
    yield ", gradients", gradients
    yield ", another size", another_size


def _flash(target: Target, model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """Both directions, with and without a prefix."""
    from .tree_attention import flash_kernels
    from .tree_attention.flash_lists import TILES, BlockLists

    tiles = TILES[target.major].get(model.head_dim)
    if tiles is None:
        return

    def ints(*shape: int, room: int = 0) -> Tensor:
        *rows, last = shape
        return torch.empty_strided(shape, _strides((*rows, last + room)), dtype=torch.int32, device="cuda")

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=model.dtype, device="cuda")

    def lists(count: int, others: int) -> BlockLists:
        return BlockLists(ints(1, 1, count), ints(1, 1, count, others, room=1), ints(1, 1, count),
                          ints(1, 1, count, others, room=1))  # fmt: skip

    def run(backward: bool, offset: int, window: bool, rows: int = ROWS) -> None:
        tile, N = tiles[backward], rows + offset
        counts = -(-rows // tile.rows), -(-N // tile.keys)
        blocks = lists(*(reversed(counts) if backward else counts))
        mask = tuple(ints(1024 * (1 + rows // 768)) for _ in range(1 + (offset > 0) + 2 * window))
        heads, dim = model.heads, model.head_dim
        q, k, v = floats(rows, heads, dim), floats(N, model.kv_heads, dim), floats(N, model.kv_heads, dim)
        options = (blocks, tile, mask, dim**-0.5, window, model.softcap)
        if backward:
            lse = torch.empty(heads, rows, device="cuda")
            flash_kernels.backward(q, q, k, v, q, lse, *options)
        else:
            flash_kernels.forward(q, k, v, *options)

    for window in (False, True)[: 1 + model.window]:
        for offset in (0, PREFIX):
            what = (", window" if window else "") + (", prefix" if offset else "")
            for backward in (False, True):
                name = f", {'backward' if backward else 'forward'}{what}"
                yield name, functools.partial(run, backward, offset, window)

    def another_length() -> None:
        for backward in (False, True):
            run(backward, 0, False, rows=5 * ROWS + 7)

    yield ", another length", another_length


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides
