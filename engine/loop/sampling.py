"""The parts with which a run samples and judges, and the seeds of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..programs import RolloutProgram
from ..prompts.sources import PromptSource
from ..rollout import SamplingParams
from ..rollout.sampler import Sampler


@dataclass(frozen=True)
class SamplingParts:
    """The parts of `Controller`.

    Attributes:
        program: the configured program; ``sampler`` copies it for every job.
        program_name: the configured name, for messages.
        params: sampling parameters before schedules change them.
        seed: seed of the run; a group's seed follows from it and the ticket.
        on_failure: treatment of a response whose verifier failed: drop, zero or raise.
        overlaps: sample in another thread while the policy is updated.
        on_cpu: sampling and training share the cores of one CPU.
        colocated: the sampler rests during updates.
        counted: a call of the sampler's `step` is a step of all that it samples, and verdicts do not use it.
        others: the samplers of further policies, by name; ``sampler`` asks them for the roles that they play.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    source: PromptSource
    program: RolloutProgram
    program_name: str
    params: SamplingParams
    seed: int
    on_failure: str = "drop"
    overlaps: bool = False
    on_cpu: bool = False
    colocated: bool = False
    counted: bool = False
    others: Mapping[str, Sampler] = field(default_factory=dict)


class GroupSeeds:
    """The seeds of groups, which follow from the run's seed, the ticket and the attempt.

    Args:
        batch: groups of a batch; the seeds of so many tickets are drawn at once.
    """

    def __init__(self, seed: int, batch: int) -> None:
        self._seed, self._batch = seed, batch
        self._block: tuple[int, list[int]] = (-1, [])  # a block of tickets and their seeds

    def __call__(self, ticket: int, attempt: int) -> int:
        """Return the seed of one request of a group."""
        block, index = divmod(ticket, self._batch)
        if attempt:
            sequence = np.random.SeedSequence([self._seed, block + 1, index, attempt])
            return int(sequence.generate_state(1, np.uint64).astype(np.int64)[0])
        if self._block[0] != block:
            sequence = np.random.SeedSequence([self._seed, block + 1])
            self._block = block, sequence.generate_state(self._batch, np.uint64).astype(np.int64).tolist()
        return self._block[1][index]
