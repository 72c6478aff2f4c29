"""Trainers of groups (GRPO, RLOO): their log-probs from packed trees, their completions from the native engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .packing import pack_completions
from .rollouts import Rollouts


@dataclass
class Parts:
    """What `accelerate` switched on."""

    tree: bool
    rollouts: Rollouts | None


class GroupTrainer:
    """Overrides methods of TRL's `GRPOTrainer` and `RLOOTrainer`; stands before them among a class's bases."""

    rolltree: Parts

    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: Tensor,  # [B, P + C]
        attention_mask: Tensor,  # [B, P + C]
        logits_to_keep: int,  # C
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies [B, C] of the completions, and the experts' balance []."""
        if not self.rolltree.tree:
            theirs: Any = super()
            wanted = batch_size, compute_entropy, compute_aux_loss
            return theirs._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *wanted, **images
            )
        parts: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        chunk = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(chunk), attention_mask.split(chunk), strict=True):
            packed = pack_completions(ids, mask, logits_to_keep)
            given = packed.model_inputs
            if compute_aux_loss:
                given["output_router_logits"] = True
            with self.accelerator.autocast():
                out = model(**given, fused_lm_head=True)
            entropy = packed.padded(out.entropy) if compute_entropy else None
            parts.append((packed.padded(out.log_probs), entropy, out.aux_loss))
        logprob, entropies, balance = zip(*parts, strict=True)
        return (
            torch.cat(logprob),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(balance).mean() if compute_aux_loss else None,
        )

    def _generate_single_turn(
        self: Any, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *more: Any, **others: Any
    ) -> Any:
        """Completions of tokenized prompts, and with GRPO the log-probs they were sampled with."""
        engine = self.rolltree.rollouts
        if engine is None:
            theirs: Any = super()
            return theirs._generate_single_turn(prompt_ids, images, multimodal_fields, *more, **others)
        completions, logprobs = engine.generate(self, prompt_ids)
        return (completions, logprobs) if engine.with_logprobs else completions
