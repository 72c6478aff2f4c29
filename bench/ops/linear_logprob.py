"""``linear_logprob`` from hidden states, against full logits and the fused heads of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels import linear_logprob

from ..runner import Bench, Calls, Case, UnsupportedError


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H], requires grad
    weight: Tensor  # [V, H], requires grad
    target: Tensor  # [N]
    upstream: Tensor  # [N] float32, gradient of the log-probs


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield sizes N x H x V: small heads on the CPU; on CUDA heads of Qwen's and Llama's sizes in bf16."""
    wide, narrow = torch.float32, torch.bfloat16
    if device.type == "cpu":
        shapes = [(1024, 256, 1024, wide)]
        if not quick:
            shapes += [(2048, 512, 32000, wide), (2048, 512, 32000, narrow)]
    elif quick:
        shapes = [(2048, 1024, 32000, narrow)]
    else:
        shapes = [(8192, 1024, 151936, narrow), (8192, 4096, 131072, narrow)]
    for n, h, v, dtype in shapes:
        yield from shaped(device, N=n, H=h, V=v, dtype=dtype)


def shaped(device: torch.device, *, N: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    yield Case(f"N={N} H={H} V={V} {str(dtype).removeprefix('torch.')}", partial(_inputs, N, H, V, dtype, device))


def _inputs(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return Inputs(
        hidden=normal(n, h).to(dtype).requires_grad_(),
        weight=(normal(v, h) * h**-0.5).to(dtype).requires_grad_(),
        target=torch.randint(v, (n,), generator=generator, device=device),
        upstream=normal(n) / n,
    )


def both_directions(x: Inputs, logprob: Any) -> Calls:
    """Return the calls of ``logprob()`` without autograd, and with its backward pass."""

    def forward() -> Tensor:
        with torch.no_grad():
            return logprob()

    def forward_backward() -> tuple[Tensor, ...]:
        value = logprob()
        return torch.autograd.grad(value, (x.hidden, x.weight), x.upstream.to(value.dtype))

    return {"forward": forward, "forward+backward": forward_backward}


def rolltree(x: Inputs) -> Calls:
    return both_directions(x, lambda: linear_logprob(x.hidden, x.weight, x.target).logprob)


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target, reduction="none")


def torch_eager(x: Inputs) -> Calls:
    return both_directions(x, lambda: full_logits(x.hidden, x.weight, x.target))


def torch_compile(x: Inputs) -> Calls:
    if x.hidden.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    compiled = torch.compile(full_logits)
    return both_directions(x, lambda: compiled(x.hidden, x.weight, x.target))


def liger(x: Inputs) -> Calls:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    needs_cuda(x)
    apply = LigerFusedLinearScaledCrossEntropyFunction.apply
    return both_directions(x, lambda: -apply(x.hidden, x.weight, x.target))


def trl(x: Inputs) -> Calls:
    from trl.kernels import ChunkedLogProbFunction

    needs_cuda(x)
    apply = ChunkedLogProbFunction.apply
    return both_directions(x, lambda: first(apply(x.hidden, x.weight, None, x.target, 1.0, 32768, None, 1.0, ())))


def cut_cross_entropy(x: Inputs) -> Calls:
    from cut_cross_entropy import linear_cross_entropy

    needs_cuda(x)
    return both_directions(x, lambda: -linear_cross_entropy(x.hidden, x.weight, x.target, reduction="none"))


def verl(x: Inputs) -> Calls:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    needs_cuda(x)
    return both_directions(x, lambda: linear_cross_entropy(x.hidden, x.weight, x.target, 1.0, "none", None)[0])


def quack(x: Inputs) -> Calls:
    """Time quack's cross-entropy of each token; its chunked head has sums and means of tokens alone."""
    from quack.linear_cross_entropy import linear_cross_entropy_func

    needs_cuda(x)
    nll = partial(linear_cross_entropy_func, reduction="none", inplace_backward=True)
    return both_directions(x, lambda: -nll(x.hidden, x.weight, None, x.target))


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def needs_cuda(x: Inputs) -> None:
    if x.hidden.device.type != "cuda":
        raise UnsupportedError("it needs CUDA")


def bare_gemms(x: Inputs) -> Calls:
    """Time the matrix products alone: hidden W^T forward, and in the backward pass also G W and G^T hidden."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    rows = min(len(hidden), max(1, 2**30 // len(weight)))  # rows of a chunk of logits, so that memory is no limit
    logits = torch.randn(rows, len(weight), device=hidden.device).to(hidden.dtype)

    def forward() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.T, out=logits[: len(part)])

    def forward_backward() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.T, out=logits[: len(part)])
            torch.mm(logits[: len(part)], weight)
            torch.mm(logits[: len(part)].T, part)

    return {"forward": forward, "forward+backward": forward_backward}


BENCH = Bench(
    op="linear_logprob",
    directions=("forward", "forward+backward"),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "torch": torch_eager,
        "torch.compile": torch_compile,
        "liger": liger,
        "trl": trl,
        "cut-cross-entropy": cut_cross_entropy,
        "verl": verl,
        "quack": quack,
    },
    ceiling=bare_gemms,
    ceiling_is="the matrix products alone, one forward and three with backward, by torch.mm",
)
