"""The matrix products of the language-model head around the row kernels, and their gradients.

``logits = hidden weight^T + scale (hidden a^T) b^T`` where a LoRA adapter (a, b) is given; weight + scale b a is never
formed. Products of bf16 and fp16 operands come out in fp32: CUDA multiplies straight into it; the CPU has no such
product, so there operands are widened first (exact; one fp32 copy of the weight for the duration of the call).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        self.weight = self._operand(weight)
        self.bias = weight.new_empty(0, dtype=accumulator) if bias is None else bias.to(accumulator)
        """[V], or [0]: the row kernels add it."""
        self.lora = None if lora is None else HeadLora(self._operand(lora.a), self._operand(lora.b), lora.scale)
        self.dtype = self.weight.dtype
        """Dtype of the operands, hence of the logits' gradient."""

    def _operand(self, t: Tensor) -> Tensor:
        return t if self.mixed else t.to(self.accumulator)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """``out [C, V]``, without bias, in the accumulation dtype; returns ``out``."""
        hidden = self._operand(hidden)
        if self.mixed:
            torch.mm(hidden, self.weight.T, out_dtype=self.accumulator, out=out)
        else:
            torch.mm(hidden, self.weight.T, out=out)
        if self.lora is not None:
            self._add(out, self._project(hidden, self.lora), self.lora.b.T)
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
            torch.mm(d_logits, self.weight, out=out)
            return
        if self.mixed:
            product = torch.mm(d_logits, self.weight, out_dtype=self.accumulator)
        else:
            product = torch.mm(d_logits, self.weight)
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


class HeadGradient:
    """Sums over chunks of the gradients of weight, bias and adapter, in the accumulation dtype; empty if not needed."""

    def __init__(self, head: Head, need_weight: bool, need_bias: bool, need_lora: bool) -> None:
        V, H = head.weight.shape
        new = head.bias.new_zeros
        self.head = head
        self.weight = new((V, H) if need_weight else (0,))
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
