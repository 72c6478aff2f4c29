"""``policy_loss``: value, gradient and metrics of the clipped objective from log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, policy_loss

from ..runner import Bench, Calls, Case, UnsupportedError

EPS = 0.2


@dataclass(frozen=True)
class Inputs:
    logprob: Tensor  # [M] float32, requires grad
    old_logprob: Tensor  # [M]
    advantage: Tensor  # [M]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for tokens in (16384,) if quick else (16384, 1 << 20):
        yield from shaped(device, M=tokens)


def shaped(device: torch.device, *, M: int) -> Iterator[Case]:
    yield Case(f"M={M}", partial(_inputs, M, device))


def _inputs(tokens: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    logprob = -torch.rand(tokens, generator=generator, device=device) * 3
    noise, advantage = torch.randn(2, tokens, generator=generator, device=device)
    return Inputs(logprob.requires_grad_(), logprob.detach() + 0.2 * noise, advantage)


def rolltree(x: Inputs) -> Calls:
    objective = Objective(eps_low=EPS, eps_high=EPS)
    fields = PolicyFields.flat(x.advantage, old_logprob=x.old_logprob)
    return with_backward(x, lambda: policy_loss(x.logprob, fields, objective, normalizer=len(x.logprob)).loss)


def clipped_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Time the usual PyTorch code with the same metrics: loss, clip fractions, mean of old - current."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    plain, clipped = ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage
    above = ((advantage > 0) & (ratio > 1 + EPS)).float().mean()
    below = ((advantage < 0) & (ratio < 1 - EPS)).float().mean()
    return -torch.minimum(plain, clipped).mean(), above, below, -log_ratio.detach().mean()


def torch_eager(x: Inputs) -> Calls:
    return with_backward(x, lambda: clipped_loss(x.logprob, x.old_logprob, x.advantage)[0])


def torch_compile(x: Inputs) -> Calls:
    if x.logprob.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    compiled = torch.compile(clipped_loss)
    return with_backward(x, lambda: compiled(x.logprob, x.old_logprob, x.advantage)[0])


def with_backward(x: Inputs, loss: Callable[[], Tensor]) -> Calls:
    return {"forward+backward": lambda: torch.autograd.grad(loss(), x.logprob)}


def one_read_one_write(x: Inputs) -> Calls:
    inputs = torch.stack((x.logprob.detach(), x.old_logprob, x.advantage))
    gradient = torch.empty_like(x.advantage)
    return {"forward+backward": lambda: torch.sum(inputs, 0, out=gradient)}


BENCH = Bench(
    op="policy_loss",
    directions=("forward+backward",),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "torch": torch_eager,
        "torch.compile": torch_compile,
    },
    ceiling=one_read_one_write,
    replayed=True,
    ceiling_is="reading log-prob, old log-prob and advantage once and writing the gradient once",
)
