"""Transformers' own calls by rolltree: ``model(..., labels=...)`` through the fused head (`patch_model`).

Importing this module registers ``attn_implementation="rolltree"``.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from rolltree.kernels import Objective, PolicyFields, linear_policy_loss

from ..model import attention  # noqa: F401  (registers the attention)
from ..model.fused_layers import fuse_layers
from ..model.head import head

OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


def patch_model(model: PreTrainedModel, *, layers: bool = True) -> PreTrainedModel:
    """Let a training ``model(..., labels=...)`` compute its loss from hidden states; returns the same ``model``.

    While ``model.training``, a call with ``labels`` returns the loss of Transformers (the mean over the labels that are
    not ``ignore_index``, or their sum over ``num_items_in_batch``; with the load balancing of experts where the call or
    the config asks for it; 0 and not NaN where nothing has a label) and ``logits=None``. Rows without a label are not
    multiplied, and the gradients of the head are made in the same pass: one backward. Every other call, generation and
    evaluation among them, is as before, but for ``layers``: norms, rotary embedding and gated units are one pass each
    (`fuse_layers`), equal to fp32 rounding; `unfuse_layers` gives them back.

    Works below Transformers' own Trainer, accelerate, DDP, gradient checkpointing and peft; patch before they wrap the
    model. Patching twice is patching once.

    Raises:
        ValueError: the model's head or loss is not one the fused head knows, or something else has replaced its
            ``forward`` before.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    replaced = inner.__dict__.get("forward")
    if getattr(replaced, "__func__", None) is not None and hasattr(replaced.__func__, "fuses_head"):
        return model
    if replaced is not None:
        raise ValueError(f"The forward of {type(inner).__name__} is replaced already; call patch_model before that.")
    head(inner)
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        raise ValueError(f"{type(inner).__name__} takes no logits_to_keep, so its logits cannot be left out.")
    if inner.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{type(inner).__name__} has a loss of its own ({_name(inner.loss_function)}); the fused head computes the "
            "cross entropy of a causal language model alone."
        )
    inner.forward = MethodType(_fused(type(inner).forward), inner)
    return fuse_layers(model) if layers else model


def _fused(forward: Any) -> Any:
    """``forward`` of a class, with the loss of labels computed by the fused head; it keeps its signature."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if not self.training or (given.get("labels") is None and given.get("shift_labels") is None):
            return forward(self, *args, **kwargs)
        of_the_loss = {name: given.pop(name) for name in OF_THE_LOSS if name in given}
        if of_the_loss.get("logits_to_keep") not in (None, 0):
            raise ValueError("patch_model: logits_to_keep does not combine with labels; leave it out.")
        hidden: list[Tensor] = []
        hook = self.get_decoder().register_forward_hook(lambda *call: hidden.append(call[-1][0]))
        no_rows = torch.empty(0, dtype=torch.long, device=self.device)
        try:  # the model's own forward, but its head multiplies nothing
            output = forward(**given, logits_to_keep=no_rows, return_dict=True)
        finally:
            hook.remove()
        loss = _cross_entropy(self, hidden[-1], of_the_loss)
        if output.get("aux_loss") is not None:
            loss = loss + self.router_aux_loss_coef * output.aux_loss
        output = type(output)(**{**output, "loss": loss, "logits": None})
        return output.to_tuple() if of_the_loss.get("return_dict") is False else output

    fused.fuses_head = True  # type: ignore[attr-defined]
    return fused


def _cross_entropy(model: Any, hidden: Tensor, given: dict[str, Any]) -> Tensor:  # hidden [B, S, H]
    ignored = given.get("ignore_index", -100)
    labels = given.get("shift_labels")
    if labels is None:
        labels = torch.nn.functional.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
    labels = labels.reshape(-1).to(hidden.device)
    scored = labels != ignored
    count = given.get("num_items_in_batch")
    if count is None:
        count = scored.sum()
    weight, bias, softcap, lora = head(model)
    fields = PolicyFields.flat(torch.ones_like(labels, dtype=torch.float32), mask=scored)
    out = linear_policy_loss(
        hidden.flatten(0, 1),
        weight,
        labels.masked_fill(~scored, 0),
        fields,
        Objective(surrogate="nll"),
        normalizer=count,
        bias=bias,
        softcap=softcap,
        lora=lora,
    )
    return out.loss


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
