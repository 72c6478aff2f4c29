"""Distillation trainers: the divergence comes from `linear_divergence`, on trees where completions share prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import linear_divergence

from ...model.head import head
from .checks import base_model
from .completions import EngineCompletions
from .packing import Batch
from .parts import Parts
from .regroup import regroup
from .replaced import DIVERGENCE, ORDER


class Distiller(EngineCompletions):
    """Overrides methods of TRL's `DistillationTrainer`; precedes it in a class's bases."""

    def _prepare_inputs(self: Any, generation_batch: Any) -> dict[str, Any]:
        """Return the next micro-batch; those of an update are regrouped by prompt, which does not change its loss."""
        trl_trainer: Any = super()
        parts: Parts = self.rolltree
        before = self._buffered_inputs
        inputs: dict[str, Any] = trl_trainer._prepare_inputs(generation_batch)
        if not parts.tree or self._buffered_inputs is before or parts.stays(self, ORDER):
            return inputs
        steps = self.args.gradient_accumulation_steps
        self._buffered_inputs = regroup(self._buffered_inputs, steps)
        return self._buffered_inputs[self._step % steps]

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Tensor, ...]:
        """Return loss, sum of the student's entropies and number of tokens, as TRL's method does."""
        parts: Parts = self.rolltree
        if not parts.head or parts.stays(self, DIVERGENCE) or not parts.prepared(model, self):
            trl_trainer: Any = super()
            result: tuple[Tensor, ...] = trl_trainer._compute_loss(model, inputs, num_items_in_batch)
            return result
        mask = inputs["completion_mask"]
        mask = (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()
        ids, attended = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")
        )
        batch = parts.batch(model, ids, attended, mask.shape[1], {})
        tokens = mask.sum()
        normalizer = tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        models = base_model(model), base_model(teacher)
        loss, entropy = divergence(*models, batch, mask, normalizer, self.beta, self.temperature)
        return loss, entropy, tokens


def divergence(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Batch,
    mask: Tensor,  # [B, C] bool
    normalizer: Any,
    beta: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums over the tokens of ``mask`` of the divergence, over ``normalizer``, and of the entropies.

    Each distinct row is compared once, with the number of tokens that it predicts as its weight.
    """
    row, counts = batch.row[mask].unique(return_counts=True)
    hidden = student.base_model(**batch.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    with torch.no_grad():
        of_teacher = teacher.base_model(**batch.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    student_head, teacher_head = head(student), head(teacher).frozen()
    out = linear_divergence(
        hidden,
        student_head.weight,
        of_teacher,
        teacher_head.weight,
        kind="jsd",
        beta=beta,
        row=row,
        teacher_row=row,
        weights=counts.float(),
        normalizer=normalizer,
        teacher_bias=teacher_head.bias,
        teacher_softcap=teacher_head.softcap,
        teacher_temperature=temperature / teacher_head.scale,
        **student_head.options(temperature),
    )
    return out.loss, (out.entropy * counts).sum()


class GkdLoss:
    """Overrides the loss of TRL's `GKDTrainer`; precedes it in a class's bases."""

    rolltree: Parts

    def compute_loss(
        self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; logits, which evaluations may ask for, come from TRL's own code."""
        parts: Parts = self.rolltree
        student = base_model(self.accelerator.unwrap_model(model))
        wrapped = model is not self.accelerator.unwrap_model(model)  # its forward has to be called
        if return_outputs or wrapped or not parts.head or parts.stays(self, DIVERGENCE):
            trl_trainer: Any = super()
            return trl_trainer.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mask = inputs["labels"][:, 1:] != -100
        B, S = inputs["input_ids"].shape
        row = torch.arange(B * S, device=mask.device).view(B, S)[:, :-1]
        model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        batch = Batch(model_inputs, row, mask, inputs["input_ids"][:, 1:], None)
        normalizer = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        self.teacher_model.eval()
        teacher = base_model(self.accelerator.unwrap_model(self.teacher_model))
        loss, _ = divergence(
            student, teacher, batch, mask, normalizer, self.beta, 1.0
        )  # as in TRL, whatever it sampled at
        return loss
