"""Recurrences on trees token by token, from each token's parent alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def states_by_token(given: list[Any], parents: list[int], first: Tensor | None = None) -> list[Tensor]:
    """Return each token's state [H, Dk, Dv], of query, key, value, decay and beta; roots begin with ``first``."""
    _, k, v, g, beta = given
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    zero = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if first is None else first
    states: list[Tensor] = []
    for t, parent in enumerate(parents):
        state = states[parent] if parent >= 0 else zero
        decay = g[t].exp()
        state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        new = v[t]
        if beta is not None:
            new = beta[t][:, None] * (new - torch.einsum("hk,hkv->hv", k[t], state))
        states.append(state + k[t][:, :, None] * new[:, None])
    return states


def by_token(given: list[Any], parents: list[int], scale: float, states: list[Tensor] | None = None) -> Tensor:
    """Return the outputs [T, H, Dv]."""
    query = given[0].repeat_interleave(given[2].shape[1] // given[0].shape[1], 1)
    states = states_by_token(given, parents) if states is None else states
    return scale * torch.einsum("thk,thkv->thv", query, torch.stack(states))


def convolved(x: Tensor, w: Tensor, parents: list[int]) -> Tensor:
    outs = []
    for row in range(len(x)):
        out, at = torch.zeros_like(x[0]), row
        for tap in range(w.shape[1]):
            if at >= 0:
                out, at = out + w[:, -1 - tap] * x[at], parents[at]
        outs.append(out)
    return torch.stack(outs)
