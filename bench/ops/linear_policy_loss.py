"""``linear_policy_loss``: a clipped objective from hidden states to gradients, against full logits and fused peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rolltree.engine import UserError
from rolltree.kernels import Objective, PolicyFields, linear_policy_loss, plan_policy_loss
from rolltree.kernels.machine import real_gpu_capability

from ..runner import Bench, Calls, Case, UnsupportedError
from .linear_logprob import first, full_logits, needs_cuda

DAPO, GSPO = Objective.preset("dapo"), Objective.preset("gspo")
LIVE = {"all live": 1.0, "36 % live": 0.36}


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H], requires grad
    weight: Tensor  # [V, H], requires grad unless frozen
    target: Tensor  # [M]
    advantage: Tensor  # [M], the token's sequence
    length: int  # number of sequences
    old_logprob: Tensor  # [M]
    mask: Tensor  # [M] bool
    row: Tensor | None = (
        None  # [M], the row of each target if responses share their prompt's last row; None: one target for each row
    )

    @property
    def objective(self) -> Objective:
        return DAPO if self.row is None else GSPO

    @property
    def trained(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight) if t.requires_grad]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield heads of known models, with some tokens masked and 5 % of the others clipped."""
    if device.type == "cpu":
        shapes, dtype = [(1024, 256, 8192)] if quick else [(4096, 512, 151936)], torch.float32
    elif quick:
        shapes, dtype = [(2048, 1024, 32000)], torch.bfloat16
    else:  # Qwen3 0.6B, 1.7B, 8B; Gemma 2B; Llama 3 8B; a head of H = 4096, V = 131072
        heads = [(1024, 151936), (2048, 151936), (4096, 151936), (2304, 256000), (4096, 128256), (4096, 131072)]
        shapes = [(8192, h, v) for h, v in heads] + [(n, 4096, 131072) for n in (1024, 32768, 131072)]
        dtype = torch.bfloat16
    for n, h, v in shapes:
        yield from shaped(device, N=n, H=h, V=v, dtype=dtype)


def shaped(device: torch.device, *, N: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """Yield the cases of a head of one size.

    Raises:
        UserError: N is not a multiple of 64, as the tokens are 8 groups of 8 responses.
    """
    if N % 64:
        raise UserError(f"linear_policy_loss takes N in multiples of 64 (8 groups of 8 responses), got {N}.")
    for frozen in (False, True):
        for name, share in LIVE.items():
            if not frozen or share == 1:
                kind = f"{name}, head frozen" if frozen else name
                yield Case(f"N={N} H={H} V={V} {kind}", partial(_inputs, N, H, V, dtype, device, share, frozen))
    yield Case(f"N={N} H={H} V={V} GSPO, 8 groups of 8", partial(_groups, N, H, V, dtype, device))


def _groups(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Return the tokens as 8 groups of 8 responses; the first tokens of a group are scored in one row."""
    x = replace(_inputs(n, h, v, dtype, device, 1.0, frozen=False), length=n // 64)
    place = torch.arange(len(x.target), device=x.target.device)
    last_of_prompt = place - place % (8 * x.length)
    row = torch.where(place % x.length == 0, last_of_prompt, place)
    with torch.no_grad():
        parts = zip(row.split(256), x.target.split(256), strict=True)
        now = torch.cat([full_logits(x.hidden[rows], x.weight, target) for rows, target in parts])
    noise = torch.randn(len(now), generator=torch.Generator(now.device).manual_seed(1), device=now.device)
    return replace(x, row=row, old_logprob=now.float() + 0.02 * noise)


def _inputs(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device, share: float, frozen: bool) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    hidden, weight = normal(n, h).to(dtype), (normal(v, h) * h**-0.5).to(dtype)
    target = torch.randint(v, (n,), generator=generator, device=device)
    length = n // 8 if n <= 8192 or n % 1024 else 1024  # sequences are equally long
    advantage = normal(n // length).repeat_interleave(length)
    with torch.no_grad():
        now = torch.cat([full_logits(x, weight, t) for x, t in zip(hidden.split(256), target.split(256), strict=True)])
    moved = (
        torch.rand(n, generator=generator, device=device) < 0.05
    )  # beyond the clip range, on the side where clipping acts
    old = now.float() - torch.where(moved, advantage.sign() * 0.5, 0.02 * normal(n))
    mask = torch.rand(n, generator=generator, device=device) < share
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(not frozen), target, advantage, length, old, mask)


def with_gradients(x: Inputs, loss: Callable[[], Tensor]) -> Calls:
    return {"forward+backward": lambda: torch.autograd.grad(loss(), x.trained)}


def rolltree(x: Inputs) -> Calls:
    """Time rolltree's op; its plan is made once, as when a batch is made."""
    objective = x.objective
    cu = torch.arange(0, len(x.target) + 1, x.length, device=x.target.device)
    fields = PolicyFields.flat(x.advantage, old_logprob=x.old_logprob, mask=x.mask, cu_seqlens=cu)
    fields = fields.folded(objective.aggregation)
    normalizer = x.mask.sum() if x.row is None else len(cu) - 1
    (n, h), v = x.hidden.shape, len(x.weight)
    plan = plan_policy_loss(
        fields, objective, num_rows=n, vocabulary=v, hidden_size=h, device=x.hidden.device, row=x.row,
        frozen=not x.weight.requires_grad,
    )  # fmt: skip

    def loss() -> Tensor:
        arguments = (x.hidden, x.weight, x.target, fields, objective)
        return linear_policy_loss(*arguments, normalizer=normalizer, row=x.row, plan=plan).loss

    return with_gradients(x, loss)


def clipped_mean(x: Inputs, logprob: Tensor) -> Tensor:
    if x.row is not None:
        ratio = (logprob - x.old_logprob).view(-1, x.length).mean(1).exp()
        advantage = x.advantage[:: x.length]
        clipped = ratio.clamp(1 - GSPO.eps_low, 1 + GSPO.eps_high) * advantage
        return -torch.minimum(ratio * advantage, clipped).mean()
    ratio = (logprob - x.old_logprob).exp()
    surrogate = torch.minimum(ratio * x.advantage, ratio.clamp(1 - DAPO.eps_low, 1 + DAPO.eps_high) * x.advantage)
    return -(surrogate * x.mask).sum() / x.mask.sum()


def torch_eager(x: Inputs) -> Calls:
    def loss() -> Tensor:
        hidden = x.hidden if x.row is None else x.hidden[x.row]
        return clipped_mean(x, full_logits(hidden, x.weight, x.target))

    return with_gradients(x, loss)


def _one_a_row(x: Inputs) -> None:
    if x.row is not None:
        raise UnsupportedError("timed with an objective of tokens only")


def torch_compile(x: Inputs) -> Calls:
    _one_a_row(x)
    if x.hidden.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    compiled = torch.compile(lambda hidden, weight: clipped_mean(x, full_logits(hidden, weight, x.target)))
    return with_gradients(x, lambda: compiled(x.hidden, x.weight))


def liger(x: Inputs) -> Calls:
    _one_a_row(x)
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    needs_cuda(x)  # type: ignore[arg-type]
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type="dapo", epsilon_low=DAPO.eps_low, epsilon_high=DAPO.eps_high, use_ref_model=False
    )
    target, mask, old = (t.view(-1, x.length) for t in (x.target, x.mask.float(), x.old_logprob))
    hidden, advantage = x.hidden.view(len(target), x.length, -1), x.advantage[:: x.length].contiguous()
    return with_gradients(x, lambda: loss(hidden, x.weight, target, mask, advantage, old_per_token_logps=old)[0])


def without_masked(x: Inputs, loss: Callable[[Inputs, Tensor], Tensor]) -> Calls:
    """Time ``loss(tokens, hidden)`` of the unmasked tokens and their hidden states: verl's trainer leaves masked tokens
    out too."""
    live = x.mask.nonzero().flatten()
    part = replace(
        x, target=x.target[live], advantage=x.advantage[live], old_logprob=x.old_logprob[live], mask=x.mask[live]
    )
    return with_gradients(x, lambda: loss(part, x.hidden.index_select(0, live)))


def liger_cute(x: Inputs) -> Calls:
    """Time Liger's op in CuTe DSL, which returns the log-prob of each token."""
    _one_a_row(x)
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    needs_cuda(x)  # type: ignore[arg-type]
    if real_gpu_capability(x.hidden.device) != (9, 0):
        raise UnsupportedError("it is for Hopper")
    nll = LigerFusedScaledCrossEntropySM90Function.apply
    return without_masked(x, lambda part, hidden: clipped_mean(part, -nll(hidden, x.weight, part.target)))


def quack(x: Inputs) -> Calls:
    """Time quack's cross-entropy of each token, from logits that are kept for the backward."""
    _one_a_row(x)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    needs_cuda(x)  # type: ignore[arg-type]
    nll = partial(linear_cross_entropy_func, reduction="none", inplace_backward=True)
    return without_masked(x, lambda part, hidden: clipped_mean(part, -nll(hidden, x.weight, None, part.target)))


def quack_mean(x: Inputs) -> Calls:
    """Time quack's fused head, which has the mean of the tokens' log-probs alone: no weights and no clipping."""
    _one_a_row(x)
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    needs_cuda(x)  # type: ignore[arg-type]
    return without_masked(x, lambda part, hidden: chunked_linear_cross_entropy(hidden, x.weight, part.target))


def trl(x: Inputs) -> Calls:
    _one_a_row(x)
    from trl.kernels import ChunkedLogProbFunction

    needs_cuda(x)  # type: ignore[arg-type]

    def loss(part: Inputs, hidden: Tensor) -> Tensor:
        out = ChunkedLogProbFunction.apply(hidden, x.weight, None, part.target, 1.0, 32768, None, 1.0, ())
        return clipped_mean(part, first(out))

    return without_masked(x, loss)


def verl(x: Inputs) -> Calls:
    _one_a_row(x)
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    needs_cuda(x)  # type: ignore[arg-type]
    return with_gradients(
        x, lambda: clipped_mean(x, linear_cross_entropy(x.hidden, x.weight, x.target, 1.0, "none", None)[0])
    )


def bare_gemms(x: Inputs) -> Calls:
    """Time the products that any exact implementation needs, over the rows that have a gradient."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    hidden = hidden[x.mask] if x.row is None else hidden[x.row.unique()]
    rows = min(len(hidden), max(1, 2**28 // len(weight)))
    logits = torch.randn(rows, len(weight), device=hidden.device).to(hidden.dtype)

    def products() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.T, out=logits[: len(part)])
            torch.mm(logits[: len(part)], weight)
            if x.weight.requires_grad:
                torch.mm(logits[: len(part)].T, part)

    return {"forward+backward": products}


def work(x: Inputs) -> dict[str, tuple[float, float]]:
    """Return the FLOP of `bare_gemms`, and the bytes of hidden states, weight and their gradients, without logits."""
    rows = int(x.mask.sum()) if x.row is None else len(x.row.unique())
    products = 3 if x.weight.requires_grad else 2
    moved = (x.hidden.nbytes + x.weight.nbytes) + sum(t.nbytes for t in x.trained)
    return {"forward+backward": (products * 2.0 * rows * x.weight.numel(), float(moved))}


BENCH = Bench(
    op="linear_policy_loss",
    directions=("forward+backward",),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "torch": torch_eager,
        "torch.compile": torch_compile,
        "liger": liger,
        "liger, CuTe": liger_cute,
        "quack": quack,
        "quack, mean log-prob": quack_mean,
        "trl": trl,
        "verl": verl,
    },
    ceiling=bare_gemms,
    ceiling_is="the matrix products alone over unmasked rows, three (two with a frozen head), by torch.mm",
    speedup_over="torch",
    work=work,
)
