"""Replacement for TRL's fused head (``model(..., fused_lm_head=True)``) that uses `linear_logprob`.

TRL gives its models a forward that scores tokens without logits; all of its trainers take their log-probs from there.
This one scores with rolltree's kernels and can score tokens of packed trees.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from rolltree.kernels import Term, linear_logprob, linear_terms_loss

from ...batches.batch import TreeBatch
from ...model.decoder import picture_inputs
from ...model.head import decoder_of, head

ROWS = 256  # rows whose logits are in memory at once
NEAR = 1e-3  # relative distance below which probabilities are compared by their logits


class Scored(NamedTuple):
    """Tokens to score, by the rows of the flattened hidden states that predict them."""

    row: Tensor  # [R] int64, distinct
    place: Tensor  # [M] int64, index of each target's row in `row`
    target: Tensor  # [M] int64
    copies: Tensor | None = None  # [T] int64, for packed trees: occurrences of each token in a flat batch
    loss: Term | None = None  # loss of these tokens, computed in the same pass


@dataclass
class Learned(FusedCausalLMOutput):
    """Output with a loss that was computed in the head's pass; only ``loss`` has a gradient."""

    kl: Tensor | None = None  # [], the loss's KL term
    kl_weight: Tensor | None = None  # [], sum of the tokens' weights in it


@dataclass(frozen=True)
class FusedHead:
    """A fused head with the arguments of TRL's `add_fused_lm_head`."""

    temperature: float = 1.0
    fp32: bool = False
    outputs: Sequence[str] = ("log_probs",)

    def install(self, model: PreTrainedModel) -> None:
        """Make ``model(..., fused_lm_head=True)`` use this head; other calls are unchanged."""
        original: Callable[..., Any] = model.forward

        @functools.wraps(type(model).forward)  # whose signature `generate` reads
        def forward(this: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not fused_lm_head:
                return original(*args, **kwargs)
            return self._forward(this, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def _forward(
        self,
        model: Any,
        *args: Any,
        labels: Tensor | None = None,  # [B, S], -100: not scored
        shift_labels: Tensor | None = None,  # [B, S]
        num_items_in_batch: Any = None,
        scored: Scored | None = None,
        pictures: TreeBatch | None = None,  # the trees that the other arguments are of, if they have pictures
        **kwargs: Any,
    ) -> FusedCausalLMOutput:
        config = model.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        if pictures is None:
            output = model.base_model(*args, **kwargs)
        else:
            del kwargs["input_ids"]
            output = decoder_of(model)(**kwargs | picture_inputs(model, pictures))
        hidden = output.last_hidden_state
        aux = None
        if kwargs.get("output_router_logits"):
            copies = None if scored is None else scored.copies
            counted = kwargs.get("attention_mask") if copies is None else copies[None]
            aux = load_balancing_loss_func(
                output.router_logits, config.num_experts, config.num_experts_per_tok, counted
            )
        if scored is not None:
            rows = hidden.flatten(0, 1).index_select(0, scored.row)
            if scored.loss is not None:
                return self._learn(model, rows, scored, scored.loss)
            return FusedCausalLMOutput(**self._score(model, rows, scored.target, scored.place), aux_loss=aux)
        if shift_labels is None:
            assert labels is not None
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        mask = shift_labels != -100
        statistics = self._score(model, hidden[mask], shift_labels[mask], None)
        fields = {
            name: values.new_zeros(mask.shape).masked_scatter(mask, values) for name, values in statistics.items()
        }
        loss = -fields["log_probs"].sum() / (
            mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        )
        if aux is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux
        return FusedCausalLMOutput(loss=loss, **fields, label_mask=mask, aux_loss=aux)

    def _learn(
        self,
        model: PreTrainedModel,
        hidden: Tensor,  # [R, H]
        scored: Scored,
        term: Term,
    ) -> Learned:
        """Return the loss of the tokens, and log-probs and entropies [M] without gradient."""
        lm_head = head(model)
        with self._precision(hidden):
            out = linear_terms_loss(
                hidden.float() if self.fp32 else hidden,
                lm_head.weight,
                scored.target,
                [term],
                row=scored.place,
                **lm_head.options(self.temperature),
            )
        assert out.logprob is not None
        assert out.entropy is not None
        idle = out.logprob.isnan().nonzero().flatten()  # tokens of zero advantage, which only the metrics need
        if len(idle):
            with torch.no_grad():
                rest = self._score(model, hidden[scored.place[idle]], scored.target[idle], None)
            out.logprob[idle], out.entropy[idle] = rest["log_probs"], rest["entropy"]
        coefficient = term.objective.kl_coef / term.normalizer
        kl, count = out.metrics.get("actor/kl_loss", out.loss.new_zeros(2))
        return Learned(out.loss, out.logprob, out.entropy, kl=coefficient * kl, kl_weight=coefficient * count)

    def _precision(self, hidden: Tensor) -> AbstractContextManager[Any]:
        return torch.autocast(hidden.device.type, enabled=False) if self.fp32 else nullcontext()

    def _score(
        self,
        model: PreTrainedModel,
        hidden: Tensor,  # [R, H]
        target: Tensor,  # [M]
        place: Tensor | None,  # [M]
    ) -> dict[str, Tensor]:  # each [M]
        outputs = set(self.outputs)
        want = ["entropy"] if "entropy" in outputs else []
        want += ["sum_p2"] if outputs & {"log_sum_sq_probs", "is_top1"} else []
        lm_head = head(model)
        if self.fp32:
            hidden = hidden.float()
        with self._precision(hidden):
            out = linear_logprob(
                hidden, lm_head.weight, target, row=place, want=want, **lm_head.options(self.temperature)
            )
        of_rows = {} if out.entropy is None else {"entropy": out.entropy}
        if "log_sum_sq_probs" in outputs:
            assert out.sum_p2 is not None
            of_rows["log_sum_sq_probs"] = out.sum_p2.detach().log()
        if "mean_logits" in outputs:
            of_rows["mean_logits"] = self._mean_logits(model, hidden.detach())
        of_targets = {name: values if place is None else values[place] for name, values in of_rows.items()}
        if "is_top1" in outputs:
            assert out.sum_p2 is not None
            rows, sum_p2 = (t.detach() if place is None else t.detach()[place] for t in (hidden, out.sum_p2))
            of_targets["is_top1"] = self._is_top1(model, rows, target, out.logprob.detach().exp(), sum_p2)
        return {"log_probs": out.logprob, **of_targets}

    @torch.no_grad()
    def _is_top1(self, model: PreTrainedModel, hidden: Tensor, target: Tensor, p: Tensor, sum_p2: Tensor) -> Tensor:
        """Return whether each target is its row's likeliest token (the first among equals).

        Every other probability is at most the root of the others' sum of squares, and the largest of all is at least
        the sum of all squares. Usually these bounds decide; otherwise the row's logits are computed again.
        """
        top = p > (1 + NEAR) * (sum_p2 - p * p).clamp(min=0).sqrt()
        lost = p < (1 - NEAR) * sum_p2
        for undecided in (~(top | lost)).nonzero().flatten().split(ROWS):
            top[undecided] = self._logits(model, hidden[undecided]).argmax(-1) == target[undecided]
        return top

    @torch.no_grad()
    def _mean_logits(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:  # [R, H] -> [R]
        weight, bias, softcap, lora, scale, _ = head(model)
        if softcap is not None:
            return torch.cat([self._logits(model, rows).mean(-1) for rows in hidden.split(ROWS)])
        mean = hidden.float() @ weight.float().mean(0)
        if lora is not None:
            mean = mean + lora.scale * (hidden.float() @ lora.a.float().T) @ lora.b.float().mean(0)
        return (mean if bias is None else mean + bias.float().mean()) * (scale / self.temperature)

    def _logits(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:  # [R, H] -> [R, V], over temperature
        weight, bias, softcap, lora, scale, _ = head(model)
        hidden = hidden.to(weight.dtype)
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        if lora is not None:
            logits = logits + (lora.scale * (hidden @ lora.a.T) @ lora.b.T).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits * (scale / self.temperature)
