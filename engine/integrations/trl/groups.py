"""Trainers of groups (GRPO, RLOO): log-probs come from packed trees, completions from the native engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels import Objective

from ...model.pictures import placeholder
from . import pictures
from .checks import base_model
from .objective import term
from .packing import Batch, packed, padded
from .regroup import matters, regroup
from .rollouts import Rollouts

AGREE = 1e-3
"""Tolerance between TRL's loss and the op's, relative for losses above 1."""


@dataclass
class Parts:
    """The parts that `accelerate` enabled."""

    head: bool
    tree: bool
    rollouts: Rollouts | None
    objective: Objective | None  # None: the loss is TRL's code
    recurrent: bool = False  # the models have recurrent layers
    scores: tuple[Tensor, Tensor] | None = None  # log-probs and entropies [B, C] that were computed with the loss

    def batch(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, fields: dict[str, Any]
    ) -> Batch:
        """Return the model's inputs for samples; ``fields`` are those of their pictures."""
        if not self.tree:
            for_model = {name: values for name, values in fields.items() if name != "num_images"}
            return padded(input_ids, attention_mask, completion, for_model)
        given: dict[str, Any] = {}
        if "pixel_values" in fields:
            own = base_model(model)
            given = {"pictures": pictures.pictures_of(own, fields), "placeholder": placeholder(own)}
        return packed(input_ids, attention_mask, completion, recurrent=self.recurrent, **given)


class GroupTrainer:
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
        if not self.rolltree.head:
            theirs: Any = super()
            wanted = batch_size, compute_entropy, compute_aux_loss
            return theirs._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *wanted, **images
            )
        if self.rolltree.scores is not None:
            return *self.rolltree.scores, None
        parts: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        chunk = batch_size or len(input_ids)
        own, fields = self.accelerator.unwrap_model(model), pictures.fields_of(images)
        for first in range(0, len(input_ids), chunk):
            ids, mask = (values[first : first + chunk] for values in (input_ids, attention_mask))
            shown = pictures.cut(fields, first, first + len(ids))
            batch = self.rolltree.batch(own, ids, mask, logits_to_keep, shown)
            given = batch.inputs | ({"output_router_logits": True} if compute_aux_loss else {})
            with self.accelerator.autocast():
                out = model(**given, scored=batch.scored(batch.valid), fused_lm_head=True)
            entropy = _on(batch.valid, out.entropy) if compute_entropy else None
            parts.append((_on(batch.valid, out.log_probs), entropy, out.aux_loss))
        logprob, entropies, balance = zip(*parts, strict=True)
        return (
            torch.cat(logprob),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(balance).mean() if compute_aux_loss else None,
        )

    def _prepare_inputs(self: Any, generation_batch: Any) -> dict[str, Any]:
        """Return the next micro-batch; those of an update are regrouped by prompt if that does not change its loss."""
        theirs: Any = super()
        before = self._buffered_inputs
        inputs: dict[str, Any] = theirs._prepare_inputs(generation_batch)
        if self.rolltree.tree and self._buffered_inputs is not before and not matters(self):
            self._buffered_inputs = regroup(self._buffered_inputs, self.args.gradient_accumulation_steps)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss and metrics; the gradient comes from `linear_policy_loss`, which forms the logits once."""
        theirs: Any = super()
        parts: Parts = self.rolltree
        if parts.objective is None or not torch.is_grad_enabled():
            return theirs._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        mask = (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()
        loss = term(self, parts.objective, inputs, mask)
        if loss is None or not mask.any():
            return theirs._compute_loss(model, inputs)
        ids, attended = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")
        )
        own = self.accelerator.unwrap_model(model)
        batch = parts.batch(own, ids, attended, mask.shape[1], pictures.fields_of(inputs))
        with self.accelerator.autocast():
            out = model(**batch.inputs, scored=batch.scored(mask)._replace(loss=loss), fused_lm_head=True)
        parts.scores = _on(mask, out.log_probs), _on(mask, out.entropy)
        try:
            with torch.no_grad():
                expected = theirs._compute_loss(model, inputs)
        finally:
            parts.scores = None
        if not (out.loss.detach() - expected).abs() <= AGREE * expected.abs().clamp(min=1) and expected.isfinite():
            raise RuntimeError(
                f"The loss of {parts.objective} is {float(out.loss):.6g} and TRL's {float(expected):.6g}; report this, "
                "and pass head=False."
            )
        return out.loss

    def _generate_single_turn(
        self: Any, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *more: Any, **others: Any
    ) -> Any:
        """Sample completions of tokenized prompts; with GRPO, also return the log-probs they were sampled with."""
        engine = self.rolltree.rollouts
        if engine is None:
            theirs: Any = super()
            return theirs._generate_single_turn(prompt_ids, images, multimodal_fields, *more, **others)
        fields = dict(multimodal_fields or {})
        if images is not None:
            fields["num_images"] = [len(some or ()) for some in images]
        completions, logprobs = engine.generate(self, prompt_ids, pictures.fields_of(fields))
        return (completions, logprobs) if engine.with_logprobs else completions


def _on(mask: Tensor, values: Tensor) -> Tensor:  # [B, C] bool, [M] -> [B, C], 0 elsewhere
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
