"""``tree_recurrence``: the gated delta rule on trees of rollouts, against scans of every path.

Axolotl's `tree-recurrence` hands states on from segment to segment where it has Triton kernels of
flash-linear-attention, which need CUDA. On a CPU it runs Transformers' own function on every path, padded, and keeps
each row once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rolltree.engine import TokenTree
from rolltree.kernels.tree_recurrence import RecurrencePlan, find_segments, tree_recurrence

from .. import workloads
from ..runner import Bench, Calls, Case
from .tree_attention import both_directions

FLAT = "transformers, flat"


@dataclass(frozen=True)
class Inputs:
    """The inputs of the gated delta rule on one tree of T tokens."""

    query: Tensor  # [T, H, Dk], requires grad, as do the following four
    key: Tensor  # [T, H, Dk], of length 1
    value: Tensor  # [T, H, Dv]
    decay: Tensor  # [T, H]
    beta: Tensor  # [T, H]
    upstream: Tensor  # [T, H, Dv]
    tree: TokenTree

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients are computed."""
        return self.query, self.key, self.value, self.decay, self.beta


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    heads, width = (2, 32) if quick else (8, 64) if device.type == "cpu" else (32, 128)
    prompt, group, response = (64, 4, 32) if quick else (512, 8, 128)
    yield from shaped(device, P=prompt, G=group, R=response, H=heads, D=width)


def shaped(device: torch.device, *, P: int, G: int, R: int, H: int, D: int) -> Iterator[Case]:
    """Yield the case of ``G`` responses of ``R`` tokens to a prompt of ``P``."""
    tree = workloads.group(P, R, G)
    yield Case(f"{P}+{G}x{R} heads {H} D={D} float32", partial(_inputs, tree, H, D, device))


def _inputs(tree: TokenTree, heads: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tree.num_tokens, heads, *shape, generator=generator, device=device)

    query, key, value, upstream = (normal(width) for _ in range(4))
    query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    decay, beta = -0.05 * normal().exp(), normal().sigmoid()  # a state outlives some dozens of tokens
    for leaf in (query, key, value, decay, beta):
        leaf.requires_grad_()
    return Inputs(query, key, value, decay, beta, upstream, tree)


def rolltree(x: Inputs) -> Calls:
    plan = RecurrencePlan.make(find_segments(x.tree.subtree_end), device=x.query.device)
    scale = x.query.shape[-1] ** -0.5

    def scan() -> Tensor:
        return tree_recurrence(x.query, x.key, x.value, x.decay, x.beta, plan, scale=scale)[0]

    return both_directions(scan, x.leaves, x.upstream)


def axolotl(x: Inputs) -> Calls:
    from transformers.models.qwen3_next import modeling_qwen3_next as transformers_own
    from tree_recurrence import TreePlan, tree_scan  # type: ignore[import-not-found]
    from tree_recurrence.components import gated_delta_rule_scan  # type: ignore[import-not-found]

    varlen = x.query.device.type == "cuda"
    if varlen:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    else:
        chunk_gated_delta_rule = transformers_own.torch_chunk_gated_delta_rule
    scan = gated_delta_rule_scan(chunk_gated_delta_rule, use_qk_l2norm_in_kernel=False, varlen=varlen)
    segments = find_segments(x.tree.subtree_end)
    plan = TreePlan.from_kwargs(
        {
            "tree_cu_seqlens_q": np.append(segments.start, x.tree.num_tokens),
            "tree_segment_parents": segments.parent,
        }
    )
    inputs = [leaf[None] for leaf in x.leaves]
    return both_directions(lambda: tree_scan(scan, inputs, plan, forkable=varlen)[0], x.leaves, x.upstream)


def transformers_flat(x: Inputs) -> Calls:
    """Time Transformers' own function on every path, in one batch; the paths have one length.

    A row's upstream gradient is divided among its copies, whose gradients then add up to the tree's.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rows = np.stack([x.tree.path_rows(leaf) for leaf in range(x.tree.num_leaves)])
    index = torch.from_numpy(rows).to(x.query.device)
    leaves = tuple(leaf.detach()[index].requires_grad_() for leaf in x.leaves)
    upstream = x.upstream / torch.bincount(index.flatten())[:, None, None]
    return both_directions(lambda: torch_chunk_gated_delta_rule(*leaves)[0], leaves, upstream[index])


def token_ratio(x: Inputs) -> float:
    return x.tree.logical_tokens / x.tree.num_tokens


BENCH = Bench(
    op="tree_recurrence",
    directions=("forward", "forward+backward"),
    cases=cases,
    shaped=shaped,
    providers={"rolltree": rolltree, "tree-recurrence": axolotl, FLAT: transformers_flat},
    speedup_over=FLAT,
    speedup_ceiling=token_ratio,
)
