"""``sample_tokens``: sampling of a decode step, with and without filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rolltree import kernels

from ..runner import Bench, Calls, Case, UnsupportedError


@dataclass(frozen=True)
class Inputs:
    logits: Tensor  # [N, V]
    temperature: float
    top_k: int | None
    top_p: float | None


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    shapes = [(512, 64), (512, 1024)] if device.type == "cpu" else [(512, 32000)]
    if not quick:
        shapes += [(32, 151936)] if device.type == "cpu" else [(32, 151936), (512, 151936)]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for rows, vocab in shapes:
        yield from shaped(device, N=rows, V=vocab, dtype=dtype)


def shaped(device: torch.device, *, N: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    make = partial(_inputs, N, V, dtype, device)
    yield Case(f"N={N} V={V} T=1", partial(make, 1.0, None, None))
    yield Case(f"N={N} V={V} T=0.7 top_p=0.9", partial(make, 0.7, None, 0.9))
    yield Case(f"N={N} V={V} T=1 top_k=50 top_p=0.95", partial(make, 1.0, 50, 0.95))


def _inputs(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=generator, device=device)).to(dtype)
    return Inputs(logits, temperature, top_k, top_p)


def rolltree(x: Inputs) -> Calls:
    step = torch.arange(len(x.logits), device=x.logits.device)

    def draw() -> object:
        return kernels.sample_tokens(
            x.logits, temperature=x.temperature, top_k=x.top_k, top_p=x.top_p, seed=step, step=step
        )

    return {"forward": draw}


def torch_sort(x: Inputs) -> Calls:
    """Time the usual code with a full sort, which returns what a trainer needs: token, both log-probs, entropy."""

    def draw() -> tuple[Tensor, ...]:
        raw = x.logits.float().log_softmax(-1)
        logprob = (x.logits.float() / x.temperature).log_softmax(-1)
        entropy = -(logprob.exp() * logprob).sum(-1)
        if x.top_k is not None or x.top_p is not None:
            ranked, order = logprob.sort(-1, descending=True)
            if x.top_k is not None:
                ranked[:, x.top_k :] = -torch.inf
            if x.top_p is not None:
                mass = ranked.softmax(-1)
                ranked[(mass.cumsum(-1) - mass) >= x.top_p] = -torch.inf
            logprob = torch.empty_like(logprob).scatter_(1, order, ranked).log_softmax(-1)
        token = torch.multinomial(logprob.exp(), 1)
        return token, logprob.gather(1, token), raw.gather(1, token), entropy

    return {"forward": draw}


def transformers(x: Inputs) -> Calls:
    """Time Transformers' logits warpers and a multinomial draw, which give the token without log-probs."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList([TemperatureLogitsWarper(x.temperature)])
    if x.top_k is not None:
        warpers.append(TopKLogitsWarper(x.top_k))
    if x.top_p is not None:
        warpers.append(TopPLogitsWarper(x.top_p))
    ids = torch.zeros(len(x.logits), 1, dtype=torch.int64, device=x.logits.device)
    return {"forward": lambda: torch.multinomial(warpers(ids, x.logits.float()).softmax(-1), 1)}


def flashinfer(x: Inputs) -> Calls:
    """Time FlashInfer, which gives the token without log-probs."""
    import flashinfer.sampling as fi

    if x.logits.device.type != "cuda":
        raise UnsupportedError("it needs CUDA")

    def draw() -> Tensor:
        probs = (x.logits.float() / x.temperature).softmax(-1)
        return fi.top_k_top_p_sampling_from_probs(probs, x.top_k or probs.shape[1], x.top_p or 1.0)

    return {"forward": draw}


def one_read(x: Inputs) -> Calls:
    return {"forward": lambda: x.logits.amax(-1)}


BENCH = Bench(
    op="sample_tokens",
    cases=cases,
    shaped=shaped,
    providers={"rolltree": rolltree, "torch": torch_sort, "transformers": transformers, "flashinfer": flashinfer},
    ceiling=one_read,
    replayed=True,
    ceiling_is="reading the logits once (torch.amax)",
)
