"""Completions for a TRL trainer from the native engine, which shares the trainer's weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from ...data.media import Picture, distinct, expand
from ...model.pictures import placeholder, placeholders
from ...rollout import EngineConfig, NativeEngine, SamplingParams
from ..generate import merged, unread
from .checks import base_model
from .pictures import pictures_of
from .replaced import COMPLETIONS, own


class Rollouts:
    """Samples with seeds from PyTorch's global generator.

    Args:
        with_logprobs: the trainer also needs the log-probs that tokens were sampled with.
    """

    def __init__(self, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self._engine: NativeEngine | None = None

    def generate(
        self, trainer: Any, prompts: list[list[int]], fields: dict[str, Any], params: SamplingParams
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return token ids and log-probs of a completion for each prompt; adjacent equal prompts are computed once.

        Args:
            fields: those of the prompts' pictures.
            params: see `sampling_params`.
        """
        model = base_model(trainer.accelerator.unwrap_model(trainer.model_wrapped))
        shown: list[list[Picture]] = [[]] * len(prompts)
        if "pixel_values" in fields:
            shown, token = pictures_of(model, fields), placeholder(model)
            prompts = [expand(prompt, of_prompt, token) for prompt, of_prompt in zip(prompts, shown, strict=True)]
        members = [list(places) for _, places in groupby(range(len(prompts)), key=lambda i: list(prompts[i]))]
        same = [(list(prompts[places[0]]), len(places)) for places in members]
        each = [replace(params, n=n) for _, n in same]
        seeds = torch.randint(2**62, (len(same),)).tolist()
        engine = self._engine_for(model, [(len(p), n) for p, n in same], params.max_new_tokens)
        engine.update_weights()  # they have changed in place
        with trainer.accelerator.autocast():
            trees = engine.generate(
                [prompt for prompt, _ in same],
                each,
                seeds=seeds,
                pictures=[distinct(shown[places[0]]) for places in members] if any(shown) else None,
            )
        engine.sleep()  # frees the KV cache for training
        sequences = [sequence for tree in trees for sequence in tree.flatten()]
        return (
            [list(sequence.response) for sequence in sequences],
            [sequence.behaviour_logprob.tolist() for sequence in sequences],
        )

    def _engine_for(self, model: PreTrainedModel, groups: list[tuple[int, int]], longest: int) -> NativeEngine:
        """Return the engine, with room for groups of (prompt tokens, completions)."""
        page = EngineConfig.page_size

        def pages(tokens: int) -> int:
            return -(-tokens // page) * page

        room = sum(pages(prompt) + n * (pages(longest) + page) for prompt, n in groups)
        rows = sum(n for _, n in groups)
        engine = self._engine
        if engine is None or engine.config.kv_tokens < room or engine.config.max_batch_rows < rows:
            engine = NativeEngine(model, config=EngineConfig(kv_tokens=room, max_batch_rows=max(rows, 512)))
            self._engine = engine
        else:
            engine.wake()
        return engine


def sampling_params(trainer: Any) -> SamplingParams:
    """Return the options that the trainer samples a completion with now.

    As in `generate` of Transformers, an option that the trainer's ``generation_config`` leaves at None is that of the
    model's own ``generation_config``, or else the default.

    Raises:
        ValueError: the native engine cannot sample with them; the message is the reason.
    """
    if trainer.use_vllm:
        raise ValueError("use_vllm is set")
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise ValueError("use_transformers_continuous_batching is set")
    if getattr(trainer, "rollout_func", None) is not None:
        raise ValueError("rollout_func samples")
    if why := own(trainer, COMPLETIONS):
        raise ValueError(why)
    config = merged(trainer.generation_config, trainer.model.generation_config.to_dict())
    sample = bool(config.do_sample)
    if config.repetition_penalty not in (None, 1.0):
        raise ValueError(f"repetition_penalty is {config.repetition_penalty}")
    if set(config.suppress_tokens or ()) <= set(placeholders(base_model(trainer.model))):
        config.suppress_tokens = None  # the engine never samples placeholders of pictures
    several = {"num_return_sequences"} if config.num_return_sequences != 1 else set()
    texts = {"stop_strings"} if config.stop_strings else set()
    if others := several | texts | set(unread(config, sample)):
        raise ValueError(f"generation is asked for {', '.join(sorted(others))}")
    if config.max_new_tokens is None:
        raise ValueError("max_completion_length is None")
    if sample and not config.temperature > 0:
        raise ValueError(f"temperature is {config.temperature}")
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    if more := set(ends) - set(trainer.eos_token_ids):  # after these TRL trains on padding
        raise ValueError(f"generation ends at eos_token_id {sorted(more)}, which the trainer's eos_token_ids lack")
    vocabulary = base_model(trainer.model).config.get_text_config().vocab_size
    filters = {"top_p": config.top_p, "top_k": config.top_k or None, "min_p": config.min_p} if sample else {}
    return SamplingParams(
        temperature=config.temperature if sample else 0.0,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=tuple(token for token in trainer.eos_token_ids if token < vocabulary),
        ignore_eos=True,  # stop_token_ids lists the tokens that end a completion
        **filters,
    )
