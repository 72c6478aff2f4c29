"""Completions for a TRL trainer from the native engine, which shares the trainer's weights."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from ...data.media import Picture, distinct, expand
from ...model.pictures import placeholder
from ...rollout import EngineConfig, NativeEngine, SamplingParams
from .checks import base_model
from .pictures import pictures_of


class Rollouts:
    """Samples with the trainer's ``generation_config`` and seeds from PyTorch's global generator.

    Args:
        with_logprobs: the trainer also needs the log-probs that tokens were sampled with.
    """

    def __init__(self, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self._engine: NativeEngine | None = None

    def generate(
        self, trainer: Any, prompts: list[list[int]], fields: dict[str, Any]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return token ids and log-probs of a completion for each prompt; adjacent equal prompts are computed once.

        Args:
            fields: those of the prompts' pictures.
        """
        model = base_model(trainer.accelerator.unwrap_model(trainer.model_wrapped))
        shown: list[list[Picture]] = [[]] * len(prompts)
        if "pixel_values" in fields:
            shown, token = pictures_of(model, fields), placeholder(model)
            prompts = [expand(prompt, some, token) for prompt, some in zip(prompts, shown, strict=True)]
        members = [list(some) for _, some in groupby(range(len(prompts)), key=lambda i: list(prompts[i]))]
        same = [(list(prompts[some[0]]), len(some)) for some in members]
        params = _sampling_params(trainer)
        each = [SamplingParams(**params, n=n) for _, n in same]
        seeds = torch.randint(2**62, (len(same),)).tolist()
        engine = self._engine_for(model, [(len(p), n) for p, n in same], params["max_new_tokens"])
        engine.update_weights()  # they have changed in place
        with trainer.accelerator.autocast():
            trees = engine.generate(
                [prompt for prompt, _ in same],
                each,
                seeds=seeds,
                pictures=[distinct(shown[some[0]]) for some in members] if any(shown) else None,
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


def _sampling_params(trainer: Any) -> dict[str, Any]:
    config = trainer.generation_config
    return {
        "temperature": config.temperature if config.do_sample else 0.0,
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "top_k": config.top_k or None,
        "min_p": config.min_p,
        "max_new_tokens": config.max_new_tokens,
        "stop_token_ids": tuple(trainer.eos_token_ids),
        "ignore_eos": True,  # stop_token_ids lists the tokens that end a completion
    }
