"""The interface through which a training run samples: jobs go in, trees come out, both plain data.

The loop uses only this interface, so a sampler may be an engine of this process (`LocalSampler`), engines of other
processes, or fixed answers in a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
from torch import Tensor

from ..data.media import Picture
from ..data.segment import Text
from ..data.tree import TokenTree
from .digest import Held
from .sampling_params import SamplingParams

Array = npt.NDArray[Any]
FLOP = ("flop", "held_out_flop", "scored_flop")
TALLIED = ("steps", "row_steps", "call_wait_us", *FLOP)
"""Counts of the engine that a sampler adds up; those of `FLOP` hold what `generate` and `score` computed too."""


class LostError(RuntimeError):
    """The sampler has lost a job, which may be submitted again."""


@dataclass(frozen=True)
class Job:
    """A prompt to sample responses to.

    Attributes:
        prompt: token ids.
        seed: determines the samples together with the prompt and ``params``.
        context: input of the rollout program, for example the answer to verify with.
        kept: state of an unfinished job (`Kept.state`), from which it continues.
        version: policy version of the oldest weights that may sample it.
        near: `Flight.place` of an earlier job with the same prompt, whose keys may still be there.
        pictures: those whose rows are among ``prompt``.
        owner: a number; until its `Sampler.let_go` the keys are the last that are dropped from the cache. 0: none.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    context: Any = None
    kept: Mapping[str, Any] | None = None
    version: int = 0
    near: int | None = None
    pictures: tuple[Picture, ...] = ()
    owner: int = 0


@dataclass(eq=False)
class Flight:
    """A submitted job; ``tree`` or ``error`` is set when it is done.

    Attributes:
        texts: texts of the leaves' responses, if the sampler has decoded them.
        begun_anew: how often the job began anew, because the engine that had it was lost.
        place: number of the engine that had it, of several.
    """

    job: Job
    tree: TokenTree | None = None
    error: Exception | None = None
    texts: Sequence[str] | None = None
    begun_anew: int = 0
    place: int | None = None

    @property
    def done(self) -> bool:
        return self.tree is not None or self.error is not None


class Kept(NamedTuple):
    """State of an unfinished job as plain values for a checkpoint, or a word for the reason that it has none.

    Both are None for a job that has not begun.
    """

    state: dict[str, Any] | None
    why: str | None


class WeightSource(Protocol):
    """Source of a sampler's new weights."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all parameters by their names in the model."""
        ...


class Sampler(Protocol):
    """Samples jobs with the newest weights that were loaded; one thread at a time calls it."""

    @property
    def longest(self) -> int | None:
        """Number of positions of the model; None without a limit."""
        ...

    @property
    def end_token_ids(self) -> Collection[int]:
        """End-of-sequence tokens of the model."""
        ...

    @property
    def tally(self) -> Counter[str]:
        """Counts since the start: those of `TALLIED`, and ``us``, microseconds of steps."""
        ...

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        """Begin all ``jobs``, or none if one cannot be served.

        Raises:
            ValueError: a job cannot be served.
        """
        ...

    def step(self, seconds: float) -> list[Flight]:
        """Compute a step, or wait up to ``seconds`` for other processes' steps; return the flights that are done.

        The ``error`` of a flight whose job is lost is a `LostError`.
        """
        ...

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        """Return the present state of unfinished flights, which continue."""
        ...

    def drop(self, flights: Sequence[Flight]) -> None:
        """Stop flights and discard them."""
        ...

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        """Use new weights for every token sampled from now on, also in unfinished responses.

        Args:
            weights: None if the model's own parameters were changed in place.
            version: version of the policy, recorded with every sampled token.
            keep_keys: keep the keys that older weights computed.
        """
        ...

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        """Answer held-out problems with the program if it supports these, otherwise by plain sampling."""
        ...

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        """Return the log-probs [tokens] float32 of continuations, for each prompt; see `RolloutEngine.score`."""
        ...

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        """Sample ``n`` plain responses of ``tokens`` tokens to each prompt, as rollouts are sampled but without a
        program and at temperature 1. Unfinished flights may continue meanwhile."""
        ...

    def digests(self) -> Mapping[str, Held]:
        """Return the digests of the weights that it samples with, by their names in the model; those of weights that
        it keeps in another form are absent."""
        ...

    def rest(self) -> None:
        """Free memory of the device until `wake`, for the trainer; return when it is free. Unfinished flights wait."""
        ...

    def wake(self) -> None:
        """Continue after `rest`."""
        ...

    def let_go(self, owners: Sequence[int]) -> None:
        """Keep the keys of these owners' jobs no longer than others."""
        ...

    def forget_prefixes(self) -> None:
        """Drop the cached keys of prefixes."""
        ...

    def remember(self, texts: Iterable[Text]) -> None:
        """Add texts that were sampled before a restart to those that drafts are taken from."""
        ...

    def in_thread(self) -> AbstractContextManager[Any]:
        """Prepare the calling thread, which steps this sampler while another thread trains."""
        ...

    def settle(self) -> None:
        """Wait until the device has finished its work."""
        ...

    def close(self) -> None:
        """End the processes that sample, if it has any of its own."""
        ...
