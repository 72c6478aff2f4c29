"""The matrix products of the language-model head around the row kernels, and their gradients.

``logits = hidden weight^T + scale (hidden a^T) b^T`` where a LoRA adapter (a, b) is given; weight + scale b a is never
formed. Products of bf16 and fp16 operands are returned in fp32: CUDA multiplies directly into it, and so do the CPU's
kernels for the logits of a bf16 head. Elsewhere operands are widened first, which is exact, a part of the weight at a
time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..libraries import load_library


class HeadLora(NamedTuple):
    """A low-rank adapter of the head, in the head's dtype: the weight acts as ``weight + scale b a``."""

    a: Tensor  # [r, H]
    b: Tensor  # [V, r]
    scale: float


class Head:
    """Weight, bias and adapter of the head, prepared for its products."""

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
        """[V], or [0] without a bias; the row kernels add it."""
        self.lora = None if lora is None else HeadLora(self._operand(lora.a), self._operand(lora.b), lora.scale)
        self.dtype = weight.dtype if self.mixed else accumulator
        """Dtype of the operands, and hence of the logits' gradient."""
        self.bf16 = weight.dtype == torch.bfloat16 and accumulator == torch.float32 and has_bf16_gemm(weight)
        """The CPU's kernels multiply the bf16 weight as it is."""

    @classmethod
    def of_flat(
        cls,
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        lora_a: Tensor | None,  # [r, H]
        lora_b: Tensor | None,  # [V, r]
        lora_scale: float,
        accumulator: torch.dtype,
    ) -> Head:
        """Return the head of an op's arguments, which hold the adapter's parts one by one."""
        lora = None if lora_a is None or lora_b is None else HeadLora(lora_a, lora_b, lora_scale)
        return cls(weight, bias, lora, accumulator)

    def _operand(self, t: Tensor) -> Tensor:
        return t if self.mixed else t.to(self.accumulator)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Fill ``out [C, V]`` with the logits without bias, in the accumulation dtype, and return it."""
        if self.accumulator == torch.float32 and dispatch.named("invariant", out.device):
            _in_one_order(hidden.to(self.weight.dtype).contiguous(), self.weight.contiguous(), None, out)
        elif self.bf16 and hidden.dtype == torch.bfloat16:
            torch.ops.rolltree_cpu.bf16_logits(_rows(hidden), _rows(self.weight), out)
        elif self.mixed:
            torch.mm(hidden, self.weight.T, out_dtype=self.accumulator, out=out)
        elif self.weight.dtype == torch.float32 and own_product(hidden, self.weight, out):
            torch.ops.rolltree_cpu.linear(hidden.float().contiguous(), self.weight, None, out)
        else:
            rows, sizes = self._operand(hidden), column_parts(len(self.weight), out.device)
            for weight, part in zip(self.weight.split(sizes), out.split(sizes, 1), strict=True):
                torch.mm(rows, self._operand(weight).T, out=part)
        if self.lora is not None:
            self._add(out, self._project(self._operand(hidden), self.lora), self.lora.b.T)
        return out

    def rows(self, target: Tensor) -> Tensor:
        """Return rows ``[..., H]`` of the effective weight, in the accumulation dtype."""
        rows = self.weight[target].to(self.accumulator)
        if self.lora is not None:
            a, b, scale = self.lora
            rows = rows + (scale * b[target].to(self.accumulator)) @ a.to(self.accumulator)
        return rows

    def to_hidden(self, d_logits: Tensor, out: Tensor) -> None:
        """Fill ``out [C, H]`` with the gradient of hidden, in the dtype of ``out``."""
        if self.lora is None and out.dtype == self.dtype == self.weight.dtype:
            torch.mm(d_logits, self.weight, out=out)
            return
        product = self.times_weight(d_logits)
        if self.lora is not None:
            a, b, scale = self.lora
            self._add(product, self._operand(scale * (d_logits @ b)), a)
        out.copy_(product)

    def _project(self, hidden: Tensor, lora: HeadLora) -> Tensor:  # [C, r]
        return lora.scale * (hidden @ lora.a.T)

    def times_weight(self, d_logits: Tensor) -> Tensor:  # [C, V] -> [C, H]
        """Return ``d_logits weight`` in the accumulation dtype, without a widened copy of the whole weight."""
        if self.mixed or self.weight.dtype == self.dtype:
            return self._product(d_logits, self.weight)
        product = d_logits.new_zeros((len(d_logits), self.weight.shape[1]))
        for weight, part in zip(self.weight.split(WIDENED_AT_ONCE), d_logits.split(WIDENED_AT_ONCE, 1), strict=True):
            product.addmm_(part, weight.to(self.accumulator))
        return product

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left right`` in the accumulation dtype."""
        return torch.mm(left, right, out_dtype=self.accumulator) if self.mixed else torch.mm(left, right)

    def _add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Compute ``out += left right``, ``out`` in the accumulation dtype."""
        if self.mixed:
            torch.addmm(out, left, right, out_dtype=self.accumulator, out=out)
        else:
            out.addmm_(left, right)


_in_one_order = dispatch.imported(__package__.rpartition(".")[0] + ".linear", "triton", "product")

VOCABULARY_AT_ONCE = 1024
"""Columns of a product of logits on a CPU: MKL is 5 to 18 % faster in parts of 512 to 2048, with the same bits."""

LEAST_COLUMNS = 48
"""Columns from which MKL's products have the sums of csrc/cpu/products/few_rows.cpp, for more rows than `few_rows`."""

WIDENED_AT_ONCE = 4096
"""Rows of a weight that are widened at a time for a product."""


@functools.cache
def few_rows() -> int:
    """Return the most rows for which csrc/cpu/products/few_rows.h makes products on this CPU; 0 if it is not built."""
    return int(torch.ops.rolltree_cpu.few_rows()) if load_library("cpu") else 0


def own_product(hidden: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Return whether csrc/cpu/products/few_rows.h makes the product."""
    return (
        weight.is_contiguous()
        and out.stride(1) == 1
        and dispatch.usable("cpu", weight.device)
        and few_rows() > 0
        and (len(hidden) <= few_rows() or len(weight) < LEAST_COLUMNS)
    )


def column_parts(V: int, device: torch.device) -> list[int]:
    """Return the numbers of columns of the products that make up one of V columns."""
    if device.type != "cpu" or V < VOCABULARY_AT_ONCE + LEAST_COLUMNS:
        return [V]
    parts = [VOCABULARY_AT_ONCE] * (V // VOCABULARY_AT_ONCE)
    rest = V % VOCABULARY_AT_ONCE
    if rest >= LEAST_COLUMNS:
        return [*parts, rest]
    return [*parts[:-1], parts[-1] + rest]


def softcapped(logits: Tensor, softcap: float) -> Tensor:  # [N, V] fp32
    """Return ``softcap tanh(logits / softcap)``; on a CPU in place, with the bits that `linear_logprob` has."""
    if not dispatch.usable("cpu", logits.device):
        return softcap * torch.tanh(logits / softcap)
    torch.ops.rolltree_cpu.cap_logits(logits, softcap)
    return logits


def has_equal_bits(weight: Tensor) -> bool:
    """Return whether a row's logits on a CPU have the same bits whatever the number of rows: those of ``weight [V, H]``
    in bf16, and in fp32 where the order of a library's sums is known (csrc/cpu/products/library_order.cpp)."""
    if weight.device.type != "cpu" or not load_library("cpu"):
        return False
    if weight.dtype == torch.bfloat16:
        return True
    few = len(weight) < LEAST_COLUMNS
    return weight.dtype == torch.float32 and (few or int(torch.ops.rolltree_cpu.library_block(weight.shape[1])) > 0)


def _rows(t: Tensor) -> Tensor:  # [N, K]
    """Return ``t`` with the elements of each row next to each other; the rows may lie apart."""
    return t if t.stride(1) == 1 else t.contiguous()


def has_bf16_gemm(weight: Tensor) -> bool:
    """Return whether csrc/cpu/products/few_rows.cpp makes the logits of a bf16 ``weight``."""
    return weight.device.type == "cpu" and load_library("cpu")


class HeadGradient:
    """Sums over chunks of the gradients of weight, bias and adapter, in the accumulation dtype.

    The first product of each becomes its sum, so nothing is filled with zeros first; that of the weight is added to
    ``into`` [V, H] if given.
    """

    def __init__(
        self, head: Head, need_weight: bool, need_bias: bool, need_lora: bool, into: Tensor | None = None
    ) -> None:
        self.head = head
        self.need_weight, self.need_bias = need_weight, need_bias
        self.need_lora = need_lora and head.lora is not None
        self.sums: dict[str, Tensor] = {} if into is None else {"weight": into}

    @property
    def needed(self) -> bool:
        """True if any of the gradients is needed."""
        return self.need_weight or self.need_bias or self.need_lora

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add the gradient of a chunk: ``d_logits [C, V]`` in the operands' dtype, ``hidden [C, H]``."""
        head = self.head
        hidden = head._operand(hidden)
        if self.need_weight:
            self.add_product("weight", d_logits.T, hidden)
        if self.need_bias:
            self.add_sum("bias", d_logits.sum(0, dtype=head.accumulator))
        if self.need_lora and head.lora is not None:
            self.add_product("b", d_logits.T, head._project(hidden, head.lora))
            self.add_product("a", (head.lora.scale * (d_logits @ head.lora.b)).T, hidden)

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        if name in self.sums:
            self.head._add(self.sums[name], left, right)
        else:
            self.sums[name] = self.head._product(left, right)

    def add_sum(self, name: str, values: Tensor) -> None:
        """Add the sum over a chunk of the gradient of weight, bias, a or b."""
        if name in self.sums:
            self.sums[name] += values
        else:
            self.sums[name] = values

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of weight ``[V, H]``, bias ``[V]``, a ``[r, H]`` and b ``[V, r]``; ``[0]`` if not
        needed."""
        weight, lora = self.head.weight, self.head.lora
        shapes: dict[str, tuple[bool, tuple[int, ...]]] = {
            "weight": (self.need_weight, weight.shape),
            "bias": (self.need_bias, weight.shape[:1]),
            "a": (self.need_lora, (0,) if lora is None else lora.a.shape),
            "b": (self.need_lora, (0,) if lora is None else lora.b.shape),
        }

        def result(name: str) -> Tensor:
            needed, shape = shapes[name]
            if needed and name in self.sums:
                return self.sums[name]
            return weight.new_zeros(shape if needed else (0,), dtype=self.head.accumulator)

        return result("weight"), result("bias"), result("a"), result("b")
