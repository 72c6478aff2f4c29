"""Trainers of groups (GRPO, RLOO): log-probs come from packed trees, completions from the native engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import pictures
from .agreement import compare
from .completions import EngineCompletions
from .objective import term
from .parts import Parts
from .regroup import matters, regroup
from .replaced import ORDER, SCORES


class GroupTrainer(EngineCompletions):
    """Overrides methods of TRL's `GRPOTrainer` and `RLOOTrainer`; precedes them in a class's bases."""

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
        """Return log-probs and entropies [B, C] of the completions, and the experts' load balancing loss []."""
        parts: Parts = self.rolltree
        if not parts.head or parts.stays(self, SCORES) or not parts.prepared(model, self):
            trl_trainer: Any = super()
            options = batch_size, compute_entropy, compute_aux_loss
            return trl_trainer._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *options, **images
            )
        if parts.scores is not None:
            return *parts.scores, None
        results: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        chunk = batch_size or len(input_ids)
        unwrapped, fields = self.accelerator.unwrap_model(model), pictures.fields_of(images)
        for first in range(0, len(input_ids), chunk):
            ids, mask = (values[first : first + chunk] for values in (input_ids, attention_mask))
            shown = pictures.cut(fields, first, first + len(ids))
            batch = parts.batch(unwrapped, ids, mask, logits_to_keep, shown)
            model_inputs = batch.inputs | ({"output_router_logits": True} if compute_aux_loss else {})
            with self.accelerator.autocast():
                out = model(**model_inputs, scored=batch.scored(batch.valid), fused_lm_head=True)
            entropy = _on(batch.valid, out.entropy) if compute_entropy else None
            results.append((_on(batch.valid, out.log_probs), entropy, out.aux_loss))
        logprob, entropies, balance = zip(*results, strict=True)
        return (
            torch.cat(logprob),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(balance).mean() if compute_aux_loss else None,
        )

    def _prepare_inputs(self: Any, generation_batch: Any) -> dict[str, Any]:
        """Return the next micro-batch; those of an update are regrouped by prompt if that does not change its loss."""
        trl_trainer: Any = super()
        parts: Parts = self.rolltree
        before = self._buffered_inputs
        inputs: dict[str, Any] = trl_trainer._prepare_inputs(generation_batch)
        if not parts.tree or parts.stays(self, ORDER) or parts.stays(self, SCORES):
            return inputs
        if self._buffered_inputs is not before:
            parts.grouped = not matters(self)
            if parts.grouped:
                self._buffered_inputs = regroup(self._buffered_inputs, self.args.gradient_accumulation_steps)
                inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        elif parts.grouped and matters(self):
            parts.say("The loss depends on the order of sequences only since their micro-batches were put in groups.")
        return inputs

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss and metrics; the gradient comes from `linear_policy_loss`, which forms the logits once."""
        trl_trainer: Any = super()
        parts: Parts = self.rolltree
        objective = parts.loss(self) if torch.is_grad_enabled() else None
        if objective is None or not parts.prepared(model, self):
            return trl_trainer._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        mask = (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()
        loss = term(self, objective, inputs, mask)
        if loss is None or not mask.any():
            return trl_trainer._compute_loss(model, inputs)
        ids, attended = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")
        )
        unwrapped = self.accelerator.unwrap_model(model)
        batch = parts.batch(unwrapped, ids, attended, mask.shape[1], pictures.fields_of(inputs))
        with self.accelerator.autocast():
            out = model(**batch.inputs, scored=batch.scored(mask)._replace(loss=loss), fused_lm_head=True)
        parts.scores = _on(mask, out.log_probs), _on(mask, out.entropy)
        try:
            compare(self, trl_trainer._compute_loss, model, inputs, out)
        finally:
            parts.scores = None
        return out.loss


def _on(mask: Tensor, values: Tensor) -> Tensor:  # [B, C] bool, [M] -> [B, C], 0 elsewhere
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
