"""Triton backend: launches of the kernels in `triton_chunks`, `triton_scan` and `triton_gradients`.

What depends on the tree is separate from what does not:

1. within chunks, over all chunks and heads at once: the products of a chunk's rows, and the inverse of the delta rule
   (the WY form). A chunk never crosses the end of a segment.
2. the pass over states, over trees, heads and blocks of values at once, in the order of a tree's rows: a segment begins
   with the state with which its parent ends. It computes the outputs too, so besides those that the caller asks for,
   only the states of branch points are in memory, in float32.

Each is one launch for all trees. The backward pass does both again, keeping the states of all chunks while it runs,
then walks each tree from its last segment to its first for the states' gradients; and

3. gradients of queries, keys, decays and beta, over all chunks and heads at once.

Nothing is added atomically, and what a chunk's tile holds depends on its segment alone: a result does not depend on
siblings or on what is packed beside. Operands are multiplied in the dtype of query, key and value if all three are
bfloat16, else in float32 without TF32; decays, sums and states are float32.

Nobody has run these kernels on a GPU: Triton's interpreter runs them in tests, and ``make aot`` compiles them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import machine
from .plan import RecurrencePlan
from .reference import add_rows
from .segment_lists import SegmentLists
from .triton_channels import channel_pairs_kernel, channel_sums_kernel, weights_kernel
from .triton_chunks import BLOCK, inverse_kernel, pairs_kernel
from .triton_gradients import gradients_kernel
from .triton_scan import state_scan_back_kernel, state_scan_kernel

STAGES = 2  # of the pipeline of copies: more would take shared memory of a second program


def padded(width: int) -> int:
    """Return the columns of a tile: a power of two that ``tl.dot`` takes."""
    return max(16, triton.next_power_of_2(width))


class Tiles(NamedTuple):
    """Tiles and warps, chosen by machine code (tests/kernels/aot): no registers spilled in a loop."""

    chunk: int  # rows
    block: int  # values of a program of the pass over states
    warps: int
    part: int  # key channels of a program of the gradients
    values: int  # that it takes at once
    gradient_warps: int


def tiles_for(dim: int, values: int, dtype: torch.dtype, *, major: int) -> Tiles:
    """Return the tiles for key channels, values, the dtype of products and the major compute capability."""
    width = padded(dim)
    if dtype == torch.float32:  # no tensor cores: operands stay in registers
        return Tiles(16, 16, 8 if width <= 128 else 16, min(32, width), 16, 8)
    if major < 9:  # products keep their operands in registers
        return Tiles(64, 16, 4, min(32, width), 32, 8)
    return Tiles(64, 32 if width <= 128 and values > 16 else 16, 4, min(128, width), 32, 8)


def part_of(dim: int, dtype: torch.dtype) -> int:
    """Return how many key channels the products within chunks take at once."""
    return min(16 if dtype == torch.float32 else 64, padded(dim))


class _Launch(NamedTuple):
    """Inputs as the kernels take them, and their sizes."""

    query: Tensor  # [T, G, Dk]
    key: Tensor  # [T, G, Dk]
    value: Tensor  # [T, H, Dv]
    decay: Tensor  # [T, H] or [T, H, Dk] fp32
    beta: Tensor | None  # [T, H] fp32
    initial: Tensor | None  # [J, H, Dk, Dv] fp32
    lists: SegmentLists
    scale: float
    tiles: Tiles

    @staticmethod
    def of(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, initial: Tensor | None,
        plan: RecurrencePlan, scale: float,
    ) -> _Launch:  # fmt: skip
        dtype = _multiplied_in(query, key, value)
        q, k, v = (_last_contiguous(x.to(dtype)) for x in (query, key, value))
        major = machine.gpu_capability(k.device)[0]
        tiles = tiles_for(k.shape[2], v.shape[2], dtype, major=major)
        lists = plan.lists(tiles.chunk)
        if initial is not None:
            initial = initial.float().contiguous()
            if lists.initial is not None:
                initial = initial.index_select(0, lists.initial)
        return _Launch(
            q, k, v, decay.float().contiguous(), None if beta is None else beta.float().contiguous(), initial, lists,
            scale, tiles,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Value heads, key channels and values of a head."""
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]

    @property
    def channels(self) -> bool:
        return self.decay.dim() == 3

    def options(self) -> dict[str, Any]:
        heads, dim, _ = self.sizes
        return {
            "HEADS": heads, "GROUP": heads // self.key.shape[1], "DIM": dim, "CHUNK": self.lists.size,
            "DELTA": self.beta is not None, "num_stages": STAGES, "enable_fp_fusion": True,
        }  # fmt: skip

    def scan_options(self) -> dict[str, Any]:
        _, dim, values = self.sizes
        options = self.options()
        if self.channels:
            options["GROUP"] = 1  # rows of queries and keys are those of value heads
        return {
            **options, "WIDTH": padded(dim), "VALUES": values, "BLOCK": self.tiles.block, "CHANNELS": self.channels,
            "GIVEN": self.lists.num_given > 0, "num_warps": self.tiles.warps,
        }  # fmt: skip

    def chunks(self) -> tuple[Tensor, Tensor]:
        return self.lists.chunk_row, self.lists.chunk_rows

    def segments(self) -> tuple[Tensor, ...]:
        of = self.lists
        return of.row, of.rows, of.chunk, of.source, of.slot, of.run_begin, of.run_end

    def scan_grid(self) -> tuple[int, int, int]:
        heads, _, values = self.sizes
        return triton.cdiv(values, self.tiles.block), heads, self.lists.runs

    def blocks_grid(self) -> tuple[int, int, int]:
        return self.lists.chunks, self.value.shape[1], self.lists.size // BLOCK.value

    def empty(self, *shape: int, like: Tensor | None = None) -> Tensor:
        return (self.decay if like is None else like).new_empty(shape)

    def states(self, count: int, like: Tensor | None = None) -> Tensor:
        return self.empty(count, *self.sizes, like=like)


def _multiplied_in(*operands: Tensor) -> torch.dtype:
    """Return the dtype of products. Triton's interpreter multiplies the bit patterns of bf16 operands; fp16 does not
    hold every state that its inputs give."""
    half = all(x.dtype == torch.bfloat16 for x in operands) and not machine.interpreting()
    return torch.bfloat16 if half else torch.float32


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


class _Chunks(NamedTuple):
    """The products of the chunks that the pass over states reads."""

    pairs: Tensor  # [C, H, size, size]
    inverse: Tensor | None  # [C, H, size, size], with the delta rule
    query: Tensor  # [T, G, Dk]; with one decay a channel [T, H, Dk], scaled and decayed from the chunk's beginning
    key: Tensor  # likewise, but not scaled
    key_to: Tensor | None  # [T, H, Dk] decayed to the chunk's end, with one decay a channel

    @staticmethod
    def of(x: _Launch) -> _Chunks:
        heads, dim, _ = x.sizes
        shape = (x.lists.chunks, heads, x.lists.size, x.lists.size)
        pairs = x.empty(*shape, like=x.key)
        system, inverse = (None, None) if x.beta is None else (x.empty(*shape), torch.empty_like(pairs))
        inputs = x.query, x.key, x.decay, x.beta, pairs, system
        rest = *x.chunks(), *_strides(x.query, x.key), x.scale
        if x.channels:
            decayed = [x.empty(len(x.query), heads, dim, like=x.key) for _ in range(3)]
            channel_pairs_kernel[x.blocks_grid()](
                *inputs, *decayed, *rest, WIDTH=padded(dim), num_warps=4, **x.options()
            )  # fmt: skip
            query, key, key_to = decayed
        else:
            part = part_of(dim, x.key.dtype)
            pairs_kernel[shape[:2]](*inputs, *rest, PART=part, num_warps=4, **x.options())
            query, key, key_to = x.query, x.key, None
        if system is not None:
            inverse_kernel[shape[:2]](
                system, inverse, HEADS=heads, CHUNK=x.lists.size, num_warps=1, num_stages=1, enable_fp_fusion=True
            )
        return _Chunks(pairs, inverse, query, key, key_to)


def tree_recurrence_forward(
    query: Tensor,  # [T, G, Dk]
    key: Tensor,  # [T, G, Dk]
    value: Tensor,  # [T, H, Dv]
    decay: Tensor,  # [T, H] or [T, H, Dk]
    beta: Tensor | None,  # [T, H]
    initial: Tensor | None,  # [R, H, Dk, Dv]
    plan: RecurrencePlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_recurrence_forward`; float32, bfloat16 or float16."""
    x = _Launch.of(query, key, value, decay, beta, initial, plan, scale)
    out, states = value.new_empty(value.shape), x.states(x.lists.slots)
    if value.numel():
        of = _Chunks.of(x)
        state_scan_kernel[x.scan_grid()](
            of.query, of.key, of.key_to, x.value, x.decay, x.beta, of.pairs, of.inverse, x.initial, states,
            out, None, None,
            *x.segments(), *_strides(of.query, of.key, x.value), x.scale, OUT=True, **x.scan_options(),
        )  # fmt: skip
    return out, _ends(states, x.lists, plan)


def _ends(states: Tensor, lists: SegmentLists, plan: RecurrencePlan) -> Tensor:
    return states[: plan.num_ends] if lists.ends is None else states.index_select(0, lists.ends)


def tree_recurrence_backward(
    grad_out: Tensor,  # [T, H, Dv]
    grad_ends: Tensor,  # [E, H, Dk, Dv]
    query: Tensor,  # [T, G, Dk]
    key: Tensor,  # [T, G, Dk]
    value: Tensor,  # [T, H, Dv]
    decay: Tensor,  # [T, H] or [T, H, Dk]
    beta: Tensor | None,  # [T, H]
    initial: Tensor | None,  # [R, H, Dk, Dv]
    plan: RecurrencePlan,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Like `reference.tree_recurrence_backward`; float32, bfloat16 or float16."""
    if not value.numel():
        arguments = query, key, value, decay, beta, initial
        return tuple(None if t is None else torch.zeros_like(t) for t in arguments)
    x = _Launch.of(query, key, value, decay, beta, initial, plan, scale)
    heads, dim, values = x.sizes
    lists, rows, upstream = x.lists, len(query), grad_out.to(x.key.dtype).contiguous()
    of = _Chunks.of(x)

    new, starts = x.empty(*value.shape, like=x.key), x.states(lists.chunks, like=x.key)
    state_scan_kernel[x.scan_grid()](
        of.query, of.key, of.key_to, x.value, x.decay, x.beta, None, of.inverse, x.initial, x.states(lists.slots),
        None, new, starts,
        *x.segments(), *_strides(of.query, of.key, x.value), x.scale, OUT=False, **x.scan_options(),
    )  # fmt: skip

    grad_states, grad_initial = _at_ends(x, grad_ends, plan), x.states(lists.num_given)
    end_gradients, grad_value = torch.empty_like(starts), x.empty(*value.shape)
    grad_x = None if beta is None else torch.empty_like(new)
    state_scan_back_kernel[x.scan_grid()](
        upstream, of.query, of.key, of.key_to, x.decay, x.beta, of.pairs, of.inverse, grad_states, grad_initial,
        end_gradients, grad_x, grad_value,
        *x.segments(), *_strides(of.query, of.key), x.scale, **x.scan_options(),
    )  # fmt: skip

    grad_query, grad_key = (x.empty(rows, heads, dim) for _ in range(2))
    grad_removed = None if beta is None or not x.channels else torch.empty_like(grad_key)
    if x.channels:
        _sum_channels(x, upstream, new, grad_x, grad_query, grad_key, grad_removed)
    parts = triton.cdiv(padded(dim), x.tiles.part)
    grad_decay = torch.empty_like(grad_key)[None] if x.channels else x.empty(parts, rows, heads)
    grad_beta = None if beta is None else x.empty(parts, rows, heads)
    gradients_kernel[(lists.chunks, heads, parts)](
        upstream, x.query, x.key, x.value, x.decay, x.beta, new, grad_x, starts, end_gradients,
        grad_query, grad_key, grad_removed, grad_decay, grad_beta, *x.chunks(), rows * heads,
        *_strides(x.query, x.key, x.value), x.scale, PART=x.tiles.part, VALUES=values, BLOCK=x.tiles.values,
        CHANNELS=x.channels, num_warps=x.tiles.gradient_warps, **x.options(),
    )  # fmt: skip

    def of_groups(gradient: Tensor, like: Tensor) -> Tensor:
        return gradient.view(rows, like.shape[1], -1, dim).sum(2).to(like.dtype)

    return (
        of_groups(grad_query, query), of_groups(grad_key, key), grad_value.to(value.dtype),
        grad_decay.sum(0).to(decay.dtype),
        None if beta is None or grad_beta is None else grad_beta.sum(0).to(beta.dtype),
        None if initial is None else _of_given(grad_initial, initial, lists),
    )  # fmt: skip


def _at_ends(x: _Launch, grad_ends: Tensor, plan: RecurrencePlan) -> Tensor:  # [slots, H, Dk, Dv]
    """Return the gradients of the states' slots before the pass over states: those of the ends."""
    grad_states = x.states(x.lists.slots).zero_()
    if x.lists.ends is None:
        grad_states[: plan.num_ends] = grad_ends
    else:
        add_rows(grad_states, x.lists.ends, grad_ends.float())
    return grad_states


def _sum_channels(
    x: _Launch,
    upstream: Tensor,  # [T, H, Dv]
    new: Tensor,  # [T, H, Dv]
    grad_x: Tensor | None,  # [T, H, Dv]
    grad_query: Tensor,  # [T, H, Dk], out, like the next two
    grad_key: Tensor,
    grad_removed: Tensor | None,
) -> None:
    """Fill the gradients within chunks where each channel decays by itself."""
    lists, (heads, dim, values) = x.lists, x.sizes
    square = lists.chunks, heads, lists.size, lists.size
    written, removed = x.empty(*square), None if grad_removed is None else x.empty(*square)
    weights_kernel[square[:2]](
        upstream, new, grad_x, written, removed, *x.chunks(), x.scale, HEADS=heads, VALUES=values,
        BLOCK=x.tiles.values, CHUNK=lists.size, DELTA=x.beta is not None, num_warps=4, num_stages=STAGES,
        enable_fp_fusion=True,
    )  # fmt: skip
    channel_sums_kernel[x.blocks_grid()](
        x.query, x.key, x.decay, x.beta, written, removed, grad_query, grad_key, grad_removed, *x.chunks(),
        *_strides(x.query, x.key), WIDTH=padded(dim), num_warps=4, **x.options(),
    )  # fmt: skip


def _of_given(gradients: Tensor, initial: Tensor, lists: SegmentLists) -> Tensor:  # [J, ...] -> [R, ...]
    if lists.initial is not None:
        total = gradients.new_zeros(initial.shape)
        add_rows(total, lists.initial, gradients)
        gradients = total
    return gradients.to(initial.dtype)
