"""Losses of whole terms, for `algorithm.terms` with `loss`: classes as docs/extending.md describes them.

Each ``loss`` returns a sum over responses or tokens, which the run divides by the term's normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rolltree.kernels import PathIndex

from ..data.columns import Column, declare
from ..data.tree import TokenTree

declare(Column("scored_id", np.int32, "token", "id that a loss scores in its place", -1, merge="first", to_device=True))
declare(Column("verdict", np.float32, "leaf", "the verifier's reward, for losses", to_device=True))


class Laser:
    """LaSeR, last-token self-rewarding: the sum over responses of ``(beta (log p(z) - c) - R)**2``, p the policy's
    distribution over the token after the response's last one but one, where it ends, and R the verifier's reward.

    That the place is the one that predicts the end token, and that the divisor is the number of responses, is inferred.

    Args:
        token: id of z, a token that responses never contain.
        beta, c: scale and offset of the score; c is about log p(z) before training, so that scores begin near 0 (both
            defaults are inferred).
    """

    extra = ("scored_id",)

    def __init__(self, token: int, beta: float = 0.1, c: float = -20.0) -> None:
        if token < 0:
            raise ValueError("its option `token` must be an id of the vocabulary, at least 0")
        self.token, self.beta, self.c = token, beta, c

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        for tree in trees:
            ids = np.full(tree.num_tokens, -1)
            ends = [tree.response_rows(int(leaf))[-1] for leaf in np.flatnonzero(tree.response_length)]
            ids[ends] = self.token
            tree.set("scored_id", np.where(tree.loss_mask, ids, -1))
            given = tree.rewards.get("verifier", tree.rewards.get("reward"))
            tree.set("verdict", np.zeros(tree.num_leaves) if given is None else given)

    def normalizer(self, trees: Sequence[TokenTree]) -> float:
        return float(sum((tree.loss_length > 0).sum() for tree in trees))

    def loss(
        self,
        extra_logprob: Tensor,  # [M, 1]
        columns: Mapping[str, Tensor],
        paths: PathIndex,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        counts = (paths.leaf_length > 0) & (columns["scored_id"][paths.leaf_target] >= 0)  # [L]
        score = self.beta * (extra_logprob[paths.leaf_target, 0] - self.c)
        off = (score - columns["verdict"]) * counts
        return off.square().sum(), {"score": ((score * counts).sum(), counts.sum())}


LOSSES: dict[str, Callable[..., Any]] = {"laser": Laser}
