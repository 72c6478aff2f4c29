"""How the rows of a step are sampled: columns on the host, which travel in the step's vector; and the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels import SampleOutput
from rolltree.kernels.sampling import sample_rows

from .rows import RowTable
from .scheduler import Step

Array = npt.NDArray[Any]

DTYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    "top_k": torch.int32,
    **dict.fromkeys(("seed", "step"), torch.int64),
}
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""With the value that leaves every token."""


@dataclass(frozen=True)
class Draws:
    """E samples of a step."""

    slots: Array  # [E] int64, of the row table
    offset: Array  # [E] int64, see Step.sample_offset
    head_row: Array  # [E] int64, which of the step's sample_rows it is drawn from
    columns: Mapping[str, Array]  # [E] each, of `DTYPES`
    filters: tuple[str, ...]
    """Those of `FILTERS` that some row has."""
    constrained: Array  # of E, those with biased or forbidden tokens
    keeping: Array  # of E, those that keep the ids they are drawn from
    most_top: int
    """Likely tokens that some row keeps."""
    changes: int
    """As of the row table when they were made."""

    @staticmethod
    def of(step: Step, rows: RowTable, samples: Array, seeds: Array, before: Draws | None = None) -> Draws:
        """``samples`` [S] int64 from each of the step's sample_rows, with a seed [E] int64 each.

        Of the same branches as ``before``, all but the step of each stays.
        """
        slots, offset = step.sample_slots, step.sample_offset
        if before is not None and before.changes == rows.changes and np.array_equal(before.slots, slots):
            columns = {**before.columns, "step": rows.length[before.slots] + offset}
            return replace(before, offset=offset, columns=columns)
        head_row = np.arange(len(samples))
        if len(seeds) > len(samples):
            head_row = np.repeat(head_row, samples)
            slots, offset = slots[head_row], offset[head_row]
        columns = {name: getattr(rows, name)[slots] for name in ("temperature", *FILTERS)}
        filters = tuple(name for name, off in FILTERS.items() if (columns[name] != off).any())
        return Draws(
            slots,
            offset,
            head_row,
            {**columns, "seed": seeds, "step": rows.length[slots] + offset},
            filters,
            constrained=np.flatnonzero(rows.constrained[slots]),
            keeping=np.flatnonzero(rows.keeps[slots]),
            most_top=int(rows.top[slots].max(initial=0)),
            changes=rows.changes,
        )


class Drawn(NamedTuple):
    """What the sampler answers, on the device."""

    out: SampleOutput
    numbers: Tensor | None  # [4, E] float32: the token's bits, logprob, raw_logprob, entropy: fetched by one copy

    def fetch(self, samples: int) -> tuple[Array, Array, Array, Array]:
        """Token int64, logprob, raw_logprob, entropy [samples] of the first rows; waits for them."""
        if self.numbers is None:
            token, logprob, raw_logprob, entropy = (column.numpy()[:samples] for column in self.out[:4])
        else:
            token, logprob, raw_logprob, entropy = self.numbers[:, :samples].cpu().numpy()
            token = token.view(np.int32).astype(np.int64)
        return token, logprob, raw_logprob, entropy


def draw(logits: Tensor, columns: Mapping[str, Tensor], filters: tuple[str, ...]) -> Drawn:
    """Sample [E, V] by columns [E]; waits for nothing."""
    top_k, top_p, min_p = (columns[name] if name in filters else None for name in FILTERS)
    out = sample_rows(logits, columns["temperature"], top_k, top_p, min_p, columns["seed"], columns["step"])
    return drawn_from(out)


def drawn_from(out: SampleOutput) -> Drawn:
    if out.token.device.type == "cpu":  # there is nothing to fetch
        return Drawn(out, None)
    return Drawn(out, torch.stack((out.token.int().view(torch.float32), out.logprob, out.raw_logprob, out.entropy)))
