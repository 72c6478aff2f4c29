"""`extra_ids` of `linear_logprob`: K more ids to score in every row, as targets after the caller's own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Arguments

ABSENT = -1


class MoreTargets:
    """The caller's M targets followed by N K others, one for each entry of ``extra_ids``."""

    def __init__(
        self,
        extra_ids: Tensor,  # [N, K] int
        target: Tensor,  # [M] int
        row: Tensor | None,  # [M] int
        N: int,
        V: int | None,  # None: known to all shards together
    ) -> None:
        check = Arguments("linear_logprob", "target", target)
        check.integers("extra_ids", extra_ids, (N, "K"))
        if V is not None and target.device.type == "cpu":  # on a GPU its log-prob is NaN
            check.index("extra_ids", extra_ids, V, low=ABSENT, remedy=f"{ABSENT} stands for none")
        rows = torch.arange(N, device=target.device)
        self.absent = extra_ids == ABSENT  # [N, K]
        # An absent entry scores token 0 instead, so that no shape depends on the ids.
        more = extra_ids.long().masked_fill(self.absent, 0)
        self.own = len(target)
        self.target = torch.cat([target.long(), more.flatten()])  # [M + N K]
        self.row = torch.cat(
            [rows if row is None else row.long(), rows[:, None].expand(extra_ids.shape).flatten()]
        )  # [M + N K]

    def split(self, logprob: Tensor) -> tuple[Tensor, Tensor]:
        """``logprob [M + N K]`` as the caller's ``[M]`` and the extra ``[N, K]``, NaN where absent."""
        extra = logprob[self.own :].view(self.absent.shape)
        return logprob[: self.own], extra.masked_fill(self.absent, torch.nan)
