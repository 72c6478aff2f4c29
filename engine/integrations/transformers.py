"""Patches Transformers models so that ``model(..., labels=...)`` uses the fused head (`patch_model`).

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

from ..model import attention
from ..model.fused_layers import fuse_layers
from ..model.head import decoder_of, head
from ..model.invariant.check import check_invariant, given_trees
from ..model.invariant.install import make_invariant
from ..model.self_check import check_model

OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


def patch_model(model: PreTrainedModel, *, layers: bool = True, batch_invariant: bool = False) -> PreTrainedModel:
    """Make ``model(..., labels=...)`` in training compute its loss from hidden states, without logits.

    While ``model.training``, a call with ``labels`` returns the loss of Transformers and ``logits=None``. The loss is
    the mean over the labels other than ``ignore_index``, or their sum divided by ``num_items_in_batch``, plus the load
    balancing loss of experts if the call or the config asks for it; without any label it is 0 and not NaN. Rows without
    a label are not multiplied, and the gradients of the head are computed in the same pass; they have no second
    derivative, so a backward with ``create_graph`` raises a RuntimeError. Every other call, including generation and
    evaluation, is unchanged.

    Works with Transformers' Trainer, accelerate, DDP, gradient checkpointing and peft; patch before they wrap the
    model. A second call changes nothing.

    Args:
        model: a causal language model, with or without a peft adapter; changed in place.
        layers: also run norms, rotary embedding and gated units in one pass each (`fuse_layers`), with results equal up
            to fp32 rounding; `unfuse_layers` undoes it.

    Returns:
        The same ``model``.

    Raises:
        ValueError: the fused head does not support the model's head or loss, the model fails
            `check_model`, the model's ``forward`` was already replaced, or ``batch_invariant`` is given without
            ``layers`` or for another attention.
        UserError: the model is not batch-invariant and should be.
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
    check_model(inner)
    if batch_invariant:
        if not layers or inner.config._attn_implementation != attention.NAME:
            raise ValueError(
                f"patch_model: batch_invariant goes with layers=True and attn_implementation='{attention.NAME}' only; "
                f"the model has '{inner.config._attn_implementation}' and layers is {layers}."
            )
        check_invariant(make_invariant(inner), given_trees(inner))
    inner.forward = MethodType(_fused(type(inner).forward), inner)
    return fuse_layers(model) if layers else model


def _fused(forward: Any) -> Any:
    """Wrap the ``forward`` of a class so that the fused head computes the loss of labels; the signature is kept."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        del arguments["self"]
        if (
            not self.training or arguments.get("labels") is None
        ):  # as in Transformers, shift_labels alone ask for no loss
            return forward(self, *args, **kwargs)
        of_the_loss = {name: arguments.pop(name) for name in OF_THE_LOSS if name in arguments}
        if of_the_loss.get("logits_to_keep") not in (None, 0):
            raise ValueError("patch_model: logits_to_keep does not combine with labels; leave it out.")
        hidden: list[Tensor] = []
        hook = decoder_of(self).register_forward_hook(lambda *call: hidden.append(call[-1][0]))
        no_rows = torch.empty(0, dtype=torch.long, device=self.device)
        try:  # the model's own forward, with a head that multiplies no rows
            output = forward(self, **arguments, logits_to_keep=no_rows, return_dict=True)
        finally:
            hook.remove()
        loss = _cross_entropy(self, hidden[-1], of_the_loss)
        if output.get("aux_loss") is not None:
            loss = loss + self.router_aux_loss_coef * output.aux_loss
        output = type(output)(**{**output, "loss": loss, "logits": None})
        return output.to_tuple() if of_the_loss.get("return_dict") is False else output

    fused.fuses_head = True  # type: ignore[attr-defined]
    return fused


def _cross_entropy(model: Any, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:  # hidden [B, S, H]
    ignored = arguments.get("ignore_index", -100)
    labels = arguments.get("shift_labels")
    if labels is None:
        labels = torch.nn.functional.pad(arguments["labels"], (0, 1), value=ignored)[..., 1:]
    labels = labels.reshape(-1).to(hidden.device)
    scored = labels != ignored
    count = arguments.get("num_items_in_batch")
    if count is None:
        count = scored.sum()
    lm_head = head(model)
    fields = PolicyFields.flat(torch.ones_like(labels, dtype=torch.float32), mask=scored)
    out = linear_policy_loss(
        hidden.flatten(0, 1),
        lm_head.weight,
        labels.masked_fill(~scored, 0),
        fields,
        Objective(surrogate="nll"),
        normalizer=count,
        **lm_head.options(),
    )
    return out.loss


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
