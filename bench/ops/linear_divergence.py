"""``linear_divergence``: from the hidden states of a student and a teacher to gradients, against full logits and the
fused ops of TRL and Liger.

TRL's and Liger's ops compute every row; Liger's adds the cross-entropy of a target unless its weight is 0, as here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels import linear_divergence

from ..runner import Bench, Calls, Case

KINDS = {"forward KL": 0.0, "reverse KL": 1.0, "JSD": 0.5}
"""Beta of the generalised Jensen-Shannon divergence, of which the KLs are the ends."""
LIVE = {"forward KL": (1.0,), "reverse KL": (1.0,), "JSD": (1.0, 0.36)}


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H], requires grad
    weight: Tensor  # [V, H], requires grad
    teacher_hidden: Tensor  # [N, H_t]
    teacher_weight: Tensor  # [V, H_t]
    mask: Tensor  # [N] bool
    beta: float


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield heads of Qwen's and Gemma's vocabularies, with a teacher of twice the width."""
    if device.type == "cpu":
        shapes, dtype = [(256, 64, 8192)] if quick else [(256, 256, 151936), (256, 256, 262144)], torch.float32
    elif quick:
        shapes, dtype = [(2048, 1024, 32000)], torch.bfloat16
    else:
        shapes, dtype = [(8192, 1024, 151936), (8192, 2048, 262144)], torch.bfloat16
    for n, h, v in shapes:
        yield from shaped(device, N=n, H=h, V=v, dtype=dtype)


def shaped(device: torch.device, *, N: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    for kind, beta in KINDS.items():
        for share in LIVE[kind]:
            name = f"N={N} H={H} V={V} {kind}" + ("" if share == 1 else f", {share:.0%} live".replace("%", " %"))
            yield Case(name, partial(_inputs, N, H, V, dtype, device, beta, share))


def _inputs(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device, beta: float, share: float) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    return Inputs(
        hidden=normal(n, h).requires_grad_(),
        weight=normal(v, h, scale=h**-0.5).requires_grad_(),
        teacher_hidden=normal(n, 2 * h),
        teacher_weight=normal(v, 2 * h, scale=(2 * h) ** -0.5),
        mask=torch.rand(n, generator=generator, device=device) < share,
        beta=beta,
    )


def with_gradients(x: Inputs, loss: Callable[[], Tensor]) -> Calls:
    return {"forward+backward": lambda: torch.autograd.grad(loss(), (x.hidden, x.weight))}


def rolltree(x: Inputs) -> Calls:
    count = int(x.mask.sum())
    arguments = x.hidden, x.weight, x.teacher_hidden, x.teacher_weight
    return with_gradients(
        x, lambda: linear_divergence(*arguments, kind="jsd", beta=x.beta, mask=x.mask, normalizer=count).loss
    )


def torch_eager(x: Inputs) -> Calls:
    def loss() -> Tensor:
        log_q = (x.hidden @ x.weight.T).float().log_softmax(-1)
        with torch.no_grad():
            log_p = (x.teacher_hidden @ x.teacher_weight.T).float().log_softmax(-1)
        kl = functools.partial(
            torch.nn.functional.kl_div, reduction="none", log_target=True
        )  # (log b, log a): KL(a || b)
        if x.beta in (0, 1):
            value = kl(log_q, log_p) if x.beta == 0 else kl(log_p, log_q)
        else:
            beta = torch.tensor(x.beta, device=log_q.device)
            log_m = torch.logaddexp(log_p + beta.log(), log_q + (1 - beta).log())
            value = beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)
        return (value.sum(-1) * x.mask).sum() / x.mask.sum()

    return with_gradients(x, loss)


def trl(x: Inputs) -> Calls:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss() -> Tensor:
        heads = x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None
        value, _ = ChunkedDivergenceFunction.apply(*heads, x.beta)
        return (value * x.mask).sum() / x.mask.sum()

    return with_gradients(x, loss)


def liger(x: Inputs) -> Calls:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    compiled: bool = x.hidden.device.type == "cuda"  # on a CPU compiling takes longer than the benchmark
    options: dict[str, Any] = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compiled": compiled}
    loss = LigerFusedLinearJSDLoss(beta=x.beta, **options)
    target = torch.where(x.mask, 0, -100)
    return with_gradients(x, lambda: loss(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, target))


def bare_gemms(x: Inputs) -> Calls:
    """Time the products that any exact implementation needs, over the rows that have a gradient."""
    hidden, weight, teacher = x.hidden.detach()[x.mask], x.weight.detach(), x.teacher_hidden[x.mask]
    rows = min(len(hidden), max(1, 2**28 // len(weight)))
    logits = torch.randn(rows, len(weight), device=hidden.device).to(hidden.dtype)

    def products() -> None:
        for part, of_teacher in zip(hidden.split(rows), teacher.split(rows), strict=True):
            torch.mm(part, weight.T, out=logits[: len(part)])
            torch.mm(of_teacher, x.teacher_weight.T, out=logits[: len(part)])
            torch.mm(logits[: len(part)], weight)
            torch.mm(logits[: len(part)].T, part)

    return {"forward+backward": products}


def work(x: Inputs) -> dict[str, tuple[float, float]]:
    """Return the FLOP of `bare_gemms`, and the bytes of hidden states, weights and gradients, without logits."""
    rows, (V, H), wide = int(x.mask.sum()), x.weight.shape, x.teacher_weight.shape[1]
    moved = 2 * (rows * H + V * H) + rows * wide + V * wide
    return {"forward+backward": (float(rows * V * (6 * H + 2 * wide)), float(moved * x.weight.element_size()))}


BENCH = Bench(
    op="linear_divergence",
    directions=("forward+backward",),
    cases=cases,
    shaped=shaped,
    providers={"rolltree": rolltree, "torch": torch_eager, "trl": trl, "liger": liger},
    ceiling=bare_gemms,
    ceiling_is="the matrix products alone over unmasked rows, four, by torch.mm",
    speedup_over="torch",
    work=work,
)
