"""Decode attention over groups that share a prompt: shared keys read once, or read for every row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rolltree.engine import UserError
from rolltree.kernels.tree_decode import DecodePlan, tree_decode_attention

from ..runner import Bench, Calls, Case, UnsupportedError

FLAT = "flat paged decode"
PAGE = 16


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [N, Hq, D]
    k_pages: Tensor  # [P, page, Hkv, D]
    v_pages: Tensor
    prefix: int
    unique: int
    group: int
    groups: int

    def plan(self, *, shared: bool) -> DecodePlan:
        """Return the nodes of all groups; without ``shared`` every row has the prefix's pages as its own node."""
        prefix_pages, own_pages = self.prefix // PAGE, self.unique // PAGE
        pages, length, position, begin, end = [], [], [], [], []
        first = 0
        for g in range(self.groups):
            prefix = list(range(first, first + prefix_pages))
            first += prefix_pages
            row = g * self.group
            if shared:
                pages.append(prefix)
                length.append(self.prefix)
                position.append(0)
                begin.append(row)
                end.append(row + self.group)
            for i in range(self.group):
                unique_pages = list(range(first, first + own_pages))
                first += own_pages
                pages.append(unique_pages if shared else prefix + unique_pages)
                length.append(self.unique + (0 if shared else self.prefix))
                position.append(self.prefix if shared else 0)
                begin.append(row + i)
                end.append(row + i + 1)
        device = self.q.device
        indptr = [0]
        for node_pages in pages:
            indptr.append(indptr[-1] + len(node_pages))

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        rows = self.group * self.groups
        return DecodePlan(
            page_indptr=tensor(indptr),
            page_ids=tensor([page for node_pages in pages for page in node_pages]),
            node_offset=tensor([0] * len(pages)),
            node_length=tensor(length),
            node_position=tensor(position),
            row_begin=tensor(begin),
            row_end=tensor(end),
            query_position=tensor([self.prefix + self.unique - 1] * rows),
        )

    @property
    def unique_tokens(self) -> int:
        return self.groups * (self.prefix + self.group * self.unique)

    @property
    def byte_ratio(self) -> float:
        return self.groups * self.group * (self.prefix + self.unique) / self.unique_tokens


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield cases by prefix, own tokens, responses of a group and groups; in the last ones sharing cannot win."""
    cpu = device.type == "cpu"
    heads, kv_heads, dim = (8, 4, 32) if cpu else (16, 8, 128)
    dtype = torch.float32 if cpu else torch.bfloat16
    shapes = [(512, 64, 16, 4), (1024, 128, 16, 4), (4096, 128, 16, 1), (128, 512, 2, 8), (1024, 1024, 1, 16)]
    if not cpu:
        grid = itertools.product((256, 1024, 4096, 16384), (128, 2048), (8, 16, 64), (1, 16))
        shapes = [(p, r, g, n) for p, r, g, n in grid if n * (p + g * r) <= 1 << 20]
        shapes += [(128, 2048, 2, 16), (1024, 1024, 1, 64)]
    for prefix, unique, group, groups in shapes[:1] if quick else shapes:
        size = {"P": prefix, "R": unique, "G": group, "groups": groups, "Hq": heads, "Hkv": kv_heads, "D": dim}
        yield from shaped(device, **size, dtype=dtype)


def shaped(
    device: torch.device,
    *,
    P: int,
    R: int,
    G: int,
    groups: int,
    Hq: int,
    Hkv: int,
    D: int,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Case]:
    """Yield the case of ``groups`` prompts of ``P`` tokens, each with ``G`` responses that have ``R`` tokens by now.

    Raises:
        UserError: a prompt or response does not fill whole pages.
    """
    if P % PAGE or R % PAGE:
        raise UserError(f"tree_decode takes P and R in whole pages of {PAGE} tokens, got P={P} R={R}.")
    name = f"P={P} R={R} G={G} x {groups} heads {Hq}/{Hkv} D={D} {str(dtype).removeprefix('torch.')}"
    yield Case(name, partial(_inputs, P, R, G, groups, (Hq, Hkv, D), dtype, device))


def _inputs(
    prefix: int,
    unique: int,
    group: int,
    groups: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Inputs:
    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    pages = groups * (prefix + group * unique) // PAGE
    k, v = (torch.randn(pages, PAGE, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(group * groups, heads, dim, dtype=dtype, device=device)
    return Inputs(q, k, v, prefix, unique, group, groups)


def _op(x: Inputs, shared: bool) -> Calls:
    plan = x.plan(shared=shared)
    return {"forward": lambda: tree_decode_attention(x.q, x.k_pages, x.v_pages, plan)}


def rolltree(x: Inputs) -> Calls:
    return _op(x, shared=True)


def flat(x: Inputs) -> Calls:
    """Time the same op with nothing shared, as a paged decode kernel without trees reads keys."""
    return _op(x, shared=False)


def sdpa(x: Inputs) -> Calls:
    """Time torch's attention over keys copied beforehand, contiguous for each row; the copy is not timed."""
    bytes_needed = 2 * x.q.shape[0] * (x.prefix + x.unique) * x.k_pages.shape[2] * x.q.shape[2] * x.q.element_size()
    if bytes_needed > 32 << 30:
        raise UnsupportedError(f"a copy of the keys for every row takes {bytes_needed >> 30} GiB")
    plan = x.plan(shared=False)
    pages = plan.page_ids.view(x.q.shape[0], -1).long()
    keys, values = (p[pages].flatten(1, 2).transpose(1, 2) for p in (x.k_pages, x.v_pages))  # [N, Hkv, S, D]
    query = x.q[:, :, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return {"forward": lambda: attention(query, keys, values, enable_gqa=True)}


def flashinfer(x: Inputs) -> Calls:
    import flashinfer

    plan = x.plan(shared=False)
    work = torch.empty(256 << 20, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "NHD")
    last = torch.full((x.q.shape[0],), PAGE, dtype=torch.int32, device=x.q.device)
    wrapper.plan(
        plan.page_indptr,
        plan.page_ids,
        last,
        x.q.shape[1],
        x.k_pages.shape[2],
        x.q.shape[2],
        PAGE,
        q_data_type=x.q.dtype,
    )
    return {"forward": lambda: wrapper.run(x.q, (x.k_pages, x.v_pages))}


def copy(x: Inputs) -> Calls:
    """Time a copy that moves as many bytes as the unique keys and values have: half of them read, and written."""
    half = torch.cat([x.k_pages.flatten(), x.v_pages.flatten()]).chunk(2)
    target = torch.empty_like(half[0])
    return {"forward": lambda: target.copy_(half[0])}


def work(x: Inputs) -> dict[str, tuple[float, float]]:
    """Return the FLOP of two products with every row's keys, and the bytes of unique keys and values, queries and
    outputs."""
    keys = x.prefix + x.unique
    return {"forward": (4.0 * x.q.numel() * keys, float(x.k_pages.nbytes + x.v_pages.nbytes + 2 * x.q.nbytes))}


BENCH = Bench(
    op="tree_decode",
    cases=cases,
    shaped=shaped,
    providers={"rolltree": rolltree, "torch SDPA": sdpa, "flashinfer": flashinfer, FLAT: flat},
    ceiling=copy,
    replayed=True,
    ceiling_is="moving the bytes of the unique keys and values",
    speedup_over=FLAT,
    speedup_ceiling=lambda x: x.byte_ratio,
    work=work,
)
