"""Publication of the policy to the sampler, and the check that the sampler then samples this policy.

A sampler that computes with the trained module itself needs no check. Any other one has a copy of the weights, and is
checked after each publication, and once before the first step:

1. The digests of the weights that it holds are those of the weights that were sent, in the sampler's precision.
2. The log-probs that it records for the responses to a canary prompt are those that the trained module computes for
   them. This covers what a digest does not: weights kept in another form, cached keys, the sampler's own kernels.

A digest reads the weights once more on both sides, which takes about as long as copying them. The canary is one prompt
of 32 tokens and four responses of eight, so eight decoding steps and a small forward of the trained module. Unfinished
responses of a run continue in those steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import RunError
from ..learn.learning import Learning
from ..model.self_check import sampled_error, trees_fit, usual_tokens
from ..rollout.sampler import Sampler, WeightSource
from .shipping import digests_of

PROMPT_TOKENS, RESPONSES, RESPONSE_TOKENS = 32, 4, 8
"""Size of the canary; inferred, so that the prompt fills a page of the KV cache and the responses share it."""
Further = Mapping[str, tuple[WeightSource, int]]
"""Weights and number of updates of each further policy, by name."""
NONE: Further = MappingProxyType({})
REMEDY = (
    "the run would train on another policy's samples; use another version of the backend, or rollout.backend = 'native'"
)


def further(learner: Learning) -> Further:
    """Return the weights of the further policies of ``learner``."""
    return {name: (other.weights(), other.updates) for name, other in learner.policies.items()}


class Trained(Protocol):
    """The trained policy, with which a sampler that has a copy of the weights is compared."""

    def usual_tokens(self) -> Array:
        """Return the tokens [n] int64 of the vocabulary that have no meaning of their own."""
        ...

    def sampled_error(self, trees: Sequence[TokenTree]) -> float:
        """Return the mean absolute difference (nats) between recorded log-probs and those of the policy; see
        `rolltree.engine.model.self_check.sampled_error`."""
        ...


@dataclass(frozen=True)
class TrainedModel:
    """The trained policy, if this process has it; see `Trained`."""

    model: PreTrainedModel

    def usual_tokens(self) -> Array:
        return usual_tokens(self.model.config)

    def sampled_error(self, trees: Sequence[TokenTree]) -> float:
        return sampled_error(self.model, trees)


class Publication:
    """Sends the policy to the sampler.

    Args:
        note: called with sentences for the user.
        trained: the trained policy, which a sampler with a copy of its own is compared with; None for no comparison.
        others: the samplers of further policies, by name.
        keep_keys: the sampler continues with keys that older weights computed.

    Attributes:
        difference: mean absolute difference (nats) of the last canary's log-probs; None before the first.
    """

    def __init__(
        self,
        sampler: Sampler,
        note: Callable[[str], object],
        *,
        trained: Trained | None = None,
        others: Mapping[str, Sampler] = MappingProxyType({}),
        keep_keys: bool = False,
    ) -> None:
        self.sampler, self.note = sampler, note
        self.trained, self.others, self.keep_keys = trained, others, keep_keys
        self.difference: float | None = None
        self._told = False

    def send(self, weights: WeightSource, version: int, others: Further = NONE) -> None:
        """Make the sampler load ``weights`` and check it; ``version`` counts the updates of the policy.

        Args:
            others: for the samplers of further policies, which compute with the trained modules themselves.

        Raises:
            RunError: the sampler does not sample the policy of these weights.
        """
        self.sampler.load(weights, version, keep_keys=self.keep_keys)
        for name, (source, updates) in others.items():
            self.others[name].load(source, updates, keep_keys=self.keep_keys)
        self.check(weights, version)

    def check(self, weights: WeightSource, version: int) -> None:
        """Check that the sampler samples the policy of ``weights``, which the trained model has now.

        Raises:
            RunError: it does not.
        """
        if self.trained is None:
            return
        dtype = self._check_digests(weights, version)
        trees = self._canary(version)
        if other := {v for tree in trees for v in tree.policy_version[tree.loss_mask].tolist()} - {version}:
            raise RunError(f"After update {version} the sampler records version {min(other)} for its tokens; {REMEDY}.")
        self.difference = self.trained.sampled_error(trees)
        if not trees_fit(self.difference, dtype):
            raise RunError(
                f"After update {version} the sampler's log-probs of a canary prompt differ from the trained model's by "
                f"{self.difference:.3g} nats a token on average; {REMEDY}, or set trainer.self_check to false."
            )

    def _check_digests(self, weights: WeightSource, version: int) -> torch.dtype:
        """Compare the digests of all weights that the sampler holds as they are; return the lowest precision found."""
        sent, held = weights.tensors(), self.sampler.digests()
        dtypes = {value.dtype for value in held.values()} | {tensor.dtype for tensor in sent.values()}
        expected = digests_of(weights, {name: held[name].dtype for name in sent if name in held})
        if wrong := [name for name in expected if held[name].digest != expected[name]]:
            raise RunError(
                f"After update {version} the sampler holds other weights than were sent: '{wrong[0]}' and "
                f"{len(wrong) - 1} more of {len(sent)} tensors; {REMEDY}."
            )
        if len(expected) < len(sent) and not self._told:
            self._told = True
            self.note(
                f"The sampler keeps {len(sent) - len(expected)} of {len(sent)} weights in a form of its own; these are "
                "checked by the log-probs of a canary prompt alone."
            )
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    def _canary(self, version: int) -> list[TokenTree]:
        """Sample the canary's responses.

        The prompt is the same each time, so that keys which an old policy cached would be found. Where the run keeps
        such keys (`loop.keep_keys`), the prompt changes with the version instead.
        """
        assert self.trained is not None
        longest = self.sampler.longest or PROMPT_TOKENS + RESPONSE_TOKENS
        tokens = min(RESPONSE_TOKENS, longest // 2)
        draw = np.random.default_rng(version if self.keep_keys else 0)
        usual = self.trained.usual_tokens()
        prompt = usual[draw.integers(len(usual), size=min(PROMPT_TOKENS, longest - tokens))]
        return self.sampler.probe([prompt.tolist()], n=RESPONSES, tokens=tokens, seed=version)
