"""How the rows of a step are sampled: columns on the host, which travel in the step's vector; and the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels import SampleOutput, sample_tokens

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

    @staticmethod
    def of(step: Step, rows: RowTable, samples: Array, seeds: Array) -> Draws:
        """``samples`` [S] int64 from each of the step's sample_rows, with a seed [E] int64 each."""
        head_row = np.repeat(np.arange(len(samples)), samples)
        slots, offset = step.sample_slots[head_row], step.sample_offset[head_row]
        columns = {name: getattr(rows, name)[slots] for name in ("temperature", *FILTERS)}
        filters = tuple(name for name, off in FILTERS.items() if (columns[name] != off).any())
        return Draws(slots, offset, head_row, {**columns, "seed": seeds, "step": rows.length[slots] + offset}, filters)


class Drawn(NamedTuple):
    """What the sampler answers, on the device."""

    out: SampleOutput
    numbers: Tensor  # [4, E] float32: the token's bits, logprob, raw_logprob, entropy: fetched by one copy


def draw(logits: Tensor, columns: Mapping[str, Tensor], filters: tuple[str, ...]) -> Drawn:
    """Sample [E, V] by columns [E]; waits for nothing."""
    given: Any = {name: columns[name] for name in ("temperature", "seed", "step", *filters)}
    out = sample_tokens(logits, **given)
    return Drawn(out, numbers_of(out))


def numbers_of(out: SampleOutput) -> Tensor:
    return torch.stack((out.token.int().view(torch.float32), out.logprob, out.raw_logprob, out.entropy))
