"""``logprob_from_logits``: log-prob and entropy of given logits, and their gradient, against plain PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from rolltree.kernels import logprob_from_logits

from ..runner import Bench, Calls, Case, UnsupportedError


@dataclass(frozen=True)
class Inputs:
    logits: Tensor  # [N, V], requires grad
    target: Tensor  # [N]
    upstream: Tensor  # [2, N] float32, gradients of log-prob and entropy


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    if device.type == "cpu":
        shapes, dtype = [(256, 4096)] + ([] if quick else [(512, 50257)]), torch.float32
    else:
        shapes, dtype = [(2048, 32000)] if quick else [(8192, 151936), (8192, 50257)], torch.bfloat16
    for n, v in shapes:
        yield from shaped(device, N=n, V=v, dtype=dtype)


def shaped(device: torch.device, *, N: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    yield Case(f"N={N} V={V} {str(dtype).removeprefix('torch.')}", partial(_inputs, N, V, dtype, device))


def _inputs(n: int, v: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    return Inputs(
        logits=torch.randn(n, v, generator=generator, device=device).to(dtype).requires_grad_(),
        target=torch.randint(v, (n,), generator=generator, device=device),
        upstream=torch.randn(2, n, generator=generator, device=device) / n,
    )


Scored = tuple[Tensor, Tensor]  # log-prob [N], entropy [N]


def both_directions(x: Inputs, score: Callable[[Tensor, Tensor], Scored]) -> Calls:
    def forward() -> Scored:
        with torch.no_grad():
            return score(x.logits, x.target)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(score(x.logits, x.target), x.logits, tuple(x.upstream))

    return {"forward": forward, "forward+backward": forward_backward}


def in_place(x: Inputs) -> Calls:
    """Time the backward pass that overwrites the logits; each round first restores them by a copy."""

    def forward_backward() -> tuple[Tensor, ...]:
        spent = x.logits * 1  # a copy for this round, which its gradient overwrites
        out = logprob_from_logits(spent, x.target, want=("entropy",), inplace_backward=True)
        assert out.entropy is not None
        return torch.autograd.grad((out.logprob, out.entropy), spent, tuple(x.upstream))

    return {"forward+backward": forward_backward}


def scored(logits: Tensor, target: Tensor) -> Scored:
    out = logprob_from_logits(logits, target, want=("entropy",))
    assert out.entropy is not None
    return out.logprob, out.entropy


def rolltree(x: Inputs) -> Calls:
    return both_directions(x, scored)


def on(backend: str) -> Callable[[Inputs], Calls]:
    """Time `rolltree` on a named backend, chosen by the environment, which autograd's threads see too."""

    def provider(x: Inputs) -> Calls:
        if x.logits.device.type != "cuda":
            raise UnsupportedError("it needs CUDA")

        def forced(call: Callable[[], object]) -> Callable[[], object]:
            def run() -> object:
                with patch.dict(os.environ, {"ROLLTREE_BACKEND": backend}):
                    return call()

            return run

        return {direction: forced(call) for direction, call in rolltree(x).items()}

    return provider


def full(logits: Tensor, target: Tensor) -> Scored:
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def torch_eager(x: Inputs) -> Calls:
    return both_directions(x, full)


def torch_compile(x: Inputs) -> Calls:
    if x.logits.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    return both_directions(x, torch.compile(full))


def copies(x: Inputs) -> Calls:
    """Time the traffic by ``copy_``: forward reads the logits (half a copy), backward reads and writes them too."""
    source = x.logits.detach()
    out = torch.empty_like(source)
    half = len(source) // 2

    def forward() -> None:
        out[:half].copy_(source[:half])

    def forward_backward() -> None:
        out[:half].copy_(source[:half])
        out.copy_(source)

    return {"forward": forward, "forward+backward": forward_backward}


BENCH = Bench(
    op="logprob_from_logits",
    directions=("forward", "forward+backward"),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "in place, after a copy (rolltree)": in_place,
        "triton (rolltree)": on("triton"),
        "cuda (rolltree)": on("cuda"),
        "torch": torch_eager,
        "torch.compile": torch_compile,
    },
    ceiling=copies,
    ceiling_is="copies of as many bytes: half the logits forward, one and a half times with backward",
)
