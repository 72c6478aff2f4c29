"""The bits of log-probs that a native engine records, compared with those that training computes."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..data.tree import TokenTree
from ..model.invariant.check import RESPONSES, TOKENS, check_invariant, differing, sample_prompts
from .native.engine import EngineConfig, NativeEngine
from .sampling_params import SamplingParams


def check_sampler(model: PreTrainedModel) -> None:
    """Compare the bits of log-probs that a native engine of ``model`` records with those that training computes.

    Raises:
        UserError: they differ.
    """
    check_invariant(model, _sampled(model))


def other_bits(model: PreTrainedModel) -> str | None:
    """Return where log-probs that a native engine of ``model`` samples have other bits in training, as `differing`."""
    return differing(model, _sampled(model))


def _sampled(model: PreTrainedModel) -> list[TokenTree]:
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=4096))
    params = SamplingParams(n=RESPONSES, max_new_tokens=TOKENS, ignore_eos=True, seed=0)
    return engine.generate(sample_prompts(model), params)
