"""The head's products around bf16 exponentials instead of fp32 logits: what is combined between them, and how.

With logits ``z = h W^T / temperature`` the first product leaves, for each row and tile of columns, an integer ``k``
near the tile's largest ``z log2 e``, ``e = 2^d`` in bf16 with ``d = z log2 e - k``, and from the fp32 accumulators
``sum e``, ``sum e d`` and, at the target, ``d``. With ``m = max k`` and ``g = k - m`` of a row, over its tiles,

    S = sum 2^g sum e          log2 p_y = d_y + g_y - log2 S          lse = (m + log2 S) / log2 e
    entropy = (log2 S - sum 2^g (sum e d + g sum e) / S) / log2 e

which is as exact as fp32 logits: powers of two by integers round nothing. The gradient of the logits is then

    dL/du_j = a (1[j = y] - p_j) / temperature = v 2^g e_j,       v = -a / (temperature S)

once ``e_y`` is ``(p_y - 1) S / 2^g`` (rounded to bf16 when its two terms have cancelled), so it is never written: the
products read ``e``, scaled by ``2^g``, which is exact in bf16, and by v: dh in fp32 after the sum, dW = e^T (v h).
With ``b = dL / d entropy``, and of a row and tile ``B = 2^g b / log2 e`` and
``A = 2^g (a + b (entropy + (g - log2 S) / log2 e))``,

    dL/du_j = (a 1[j = y] - p_j (a + b (log p_j + entropy))) / temperature = v e_j (A + B log2 e_j)

for ``v = -1 / (temperature S)``; the target's is found from fp32. A bf16 exponential has its own logarithm to 2^-9, no
worse than it has the probability itself. As the factor is no power of two, it is applied to ``e`` in its place.

Moves 2 V bytes a row in each product and ``12 V / tile`` of statistics; rows are multiplied in multiples of 128. Where
the products cannot scale an operand on its way, ``e`` is scaled in its place between them: 4 V bytes a row more, as
with an entropy, and the same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 128
"""Rows and columns are multiplied in multiples of it."""

TILES = (192, 256, 128)
"""Columns of a tile of the first product, the first that divides the vocabulary."""

PINGPONG = 192
"""Up to this many columns two warp groups take turns: the epilogue of one runs under the product of the other."""

BLOCK = 64
"""Columns that a value of `Products.to_hidden`'s ``scale`` stands for."""

FAR = 100.0
"""Tiles are at most this many powers of two below their row's largest: below are only probabilities under 2^-100, and
``e_y`` stays within bf16 however unlikely the target is."""

LN2 = 0.6931471805599453


class Products(Protocol):
    """The kernels: `cute_kernels`. C is a multiple of `ROWS`; all tensors are contiguous."""

    def scale_operands(self, device: torch.device) -> bool:
        """Whether the other two products take a ``scale``; else they read ``e`` as it is, and get None."""

    def apply_entropy(
        self,
        e: Tensor,  # [C, V] bf16, out: e (at_one + slope log2 e), and 0 where e is 0
        at_one: Tensor,  # [C, V / tile] fp32
        slope: Tensor,  # [C, V / tile] fp32
        tile: int,
    ) -> None: ...

    def exponentials(
        self,
        x: Tensor,  # [C, H] bf16
        weight: Tensor,  # [V, H] bf16
        inverse: Tensor,  # [C] fp32: 1 / temperature
        target: Tensor,  # [C] int32, -1: none
        tile: int,
        e: Tensor | None,  # [C, V] bf16, out: finite whatever the logits are; None: not wanted
        exponent: Tensor,  # [C, V / tile] fp32, out: k
        total: Tensor,  # [C, V / tile] fp32, out: sum e
        weighted: Tensor,  # [C, V / tile] fp32, out: sum e d
        at_target: Tensor,  # [C] fp32, out: d of the target; left as it is where there is none
    ) -> None: ...

    def to_hidden(
        self,
        e: Tensor,  # [C, V] bf16
        scale: Tensor | None,  # [V / BLOCK, C] bf16, powers of two
        weight: Tensor,  # [V, H] bf16
        v: Tensor,  # [C] fp32
        out: Tensor,  # [C, H] bf16, out: v (scale e) weight
    ) -> None: ...

    def to_weight(
        self,
        e: Tensor,  # [C, V] bf16
        scale: Tensor | None,  # [V / BLOCK, C] bf16
        x: Tensor,  # [C, H] bf16
        out: Tensor,  # [V, H] fp32, out: (scale e)^T x
        add: bool,  # to what is there
    ) -> None: ...


class Scores(NamedTuple):
    """Of the n rows of a chunk, fp32."""

    logprob: Tensor  # [n], of the target; NaN where it is none
    logsumexp: Tensor  # [n]
    correction: Tensor  # [n], exact log-sum-exp minus `logsumexp`
    entropy: Tensor  # [n]


def tile_of(vocabulary: int) -> int | None:
    """Columns of a tile, or None where the products do not take the vocabulary."""
    return None if vocabulary % ROWS else next(tile for tile in TILES if vocabulary % tile == 0)


def padded(rows: int) -> int:
    """Rows as they are multiplied."""
    return -(-rows // ROWS) * ROWS


class Exponentials:
    """Buffers of one chunk after the other, of at most ``rows`` rows; ``store``: whether a gradient follows."""

    def __init__(self, products: Products, weight: Tensor, rows: int, *, store: bool) -> None:
        V, C = len(weight), padded(rows)
        tile = tile_of(V)
        assert tile is not None
        self.products, self.weight, self.tile = products, weight, tile
        self._e = weight.new_empty((C, V)) if store else None
        self._tiles = [weight.new_empty((C, V // tile), dtype=torch.float32) for _ in range(3)]

    def form(self, x: Tensor, temperature: Tensor, target: Tensor) -> Scores:
        """First product of ``x [n, H]`` with one target a row, ``[n] int64``, none where out of range."""
        n, V = len(x), len(self.weight)
        self.n, C = n, padded(n)
        self.x = _to(C, x).contiguous()
        self.inverse = _to(C, 1 / temperature)
        self.target = _to(C, torch.where((target >= 0) & (target < V), target, -1), -1)
        self.e = None if self._e is None else self._e[:C]
        exponent, total, weighted = (t[:C] for t in self._tiles)
        at_target = torch.full_like(self.inverse, torch.nan)
        if C:
            self.products.exponentials(
                self.x, self.weight, self.inverse, self.target.int(), self.tile, self.e, exponent, total, weighted,
                at_target,
            )  # fmt: skip
        most = exponent.amax(1)
        self.gap = exponent - most[:, None]
        share = self.gap.exp2()
        self.total = (total * share).sum(1)
        log_total = self.total.log2()
        mean = ((weighted + self.gap * total) * share).sum(1) / self.total
        self.of_target = self.gap.gather(1, (self.target.clamp(min=0) // self.tile)[:, None]).squeeze(1)
        self.logprob = LN2 * (at_target + self.of_target - log_total)
        exact = LN2 * (most.double() + log_total.double())
        rounded = exact.float()
        self.entropy = LN2 * (log_total - mean)
        scores = self.logprob, rounded, (exact - rounded).float(), self.entropy
        return Scores(*(t[:n] for t in scores))

    def gradient(self, a: Tensor, b: Tensor | None = None) -> None:
        """Turn the exponentials into the gradient of the logits for ``a = dL / d log p_y`` and ``b = dL / d entropy``,
        ``[n]``, None: of no entropy.

        Rows of zeros take no part, whatever their logits are; rows without a target have the terms of ``p_j`` alone.
        """
        assert self.e is not None
        a = _to(len(self.e), a)
        if b is not None:
            self._gradient_with_entropy(a, _to(len(self.e), b))
            return
        alive = a != 0
        self.v = torch.where(alive, -a * self.inverse / self.total, 0.0)
        scale = torch.where(alive[:, None], self.gap.clamp(min=-FAR).exp2(), 0.0)
        scale = scale.to(self.e.dtype)
        column = self.target.clamp(min=0)[:, None]
        minus_one = torch.expm1(self.logprob) * self.total / self.of_target.clamp(min=-FAR).exp2()
        here = self.e.gather(1, column).squeeze(1)
        at_target = torch.where(alive & (self.target >= 0), minus_one.to(here.dtype), here)
        self.e.scatter_(1, column, at_target[:, None])
        self.scale = None
        if self.products.scale_operands(self.e.device):
            self.scale = scale.T.repeat_interleave(self.tile // BLOCK, 0)
        else:
            self.e.unflatten(1, (-1, self.tile)).mul_(scale[:, :, None])

    def _gradient_with_entropy(self, a: Tensor, b: Tensor) -> None:  # [C], [C]
        assert self.e is not None
        alive = (a != 0) | (b != 0)
        self.v = torch.where(alive, -self.inverse / self.total, 0.0)
        self.scale = None
        share = self.gap.clamp(min=-FAR).exp2()
        constant = (b * (self.entropy - LN2 * self.total.log2()) + a)[:, None] + (LN2 * b)[:, None] * self.gap
        at_one, slope = (torch.where(alive[:, None], x, 0.0) for x in (share * constant, share * (LN2 * b)[:, None]))
        self.products.apply_entropy(self.e, at_one, slope, self.tile)
        of_p = b * self.logprob.exp() * (self.logprob.clamp(min=-FAR) + self.entropy)
        at_target = self.total * (a * torch.expm1(self.logprob) + of_p)
        column = self.target.clamp(min=0)[:, None]
        here = self.e.gather(1, column).squeeze(1)
        at_target = torch.where(alive & (self.target >= 0), at_target.to(here.dtype), here)
        self.e.scatter_(1, column, at_target[:, None])

    def to_hidden(self, out: Tensor) -> None:
        """``out [n, H]``: gradient of hidden."""
        assert self.e is not None
        whole = out if len(out) == len(self.e) and out.is_contiguous() else torch.empty_like(self.x)
        if self.n:
            self.products.to_hidden(self.e, self.scale, self.weight, self.v, whole)
        if whole is not out:
            out.copy_(whole[: self.n])

    def to_weight(self, out: Tensor, *, add: bool) -> None:
        """``out [V, H]`` fp32: gradient of the weight, added to what is there or in its place."""
        assert self.e is not None
        scaled = torch.mul(self.x, self.v[:, None], out=torch.empty_like(self.x))
        scaled.masked_fill_((self.v == 0)[:, None], 0)  # not 0 times what is not finite
        if self.n:
            self.products.to_weight(self.e, self.scale, scaled, out, add)
        elif not add:
            out.zero_()


def _to(rows: int, t: Tensor, value: float = 0.0) -> Tensor:
    """``t [n, ...]`` with more rows of ``value``."""
    return t if len(t) == rows else F.pad(t, (0, 0) * (t.ndim - 1) + (0, rows - len(t)), value=value)
