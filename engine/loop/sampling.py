"""The parts with which a run samples and judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from ..programs import RolloutProgram
from ..rollout import SamplingParams
from ..rollout.sampler import Sampler
from .sources import PromptSource


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
    others: Mapping[str, Sampler] = field(default_factory=dict)
