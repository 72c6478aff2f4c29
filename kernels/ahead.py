"""Compiles the kernels of rollouts and training for a GPU that is not there, into the caches that a run reads.

    for built in build(TARGETS["90a"], Model(heads=16, kv_heads=8, head_dim=128, vocab=151936), flash=False):
        print(built.name, built.seconds, built.compiled)

Each op runs once on uninitialised tensors, with launches replaced by compilation, so the launch code itself decides
what is compiled. Triton keeps its kernels in its own folder (``TRITON_CACHE_DIR``, ``~/.triton/cache``), flash-attn 4
in `kernel_cache.directory`; the names of both contain the versions of everything that the kernels depend on.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

ROWS, PREFIX = 600, 100  # tokens of the launches; kernels do not depend on them
LONG = 34 * 128  # tokens, enough that Triton's backward pass cuts a block of keys and adds up its parts


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
class Recurrent:
    """The properties of recurrent layers that kernels depend on; without ``heads`` there is a convolution alone."""

    rule: str  # delta, kimi (one decay a channel) or mamba
    heads: int  # of values
    groups: int  # heads of keys
    dim: int  # key channels of a head
    values: int
    taps: int  # of the convolution
    channels: int  # of the convolution


@dataclass(frozen=True)
class Model:
    """The properties of a model that kernels depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None  # of attention
    window: bool = False  # True if some layers have a sliding window
    logit_softcap: float | None = None
    page: int = 16  # keys of a page of the KV cache
    hidden: int = 0  # width of its layers; 0: the passes between their products are not built
    recurrent: Recurrent | None = None


class Built(NamedTuple):
    name: str
    seconds: float
    compiled: int  # kernels that were not in a cache before


Steps = Iterable[tuple[str, Callable[[], object]]]


def build(
    target: Target, model: Model, *, flash: bool, filters: Sequence[tuple[str, ...]] = ((),), losses: Steps = ()
) -> Iterator[Built]:
    """Fill the caches; with ``flash`` that of flash-attn 4 too, which must be installed.

    Args:
        target: the GPU.
        model: the model.
        flash: build flash-attn 4's kernels too.
        filters: combinations of filters to sample with, each a tuple of argument names of `sample_tokens`.
        losses: further launches by name, on tensors of the CPU; see `head_of`.

    Raises:
        RuntimeError: this process has imported CuTe DSL for another target, or interprets Triton.
    """
    from .machine import interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter replaces the compiler; unset it.")
    with launching_nothing(target) as compiled:
        for name, step in steps(target, model, flash=flash, filters=filters, losses=losses):
            yield _timed(name, step, compiled)
    if flash:
        yield from build_hopper(target, model)


def steps(
    target: Target, model: Model, *, flash: bool, filters: Sequence[tuple[str, ...]] = ((),), losses: Steps = ()
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions by name that launch each of Triton's kernels once; arguments as `build`."""
    yield "head", functools.partial(_head, model)
    yield from losses
    for name, step in _attention(target, model):
        yield f"attention, triton{name}", step
    if flash:
        yield "attention, flash: lists", functools.partial(_lists, target, model)
    if model.hidden:
        yield "layers", functools.partial(_layers, model)
    if model.recurrent is not None:
        for with_states in (False, True):
            name = f"recurrent layers{', states given' if with_states else ''}"
            yield name, functools.partial(_recurrent, model.recurrent, model.dtype, with_states)
    yield "decode attention", functools.partial(_decode, model)
    for names in filters:
        yield f"sampling{''.join(f', {name}' for name in names)}", functools.partial(_sample, model, names)


def build_hopper(target: Target, model: Model, among: Collection[str] = ()) -> Iterator[Built]:
    """Compile the kernels of flash-attn 4: those of the steps ``among``, or all."""
    if "cutlass" in sys.modules and os.environ.get("CUTE_DSL_ARCH") != target.arch:
        raise RuntimeError(f"CuTe DSL is imported for another GPU than {target.arch}; build in a process of its own.")
    os.environ |= {  # read once, at the import
        "CUTE_DSL_ARCH": target.arch,
        "FLASH_ATTENTION_ARCH": target.arch,
        "FLASH_ATTENTION_NUM_SMS": str(target.sms),
    }
    with _cute_compiles(target) as compiled:
        for name, step in ((f"attention, flash{name}", step) for name, step in _flash(target, model)):
            if not among or name in among:
                yield _timed(name, step, compiled)


def _timed(name: str, step: Callable[[], object], compiled: list[str]) -> Built:
    before, began = len(compiled), time.perf_counter()
    step()
    return Built(name, time.perf_counter() - began, len(compiled) - before)


@contextmanager
def launching_nothing(target: Target) -> Iterator[list[str]]:
    """Make ops run on Triton, whose launches compile for ``target`` and do no more; the head's products do nothing.

    Yields the names of the kernels that were not in a cache.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from . import dispatch
    from .linear_logprob import chunked
    from .linear_logprob.head import Head, HeadGradient
    from .linear_policy_loss import fused
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

    original = Head.__init__

    def as_on_a_gpu(self: Head, weight: Tensor, *rest: Any) -> None:
        original(self, weight, *rest)
        self.bf16, self.dtype = False, weight.dtype

    with ExitStack() as stack:
        stack.enter_context(dispatch.use_backend("triton"))
        stack.enter_context(mock.patch.object(dispatch, "_unusable", return_value=None))
        stack.enter_context(mock.patch.object(Head, "__init__", as_on_a_gpu))
        stack.enter_context(mock.patch.object(Head, "logits", lambda self, hidden, out: out))
        stack.enter_context(mock.patch.object(Head, "to_hidden", return_value=None))
        stack.enter_context(mock.patch.object(HeadGradient, "add", return_value=None))
        stack.enter_context(mock.patch.object(fused, "add_gradient", return_value=None))
        stack.enter_context(
            mock.patch.object(chunked, "rows_with_gradient", return_value=None)
        )  # a CPU leaves rows out
        stack.enter_context(mock.patch.object(driver, "_active", active))
        stack.enter_context(mock.patch.object(jit.JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(knobs.compilation, "listener", listener))
        stack.enter_context(mock.patch.object(triton, "_tiles", tiles))
        yield compiled


def head_of(model: Model, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Return hidden states and the head's weight, of a width that its kernels do not see."""
    weight = torch.empty(model.vocab, 8, dtype=model.dtype, requires_grad=True)
    return torch.empty(rows, 8, dtype=model.dtype, requires_grad=True), weight


def _head(model: Model) -> None:
    """Launch scoring, with entropies and without, and the gradient of either."""
    from .linear_logprob import linear_logprob

    hidden, weight = head_of(model)
    target = torch.zeros(len(hidden), dtype=torch.long)
    for want in ((), ("entropy",)):
        out = linear_logprob(hidden, weight, target, softcap=model.logit_softcap, want=want)
        torch.stack([t.sum() for t in (out.logprob, out.entropy) if t is not None]).sum().backward()


def _layers(model: Model, rows: int = ROWS) -> None:
    """Launch norms of layers and of heads, whose weights are trained or frozen, rotary embedding and the gated unit."""
    from .layer_ops import rms_norm, rotate, silu_mul

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=model.dtype, requires_grad=True)

    for width in (model.hidden, model.head_dim):
        for weight in (empty(width), empty(width).detach()):
            rms_norm(empty(rows, width), weight, 1e-6).sum().backward()
    q, k = (empty(1, rows, heads, model.head_dim).transpose(1, 2) for heads in (model.heads, model.kv_heads))
    angles = torch.empty(1, rows, model.head_dim, dtype=model.dtype)
    torch.autograd.backward(rotate(q, k, angles, angles), (q.detach(), k.detach()))
    silu_mul(empty(rows, 16), empty(rows, 16)).sum().backward()


def _recurrent(of: Recurrent, dtype: torch.dtype, with_states: bool, rows: int = ROWS) -> None:
    """Launch the pass over a tree of two segments and its convolution, whose rows are float32, both ways."""
    import numpy as np

    from .tree_recurrence import RecurrencePlan, Segments, tree_convolution, tree_recurrence

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    ends, start = np.zeros(1, np.int64), np.array([0, rows // 2])
    lengths = np.array([rows // 2, rows - rows // 2])
    segments = Segments(start, lengths, np.array([-1, 0]), np.array([-1 + with_states, -1]))
    plan = RecurrencePlan.make(segments, ends=ends, states=int(with_states))
    history = empty(1, of.taps - 1, of.channels) if with_states else None
    weight, bias = empty(of.channels, of.taps), empty(of.channels)
    for b in (None, bias):
        tree_convolution(empty(rows, of.channels), weight, b, plan, history=history)[0].sum().backward()
    if of.heads:
        key = (rows, of.groups, of.dim)
        decay = empty(rows, of.heads, *([of.dim] if of.rule == "kimi" else []))
        beta = None if of.rule == "mamba" else empty(rows, of.heads)
        q, k, v = (empty(*shape, dtype=dtype) for shape in (key, key, (rows, of.heads, of.values)))
        first = empty(1, of.heads, of.dim, of.values) if with_states else None
        out, _ = tree_recurrence(q, k, v, decay, beta, plan, initial=first)
        out.sum().backward()


def _decode(model: Model) -> None:
    """Launch decoding with a shared page and one of each row."""
    import numpy as np

    from .tree_decode import DecodePlan, tree_decode_attention

    columns = ([0, 1, 2, 3], [0, 1, 2], [0, 0, 0], [3, 1, 2], [0, 3, 3], [0, 0, 1], [2, 1, 2], [3, 4])
    plan = DecodePlan.from_host(
        [np.array(column, np.int32) for column in columns], torch.device("cpu"), [model.heads // model.kv_heads]
    )
    q = torch.empty(2, model.heads, model.head_dim, dtype=model.dtype)
    pages = torch.empty(3, model.page, model.kv_heads, model.head_dim, dtype=model.dtype)
    for window in _windows(model):
        tree_decode_attention(q, pages, pages, plan, window=window, softcap=model.softcap)


def _sample(model: Model, filters: tuple[str, ...]) -> None:
    from .sampling import sample_tokens

    rows, ones = torch.zeros(2, dtype=torch.long), torch.ones(2)
    options: dict[str, Any] = {name: ones.int() if name == "top_k" else ones for name in filters}
    sample_tokens(torch.empty(2, model.vocab), temperature=ones, seed=rows, step=rows, **options)


def _attention(target: Target, model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches of Triton's kernels of both directions, for the model's heads and those that flash-attn is
    compared on."""
    from .tree_attention import triton
    from .tree_attention.reference import Scoring

    def both(heads: int, kv_heads: int, window: int | None) -> None:
        shapes = [(LONG, heads, model.head_dim), *[(LONG, kv_heads, model.head_dim)] * 2]
        q, k, v = (torch.empty(s, dtype=model.dtype) for s in shapes)
        ends = torch.full((LONG,), LONG, dtype=torch.int32)
        scoring = Scoring(ends, torch.zeros_like(ends) if window else None, 1.0, window, model.softcap)
        out, lse = triton.tree_attention_forward(q, k, v, scoring)
        triton.tree_attention_backward(q, q, k, v, out, lse, scoring)

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
    """Make flash-attn compile and launch nothing; yields the names of the kernels that were not in its cache."""
    import warnings

    from .tree_attention import flash_kernels  # noqa: F401  # its cache's settings, before flash-attn

    import cutlass  # isort: skip
    from flash_attn.cute import tile_scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Absent:
        """Answers to questions about the GPU while compiling for it."""

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
        stack.enter_context(mock.patch.object(cutlass.utils, "HardwareInfo", Absent))
        stack.enter_context(mock.patch.object(tile_scheduler, "HardwareInfo", Absent))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # fake tensors are asked for their addresses
        stack.enter_context(FakeTensorMode())
        yield compiled


def _flash(target: Target, model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches of both directions, with and without a prefix."""
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
