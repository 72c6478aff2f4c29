"""Completions of a trainer from the native engine."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from . import pictures
from .checks import base_model
from .parts import Parts
from .replaced import BEHAVIOUR, COMPLETIONS


class EngineCompletions:
    """Overrides the sampling of TRL's trainers; precedes them in a class's bases."""

    rolltree: Parts

    def _generate_single_turn(
        self: Any, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *more: Any, **others: Any
    ) -> Any:
        """Sample completions of tokenized prompts; with GRPO, also return the log-probs they were sampled with."""
        parts: Parts = self.rolltree
        params, engine = parts.sampling(self), parts.engine
        longest = 0 if params is None else max(map(len, prompt_ids)) + params.max_new_tokens
        positions = getattr(base_model(self.model).config.get_text_config(), "max_position_embeddings", None)
        beyond = positions is not None and longest > positions
        if beyond:
            parts.leave(COMPLETIONS, f"a prompt with its completion may exceed the model's {positions} positions")
        if engine is None or params is None or beyond:
            trl_trainer: Any = super()
            continuous = getattr(self, "use_transformers_continuous_batching", False)
            with parts.own_attention() if continuous else nullcontext():
                sampled = trl_trainer._generate_single_turn(prompt_ids, images, multimodal_fields, *more, **others)
            if beyond and engine is not None and engine.with_logprobs and self.tools:  # earlier turns may have theirs
                return sampled[0], [[math.nan] * len(ids) for ids in sampled[0]]
            return sampled
        fields = dict(multimodal_fields or {})
        if images is not None:
            fields["num_images"] = [len(shown or ()) for shown in images]
        completions, logprobs = engine.generate(self, prompt_ids, pictures.fields_of(fields), params)
        if not engine.with_logprobs:  # RLOO takes none
            return completions
        return completions, None if parts.stays(self, BEHAVIOUR) else logprobs
