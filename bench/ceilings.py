"""The device's limits: a copy and a matrix product by torch. Case names give the bytes and FLOP of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .runner import Bench, Calls, Case, UnsupportedError


@dataclass(frozen=True)
class Inputs:
    a: Tensor
    b: Tensor | None = None  # the second factor of the product a b; None: the case is a copy of a


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield sizes that fill a GPU; the rates follow from the median times."""
    small = quick or device.type == "cpu"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    size, n = (1 << 24, 256) if small else (1 << 32, 8192)
    yield Case(f"copy of {size} B, {2 * size} B moved", lambda: Inputs(_random(size // dtype.itemsize, dtype, device)))
    name = f"{n}x{n}x{n} {str(dtype).removeprefix('torch.')}, {2 * n**3} FLOP"
    yield Case(name, lambda: Inputs(_random(n * n, dtype, device).view(n, n), _random(n * n, dtype, device).view(n, n)))


def _random(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(count, dtype=dtype, device=device)


def copy(x: Inputs) -> Calls:
    if x.b is not None:
        raise UnsupportedError("the case is a product")
    target = torch.empty_like(x.a)
    return {"forward": lambda: target.copy_(x.a)}


def product(x: Inputs) -> Calls:
    a, b = x.a, x.b
    if b is None:
        raise UnsupportedError("the case is a copy")
    out = torch.empty_like(a)
    return {"forward": lambda: torch.mm(a, b, out=out)}


def work(x: Inputs) -> dict[str, tuple[float, float]]:
    """Return the FLOP of the product, or the bytes that the copy reads and writes."""
    return {"forward": (2.0 * len(x.a) ** 3, 0.0) if x.b is not None else (0.0, 2.0 * x.a.nbytes)}


BENCH = Bench(op="ceilings", cases=cases, providers={"copy": copy, "product": product}, work=work)
