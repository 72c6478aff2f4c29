"""Kinds of arguments, and what is odd or wrong with each: made from a right one, for any function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

REFUSED = (ValueError, TypeError, IndexError)
Wrong = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of argument, from which its wrong values follow.

    ``layout``: which strides it may have; ``size``: whether another length fits too; ``message``: what names it.
    """

    layout: Literal["any", "written", "last", "contiguous"] = "any"
    size: Literal["fixed", "free"] = "fixed"
    message: str = ""

    def wrong(self, value: Any) -> Wrong:
        raise NotImplementedError

    def dtypes(self, value: Tensor) -> list[torch.dtype]:
        """Others that are as good."""
        return [value.dtype]

    def _wrong_tensors(self, t: Tensor, dtypes: tuple[torch.dtype, ...]) -> Wrong:
        yield "a list", t.tolist()
        yield "a string", "0"
        yield "on meta", t.to("meta")
        yield "a dimension more", t[None]
        for dtype in dtypes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield str(dtype), t.to(dtype)
        if self.size == "fixed" and t.dim():
            yield "one more", torch.cat([t, t[:1] if len(t) else t.new_zeros(1, *t.shape[1:])])
            if len(t):
                yield "one less", t[:-1]


@dataclass(frozen=True)
class Floats(Kind):
    grad: bool = False
    whole_too: bool = False  # integers are as good
    also_wrong: tuple[torch.dtype, ...] = ()

    def wrong(self, value: Tensor) -> Wrong:
        whole = () if self.whole_too else (torch.int64,)
        yield from self._wrong_tensors(value, (torch.bool, torch.complex64, *whole, *self.also_wrong))
        if self.layout == "written":
            yield "expanded", value[:1].expand(value.shape)


@dataclass(frozen=True)
class Mask(Kind):
    def wrong(self, value: Tensor) -> Wrong:
        yield from self._wrong_tensors(value, (torch.int64, torch.float32, torch.uint8))


@dataclass(frozen=True)
class Index(Kind):
    """Integers of ``low <= i < end``; -1: any integers."""

    end: int = -1
    low: int = 0
    only: tuple[torch.dtype, ...] = (torch.int64, torch.int32)

    def dtypes(self, value: Tensor) -> list[torch.dtype]:
        return list(self.only)

    def wrong(self, value: Tensor) -> Wrong:
        yield from self._wrong_tensors(value, (torch.float32, torch.bool, torch.complex64))
        if self.end >= 0 and value.numel():
            for bad in (self.end, self.end + 1, self.low - 1, self.low - 7, 2**31 - 1, -(2**31), 2**40, 2**32):
                place = torch.arange(value.numel()).view(value.shape) == value.numel() // 2
                if value.dtype == torch.int64 or abs(bad) < 2**31:
                    yield f"naming {bad}", torch.where(place, bad, value).to(value.dtype)


@dataclass(frozen=True)
class Edges(Kind):
    """Boundaries that rise from 0."""

    def dtypes(self, value: Tensor) -> list[torch.dtype]:
        return [torch.int64, torch.int32]

    def wrong(self, value: Tensor) -> Wrong:
        for label, wrong in self._wrong_tensors(value, (torch.float32, torch.bool)):
            if label != "one less" or value[-1] > value[-2]:  # an empty sequence more or less is no mistake of edges
                yield label, wrong
        yield "empty", value[:0]
        yield "not from 0", value + 1
        yield "negative", value - value[-1]
        yield "beyond the end", torch.cat([value[:-1], value[-1:] + 1])
        yield "short of the end", torch.cat([value[:-1], value[-1:] - 1])
        if value[-1] > 0:
            yield "falling", torch.cat([value.flip(0)])


@dataclass(frozen=True)
class Number(Kind):
    """``zero``: whether 0 and below are right."""

    zero: Literal["no", "yes", "and below"] = "no"
    none: bool = False

    def wrong(self, value: Any) -> Wrong:
        for bad in (math.nan, math.inf, -math.inf, "1", True, 1j, [1.0]):
            yield repr(bad), bad
        if not self.none:
            yield "None", None
        if self.zero != "and below":
            yield "-1", -1.0
        if self.zero == "no":
            yield "0", 0.0


@dataclass(frozen=True)
class Whole(Kind):
    least: int = 1

    def wrong(self, value: Any) -> Wrong:
        for bad in (self.least - 1, self.least - 2**40, 2.5, math.nan, True, "3", [1]):
            yield repr(bad), bad


@dataclass(frozen=True)
class PerRow(Kind):
    """A positive number, or one a row."""

    def wrong(self, value: Tensor) -> Wrong:
        yield from Number().wrong(value)
        yield from ((label, bad) for label, bad in self._wrong_tensors(value, (torch.bool, torch.complex64)) if not
                    isinstance(bad, list) or len(bad))  # fmt: skip
        yield "requiring a gradient", value.clone().requires_grad_()
        for bad in (0.0, -1.0, math.nan, math.inf):
            if len(value):
                yield f"{bad} in a row", torch.cat([value[:-1], value.new_tensor([bad])])


def odd(data: st.DataObject, kind: Kind, value: Any) -> Any:
    """``value`` in another layout or dtype that means the same."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(data.draw(st.sampled_from(kind.dtypes(value)), label="dtype"))
    anywhere = ("inside", "of one row", "as it is")
    layouts = {"any": ("strided", "transposed", "rows apart", "expanded", *anywhere),
               "written": ("strided", "transposed", "rows apart", *anywhere), "last": ("rows apart", *anywhere),
               "contiguous": ("as it is",)}[kind.layout]  # fmt: skip
    return relaid(value, data.draw(st.sampled_from(layouts), label="layout"))


def relaid(t: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and t.dim() > 1:
        return t.mT.contiguous().mT
    if layout == "expanded":  # where one value stands for many
        for dim, n in enumerate(t.shape):
            if n > 1 and bool((t == t.narrow(dim, 0, 1)).all()):
                t = t.narrow(dim, 0, 1).expand(t.shape)
        return t
    if layout == "of one row" and 1 in t.shape and t.numel():  # whose stride says nothing
        dense = t.contiguous()
        return dense.as_strided(t.shape, [7 if n == 1 else s for n, s in zip(t.shape, dense.stride(), strict=True)])
    if layout == "inside" and t.dim():
        return torch.cat([t.new_zeros(3, *t.shape[1:]), t, t.new_zeros(2, *t.shape[1:])])[3 : 3 + len(t)]
    if layout in ("strided", "rows apart") and t.dim():
        steps = [2] * t.dim() if layout == "strided" else [2] * (t.dim() - 1) + [1]
        wide = t.new_zeros([n * step for n, step in zip(t.shape, steps, strict=True)])
        view = wide[tuple(slice(None, None, step) for step in steps)]
        view.copy_(t)
        return view
    return t


def refusal(call: Callable[[], Any]) -> str:
    """The one sentence with which ``call`` refuses; anything else fails the test."""
    with pytest.raises(REFUSED) as refused:
        call()
    message = str(refused.value.args[0]) if refused.value.args else ""
    assert message.endswith("."), f"no sentence: {refused.type.__name__}: {message}"
    assert "\n" not in message
    assert len(message) < 400
    return message
