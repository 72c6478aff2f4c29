"""Sampling of a step: the parameters of each sample as columns of the step's vector, and the call of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels import SampleOutput, dispatch
from rolltree.kernels.linear_logprob.logits import score_rows
from rolltree.kernels.sampling import sample_rows

from .assembly import Step
from .rows import RowTable

Array = npt.NDArray[Any]

DTYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    "top_k": torch.int32,
    **dict.fromkeys(("seed", "step"), torch.int64),
}
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Filters with the value that keeps every token."""


@dataclass(frozen=True)
class Draws:
    """Parameters of the E samples of a step."""

    slots: Array  # [E] int64, in the row table
    offset: Array  # [E] int64, see Step.sample_offset
    head_row: Array  # [E] int64, index into the step's sample_rows
    columns: Mapping[str, Array]  # [E] each, of `DTYPES`
    filters: tuple[str, ...]
    """Names in `FILTERS` that some row uses."""
    constrained: Array  # [<= E] int64, samples with biased or forbidden tokens
    keeping: Array  # [<= E] int64, samples that record the ids they are drawn from
    most_top: int
    """Largest number of likely tokens that a row records."""
    changes: int
    """Value of `RowTable.changes` when the columns were made."""

    @staticmethod
    def of(step: Step, rows: RowTable, samples: Array, seeds: Array, before: Draws | None = None) -> Draws:
        """Return the parameters of a step's samples.

        Args:
            samples: [S] int64, the number of samples of each of the step's sample_rows.
            seeds: [E] int64, one for each sample.
            before: parameters of the previous step; with the same unchanged branches only the positions are replaced.
        """
        slots, offset = step.sample_slots, step.sample_offset
        if before is not None and before.changes == rows.changes and np.array_equal(before.slots, slots):
            columns = {**before.columns, "step": rows.drawn[before.slots] + rows.length[before.slots] + offset}
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
            {**columns, "seed": seeds, "step": rows.drawn[slots] + rows.length[slots] + offset},
            filters,
            constrained=np.flatnonzero(rows.constrained[slots]),
            keeping=np.flatnonzero(rows.keeps[slots]),
            most_top=int(rows.top[slots].max(initial=0)),
            changes=rows.changes,
        )


class DeviceSamples(NamedTuple):
    """The sampler's results on the device."""

    out: SampleOutput
    numbers: Tensor | None  # [W, 4, E] float32: token's bits, logprob, raw_logprob, entropy of steps: for one copy

    def fetch(self, samples: int, steps: int = 1) -> tuple[Array, Array, Array, Array]:
        """Wait for the results; return token int64, logprob, raw_logprob, entropy [samples * steps] of the first rows,
        those of one row after the other."""
        if self.numbers is None:
            token, logprob, raw_logprob, entropy = (column.numpy()[:samples] for column in self.out[:4])
        else:
            of_steps = self.numbers[:steps, :, :samples].cpu().numpy()
            token, logprob, raw_logprob, entropy = of_steps.transpose(1, 2, 0).reshape(4, -1)
            token = token.view(np.int32).astype(np.int64)
        return token, logprob, raw_logprob, entropy


def draw(
    logits: Tensor, columns: Mapping[str, Tensor], filters: tuple[str, ...], never: Tensor | None = None
) -> SampleOutput:
    """Sample from logits [E, V] with the parameters ``columns`` [E]; does not synchronise with the device.

    Args:
        never: [K] int64, tokens that are not sampled. The log-probs are those of the softmax over all tokens
            nevertheless, as a trainer computes them, unless filters restrict the support of a row.
    """
    top_k, top_p, min_p = (columns[name] if name in filters else None for name in FILTERS)
    temperature = columns["temperature"]
    left = logits if never is None else logits.index_fill(1, never, -torch.inf)
    out = sample_rows(left, temperature, top_k, top_p, min_p, columns["seed"], columns["step"])
    trained = dispatch.named("invariant", logits.device)  # the sampler's sums have another order than a trainer's
    if never is None and not trained:
        return out
    whole = temperature > 0
    for name in filters:
        whole = whole & (columns[name] == FILTERS[name])
    scale = torch.where(temperature > 0, temperature, 1.0)
    if trained:
        both = torch.stack((scale, torch.ones_like(scale)), 1)
        logprob, raw_logprob = score_rows(logits, out.token, both).unbind(1)
    else:
        scale = scale[:, None]
        logprob = out.logprob + ((left / scale).logsumexp(-1) - (logits / scale).logsumexp(-1))
        raw_logprob = out.raw_logprob + (left.logsumexp(-1) - logits.logsumexp(-1))
    logprob = torch.where(whole, logprob, out.logprob)
    return out._replace(logprob=logprob, raw_logprob=raw_logprob)


def device_samples(out: SampleOutput) -> DeviceSamples:
    """Pack the numbers of ``out`` so that one copy fetches them."""
    if out.token.device.type == "cpu":  # the host reads them where they are
        return DeviceSamples(out, None)
    token = out.token.int().view(torch.float32)
    return DeviceSamples(out, torch.stack((token, out.logprob, out.raw_logprob, out.entropy))[None])
