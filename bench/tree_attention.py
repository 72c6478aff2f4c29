"""``tree_attention`` on a prompt shared by a group, against masked, block-sparse and unshared attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rolltree.kernels import tree_attention

from .runner import Bench, Calls, Case, UnsupportedError


@dataclass(frozen=True)
class Inputs:
    """One tree of depth 1: a prompt of P tokens, then G responses of R tokens; T = P + G R."""

    q: Tensor  # [T, Hq, D], requires grad
    k: Tensor  # [T, Hkv, D], requires grad
    v: Tensor  # [T, Hkv, D], requires grad
    upstream: Tensor  # [T, Hq, D]
    subtree_end: Tensor  # [T] int32
    prompt: int
    response: int
    group: int

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the upstream gradient of the flat sequences, [G, H, P + R, D]: the prompt repeated in each."""
        rows = torch.arange(self.prompt + self.response, device=self.q.device)
        index = rows + (rows >= self.prompt) * torch.arange(self.group, device=rows.device)[:, None] * self.response
        whole = (self.q, self.k, self.v, self.upstream)
        q, k, v, upstream = (x.detach()[index].transpose(1, 2).contiguous() for x in whole)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), upstream

    @property
    def visible_pairs(self) -> int:
        """(row, key) pairs that the tree lets see each other."""
        return self.prompt * (self.prompt + 1) // 2 + self.group * (
            self.prompt * self.response + self.response * (self.response + 1) // 2
        )


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """(prompt, response, group, Hq, Hkv, D)"""
    if device.type == "cpu":
        shapes, dtype = [(256, 64, 4, 8, 4, 32)] + ([] if quick else [(512, 128, 8, 8, 4, 32)]), torch.float32
    else:
        wide = [(2048, 1024, 8, 32, 8, 128), (512, 4096, 8, 32, 8, 128), (4096, 512, 16, 32, 8, 128)]
        shapes, dtype = [(512, 128, 8, 16, 8, 128)] if quick else wide, torch.bfloat16
    for prompt, response, group, query_heads, heads, dim in shapes:
        total = prompt + group * response
        generator = torch.Generator(device).manual_seed(0)

        def normal(count: int, t: int = total, d: int = dim, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(t, count, d, generator=generator, device=device).to(dtype)

        end = torch.full((total,), total, dtype=torch.int32)
        end[prompt:] = (torch.arange(group * response) // response + 1).int() * response + prompt
        q, k, v = normal(query_heads).requires_grad_(), normal(heads).requires_grad_(), normal(heads).requires_grad_()
        inputs = Inputs(q, k, v, normal(query_heads), end.to(device), prompt, response, group)
        name = f"{prompt}+{group}x{response} heads {query_heads}/{heads} D={dim} {str(dtype).removeprefix('torch.')}"
        yield Case(name, inputs)


def both_directions(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...], upstream: Tensor) -> Calls:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(attend(), leaves, upstream)}


def rolltree(x: Inputs) -> Calls:
    return both_directions(lambda: tree_attention(x.q, x.k, x.v, x.subtree_end), (x.q, x.k, x.v), x.upstream)


def sdpa_masked(x: Inputs) -> Calls:
    total = len(x.q)
    if total > 16384:
        raise UnsupportedError(f"its mask would take {total * total / 2**30:.1f} GiB")
    row = torch.arange(total, device=x.q.device)
    mask = (row <= row[:, None]) & (row[:, None] < x.subtree_end)

    def attend() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return both_directions(attend, (x.q, x.k, x.v), x.upstream)


def sdpa_flat(x: Inputs) -> Calls:
    q, k, v, upstream = x.leaves
    return both_directions(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), upstream
    )


def flex_attention(x: Inputs) -> Calls:
    if x.q.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    from torch.nn.attention import flex_attention as flex

    total, end = len(x.q), x.subtree_end

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row < end[key])

    mask = flex.create_block_mask(visible, None, None, total, total, device=x.q.device)
    compiled = torch.compile(flex.flex_attention)

    def attend() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return both_directions(attend, (x.q, x.k, x.v), x.upstream)


def flash_attn_flat(x: Inputs) -> Calls:
    from flash_attn import flash_attn_func

    if x.q.device.type != "cuda":
        raise UnsupportedError("it needs CUDA")
    q, k, v, upstream = (t.detach().transpose(1, 2).contiguous() for t in x.leaves)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    return both_directions(lambda: flash_attn_func(q, k, v, causal=True), (q, k, v), upstream)


def bare_gemms(x: Inputs) -> Calls:
    """Matrix products of the visible pairs' size: two of them forward, five more backward."""
    total, heads, dim = x.q.shape
    keys = max(1, round(x.visible_pairs / total))  # keys a row sees, on average
    q, key, value = (torch.randn(heads, n, dim, device=x.q.device).to(x.q.dtype) for n in (total, keys, keys))
    scores = torch.empty(heads, total, keys, device=x.q.device, dtype=x.q.dtype)

    def products(count: int) -> None:
        for i in range(count):
            if i % 2 == 0:
                torch.bmm(q, key.transpose(1, 2), out=scores)
            else:
                torch.bmm(scores, value)

    return {"forward": lambda: products(2), "forward+backward": lambda: products(7)}


BENCH = Bench(
    op="tree_attention",
    cases=cases,
    providers={
        "rolltree": rolltree,
        "sdpa, masked tree": sdpa_masked,
        "sdpa, flat": sdpa_flat,
        "flex_attention": flex_attention,
        "flash-attn, flat": flash_attn_flat,
    },
    ceiling=bare_gemms,
    ceiling_is="the matrix products of the visible (row, key) pairs alone, by torch.bmm",
)
