"""The matrix products of the language-model head around the row kernels, and their gradients.

``logits = hidden weight^T + scale (hidden a^T) b^T`` where a LoRA adapter (a, b) is given; weight + scale b a is never
formed. Products of bf16 and fp16 operands come out in fp32: CUDA multiplies straight into it, and so does a CPU with
AMX tiles for the logits of a bf16 head. Elsewhere operands are widened first (exact; one fp32 copy of the weight for
the duration of the call).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from rolltree.kernels import dispatch


class HeadLora(NamedTuple):
    """A low-rank adapter of the head, of the head's dtype: the weight acts as ``weight + scale b a``."""

    a: Tensor  # [r, H]
    b: Tensor  # [V, r]
    scale: float


class Head:
    """Weight, bias and adapter of the head, ready to multiply."""

    def __init__(
        self,
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        lora: HeadLora | None,
        accumulator: torch.dtype,
    ) -> None:
        self.mixed = weight.is_cuda and weight.dtype != accumulator
        self.accumulator = accumulator
        self.weight = weight
        self.bias = weight.new_empty(0, dtype=accumulator) if bias is None else bias.to(accumulator)
        """[V], or [0]: the row kernels add it."""
        self.lora = None if lora is None else HeadLora(self._operand(lora.a), self._operand(lora.b), lora.scale)
        self.dtype = weight.dtype if self.mixed else accumulator
        """Dtype of the operands, hence of the logits' gradient."""
        self.tiles = weight.dtype == torch.bfloat16 and accumulator == torch.float32 and has_bf16_gemm(weight)

    @functools.cached_property
    def operand(self) -> Tensor:
        """The weight as the products take it."""
        return self._operand(self.weight)

    def _operand(self, t: Tensor) -> Tensor:
        return t if self.mixed else t.to(self.accumulator)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """``out [C, V]``, without bias, in the accumulation dtype; returns ``out``."""
        if self.tiles:
            torch.ops.rolltree_cpu.bf16_logits(hidden.contiguous(), self.weight.contiguous(), out)
        elif self.mixed:
            torch.mm(hidden, self.weight.T, out_dtype=self.accumulator, out=out)
        else:
            torch.mm(self._operand(hidden), self.operand.T, out=out)
        if self.lora is not None:
            self._add(out, self._project(self._operand(hidden), self.lora), self.lora.b.T)
        return out

    def rows(self, target: Tensor) -> Tensor:
        """Rows ``[..., H]`` of the effective weight, in the accumulation dtype."""
        rows = self.weight[target].to(self.accumulator)
        if self.lora is not None:
            a, b, scale = self.lora
            rows = rows + (scale * b[target].to(self.accumulator)) @ a.to(self.accumulator)
        return rows

    def to_hidden(self, d_logits: Tensor, out: Tensor) -> None:
        """``out [C, H]``: gradient of hidden, in the dtype of ``out``."""
        if self.lora is None and out.dtype == self.dtype:
            torch.mm(d_logits, self.operand, out=out)
            return
        if self.mixed:
            product = torch.mm(d_logits, self.operand, out_dtype=self.accumulator)
        else:
            product = torch.mm(d_logits, self.operand)
        if self.lora is not None:
            a, b, scale = self.lora
            self._add(product, self._operand(scale * (d_logits @ b)), a)
        out.copy_(product)

    def _project(self, hidden: Tensor, lora: HeadLora) -> Tensor:  # [C, r]
        return lora.scale * (hidden @ lora.a.T)

    def _add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``out += left right``, ``out`` in the accumulation dtype."""
        if self.mixed:
            torch.addmm(out, left, right, out_dtype=self.accumulator, out=out)
        else:
            out.addmm_(left, right)


def has_bf16_gemm(weight: Tensor) -> bool:
    """Whether logits of a bf16 ``weight`` are multiplied on the tiles of this CPU."""
    return weight.device.type == "cpu" and dispatch.load_library("cpu") and torch.ops.rolltree_cpu.has_bf16_gemm()


class HeadGradient:
    """Sums over chunks of the gradients of weight, bias and adapter, in the accumulation dtype; empty if not needed.

    That of the weight is added to ``into`` [V, H] where given.
    """

    def __init__(
        self, head: Head, need_weight: bool, need_bias: bool, need_lora: bool, into: Tensor | None = None
    ) -> None:
        V, H = head.weight.shape
        new = head.bias.new_zeros
        self.head = head
        self.weight = new((V, H) if need_weight else (0,)) if into is None else into
        self.bias = new(V if need_bias else 0)
        rank = len(head.lora.a) if need_lora and head.lora is not None else 0
        self.a = new((rank, H) if rank else (0,))
        self.b = new((V, rank) if rank else (0,))

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Take in a chunk: ``d_logits [C, V]`` in the operands' dtype, ``hidden [C, H]``."""
        head = self.head
        hidden = head._operand(hidden)
        if len(self.weight):
            head._add(self.weight, d_logits.T, hidden)
        if len(self.bias):
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)
        if len(self.a) and head.lora is not None:
            head._add(self.b, d_logits.T, head._project(hidden, head.lora))
            head._add(self.a, (head.lora.scale * (d_logits @ head.lora.b)).T, hidden)
