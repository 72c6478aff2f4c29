"""Each kernel family against float64: what ``make gpu ARGS="--part first"`` checks, in the order of its worth.

A check runs one op by one backend at one shape, forward and backward, and compares every output with the definition in
float64. Its error, ``|found - exact| / |exact|``, may be twice that of the same formula in the op's own dtype by plain
PyTorch, or the rounding of that dtype (``FLOOR``) where plain PyTorch rounds less. Sampled tokens must be equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels import (
    Objective,
    PolicyFields,
    linear_divergence,
    linear_logprob,
    linear_policy_loss,
    logprob_from_logits,
    policy_loss,
    sample_tokens,
    tree_attention,
    tree_decode_attention,
)
from rolltree.kernels.tree_recurrence import RecurrencePlan, find_segments, tree_recurrence

from .ops import tree_decode

FLOOR = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-16}
"""Least bound of an error, by the dtype of the op's inputs: a rounding of bf16; some of float32 for sums in blocks."""
CAP = 2.0**-5
"""Greatest bound: plain PyTorch's rounding of bf16 logits makes a loss of few tokens worth nothing as a measure."""


@dataclass(frozen=True)
class Compared:
    """One output of an op, its error and the error that is allowed."""

    name: str
    error: float
    bound: float


Outputs = dict[str, Tensor]
Shapes = list[tuple[Any, ...]]
Compare = Callable[[str, torch.device], list[Compared]]  # (backend, device)


@dataclass(frozen=True)
class Check:
    """A kernel family at one shape."""

    name: str
    backends: Sequence[str]
    compare: Compare


class WrongError(Exception):
    """An output is further from float64 than allowed."""


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Name the backend of all ops in the environment, where autograd's own threads see it too."""
    before = os.environ.get("ROLLTREE_BACKEND")
    os.environ["ROLLTREE_BACKEND"] = name
    try:
        yield
    finally:
        os.environ.pop("ROLLTREE_BACKEND")
        if before is not None:
            os.environ["ROLLTREE_BACKEND"] = before


def relative(computed: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over that of ``exact``; inf if it is not a number."""
    computed, exact = computed.detach().double().cpu(), exact.detach().double().cpu()
    error = float((computed - exact).norm() / exact.norm().clamp(min=1e-300))
    return error if error == error else torch.inf


def compare(
    run: Callable[[list[Tensor]], Outputs], inputs: dict[str, Tensor], name: str, plain: Callable[..., Outputs] | None
) -> list[Compared]:
    """Compare ``run`` by backend ``name`` with itself by the reference in float64; ``plain`` replaces the reference.

    ``inputs`` have gradients, which are compared too.
    """
    dtype = next(iter(inputs.values())).dtype

    def outputs(function: Callable[[list[Tensor]], Outputs], dtype: torch.dtype, by: str) -> Outputs:
        with backend(by):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.values()]
            out = function(leaves)
            upstream = [_upstream(x) for x in out.values()]
            gradients = torch.autograd.grad(list(out.values()), leaves, upstream)
        return out | {f"d_{name}": x for name, x in zip(inputs, gradients, strict=True)}

    def bound(key: str) -> float:
        return min(max(2 * relative(rounded[key], exact[key]), FLOOR[dtype]), CAP)

    computed = outputs(run, dtype, name)
    exact = outputs(plain or run, torch.float64, "reference")
    rounded = outputs(plain or run, dtype, "reference")
    return [Compared(key, relative(computed[key], exact[key]), bound(key)) for key in exact]


def _upstream(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64) * 0.7 + 1).view(x.shape).to(x)


def _normal(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def _integers(most: int, size: int, device: torch.device) -> Tensor:
    return torch.randint(most, (size,), generator=torch.Generator().manual_seed(7)).to(device)


def _ends(prompt: int, responses: int, longest: int, trees: int) -> Tensor:
    """Return ``subtree_end`` [T] int32 of trees of one prompt and responses of random lengths."""
    lengths = torch.randint(1, longest + 1, (trees, responses), generator=torch.Generator().manual_seed(3))
    ends: list[Tensor] = []
    begin = 0
    for tree_lengths in lengths:
        after = begin + prompt + tree_lengths.cumsum(0)
        ends += [after[-1].expand(prompt), after.repeat_interleave(tree_lengths)]
        begin = int(after[-1])
    return torch.cat(ends).int()


def _head(rows: int, width: int, vocabulary: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        inputs = {"hidden": _normal(0, device, rows, width), "weight": _normal(1, device, vocabulary, width) / 16}
        target = _integers(vocabulary, rows, device)

        def plain(leaves: list[Tensor]) -> Outputs:
            return {"logprob": (leaves[0] @ leaves[1].T).log_softmax(-1).gather(1, target[:, None])[:, 0]}

        run = lambda leaves: {"logprob": linear_logprob(leaves[0], leaves[1], target).logprob}  # noqa: E731
        return compare(run, {key: x.bfloat16() for key, x in inputs.items()}, name, plain)

    return check


def _logits(rows: int, vocabulary: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        target = _integers(vocabulary, rows, device)

        def plain(leaves: list[Tensor]) -> Outputs:
            return {"logprob": leaves[0].log_softmax(-1).gather(1, target[:, None])[:, 0]}

        run = lambda leaves: {"logprob": logprob_from_logits(leaves[0], target).logprob}  # noqa: E731
        return compare(run, {"logits": 3 * _normal(0, device, rows, vocabulary).bfloat16()}, name, plain)

    return check


def _fields(tokens: int, device: torch.device, logprob: Tensor, dtype: torch.dtype) -> PolicyFields:
    advantage, noise = _normal(2, device, 2, tokens).to(dtype)
    mask = _normal(4, device, tokens) < 0.3
    return PolicyFields.flat(advantage, old_logprob=logprob.to(dtype) + 0.2 * noise, mask=mask)


def _policy_loss(tokens: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        old = -_normal(0, device, tokens).abs()

        def run(leaves: list[Tensor]) -> Outputs:
            fields = _fields(tokens, device, old, leaves[0].dtype)
            return {"loss": policy_loss(leaves[0], fields, Objective(), normalizer=tokens).loss}

        return compare(run, {"logprob": old + 0.1 * _normal(1, device, tokens)}, name, None)

    return check


def _head_and_loss(rows: int, width: int, vocabulary: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        inputs = {"hidden": _normal(0, device, rows, width), "weight": _normal(1, device, vocabulary, width) / 16}
        inputs = {key: x.bfloat16() for key, x in inputs.items()}
        target, objective = _integers(vocabulary, rows, device), Objective.preset("dapo")
        with backend("reference"), torch.no_grad():
            old = linear_logprob(inputs["hidden"].double(), inputs["weight"].double(), target).logprob

        def run(leaves: list[Tensor]) -> Outputs:
            dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
            fields = _fields(rows, device, old, dtype)
            return {"loss": linear_policy_loss(leaves[0], leaves[1], target, fields, objective, normalizer=rows).loss}

        def plain(leaves: list[Tensor]) -> Outputs:
            logprob = (leaves[0] @ leaves[1].T).log_softmax(-1).gather(1, target[:, None])[:, 0]
            dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
            fields = _fields(rows, device, old, dtype)
            return {"loss": policy_loss(logprob.to(dtype), fields, objective, normalizer=rows).loss}

        return compare(run, inputs, name, plain)

    return check


def _divergence(rows: int, width: int, vocabulary: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        inputs = {"hidden": _normal(0, device, rows, width), "weight": _normal(1, device, vocabulary, width) / 16}
        inputs = {key: x.bfloat16() for key, x in inputs.items()}
        teacher = (
            _normal(2, device, rows, 2 * width).bfloat16(),
            _normal(3, device, vocabulary, 2 * width).bfloat16() / 16,
        )

        def run(leaves: list[Tensor]) -> Outputs:
            of_teacher = (x.to(leaves[0].dtype) for x in teacher)
            out = linear_divergence(*leaves, *of_teacher, kind="jsd", beta=0.3, normalizer=rows)
            return {"loss": out.loss, "divergence": out.divergence, "entropy": out.entropy}

        return compare(run, inputs, name, None)

    return check


def _attention(prompt: int, responses: int, longest: int, trees: int, heads: tuple[int, int], dim: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        ends = _ends(prompt, responses, longest, trees).to(device)
        counts = {"q": heads[0], "k": heads[1], "v": heads[1]}
        inputs = {
            key: _normal(seed, device, len(ends), count, dim).bfloat16()
            for seed, (key, count) in enumerate(counts.items())
        }
        return compare(
            lambda leaves: {"out": tree_attention(leaves[0], leaves[1], leaves[2], ends)}, inputs, name, None
        )

    return check


def _decode(prefix: int, unique: int, group: int, groups: int, heads: tuple[int, int], dim: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        page = tree_decode.PAGE
        pages = groups * (prefix + group * unique) // page
        q = _normal(0, device, groups * group, heads[0], dim).bfloat16()
        k, v = _normal(1, device, 2, pages, page, heads[1], dim).bfloat16()
        plan = tree_decode.Inputs(q, k, v, prefix, unique, group, groups).plan(shared=True)

        def outputs(by: str, dtype: torch.dtype) -> Outputs:
            with backend(by):
                out, lse = tree_decode_attention(q.to(dtype), k.to(dtype), v.to(dtype), plan)
            return {"out": out, "lse": lse}

        computed, exact = outputs(name, torch.bfloat16), outputs("reference", torch.float64)
        rounded = outputs("reference", torch.bfloat16)
        floors = {"out": FLOOR[torch.bfloat16], "lse": 2.0**-10}
        return [
            Compared(key, relative(computed[key], exact[key]), max(2 * relative(rounded[key], exact[key]), floor))
            for key, floor in floors.items()
        ]

    return check


def _sampling(rows: int, vocabulary: int, top_k: int | None, top_p: float | None) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        logits = 3 * _normal(0, torch.device("cpu"), rows, vocabulary)
        seed = torch.arange(rows)

        def draw(by: str, to: torch.device) -> Outputs:
            with backend(by):
                draw = {"temperature": 0.9, "seed": seed.to(to), "step": 7 * seed.to(to)}
                out = sample_tokens(logits.to(to), top_k=top_k, top_p=top_p, **draw)  # type: ignore[arg-type]
            return {"token": out.token, "logprob": out.logprob, "entropy": out.entropy}

        computed, exact = draw(name, device), draw("reference", torch.device("cpu"))
        other = float((computed["token"].cpu() != exact["token"]).double().mean())
        numbers = ("logprob", "entropy")
        return [
            Compared("token", other, 0.0),
            *(Compared(key, relative(computed[key], exact[key]), FLOOR[torch.float32]) for key in numbers),
        ]

    return check


def _recurrence(prompt: int, responses: int, longest: int, heads: tuple[int, int], dim: int) -> Compare:
    def check(name: str, device: torch.device) -> list[Compared]:
        ends = _ends(prompt, responses, longest, 1)
        plan = RecurrencePlan.make(find_segments(ends.numpy()), device=device)
        groups, count = heads
        query, key = (_normal(seed, device, len(ends), groups, dim) for seed in (0, 1))
        value, gates = _normal(2, device, len(ends), count, dim), _normal(3, device, 2, len(ends), count)
        inputs = {
            "query": query / query.norm(dim=-1, keepdim=True),
            "key": key / key.norm(dim=-1, keepdim=True),
            "value": value,
            "decay": -0.05 * gates[0].exp(),
            "beta": gates[1].sigmoid(),
        }

        def run(leaves: list[Tensor]) -> Outputs:
            query, key, value, decay, beta = leaves
            return {"out": tree_recurrence(query, key, value, decay, beta, plan, scale=dim**-0.5)[0]}

        return compare(run, inputs, name, None)

    return check


def checks(small: bool) -> list[Check]:
    """Return all checks, each family at two shapes; ``small`` ones are for a CPU's emulation."""
    triton = ("triton",)
    heads: Shapes = [(9, 32, 515), (19, 48, 1027)] if small else [(1027, 512, 50257), (515, 1024, 151936)]
    losses: Shapes = [(9, 32, 515), (19, 48, 1027)] if small else [(2051, 512, 50257), (515, 1024, 151936)]
    logits: Shapes = [(9, 515), (19, 1027)] if small else [(1027, 50257), (515, 151936)]
    tokens: Shapes = [(300,), (1031,)] if small else [(1031,), (1 << 20,)]
    attention: Shapes = [(30, 3, 20, 2, (4, 2), 32), (70, 2, 40, 1, (2, 2), 64)]
    decode: Shapes = [(48, 16, 3, 1, (4, 2), 64), (32, 16, 2, 2, (2, 1), 128)]
    sampling: Shapes = [(4, 515, None, None), (3, 1027, 50, 0.95)]
    recurrence: Shapes = [(40, 3, 20, (1, 2), 16), (10, 2, 70, (2, 2), 32)]
    if not small:
        attention = [(1500, 6, 500, 1, (16, 8), 128), (150, 8, 40, 8, (8, 2), 64)]
        decode = [(1504, 80, 16, 4, (8, 2), 128), (4096, 128, 8, 1, (16, 8), 64)]
        sampling = [(64, 151936, None, None), (64, 50257, 50, 0.95)]
        recurrence = [(512, 6, 200, (16, 32), 128), (100, 4, 300, (8, 8), 64)]

    def named(op: str, form: str, backends: Sequence[str], make: Callable[..., Compare], shapes: Shapes) -> list[Check]:
        return [Check(f"{op} {form.format(*shape)}", backends, make(*shape)) for shape in shapes]

    return [
        *named("linear_logprob", "N={} H={} V={}", triton, _head, heads),
        *named("linear_policy_loss", "N={} H={} V={}", triton, _head_and_loss, losses),
        *named("linear_divergence", "N={} H={} V={}", triton, _divergence, losses),
        *named("logprob_from_logits", "N={} V={}", ("triton", "cuda"), _logits, logits),
        *named("policy_loss", "N={}", triton, _policy_loss, tokens),
        *named("tree_attention", "{3} x ({0}+{1}x{2}) heads {4} D={5}", triton, _attention, attention),
        *named("tree_decode", "P={} R={} G={} x {} heads {} D={}", triton, _decode, decode),
        *named("sample_tokens", "N={} V={} top_k={} top_p={}", triton, _sampling, sampling),
        *named("tree_recurrence", "{}+{}x{} heads {} D={}", triton, _recurrence, recurrence),
    ]
