"""Gradient checkpointing of layers, whose attention is kept and not computed again.

The output of tree attention and its log-sum-exp take ``heads (dim + 2)`` numbers a token and layer; to compute them
again takes more than all else that is recomputed where paths are long.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import rolltree.kernels.tree_attention  # noqa: F401  # registers the op that `_policy` names

KEPT = 0.8  # share of the free memory that activations may take
OPTIMIZER_BYTES = 16  # a trained number: fp32 weight, two moments and gradient
HEAD_BYTES = 2**32  # tiles of the head


def checkpoint_layers(model: PreTrainedModel, tokens: int | None = None) -> None:
    """Let the layers of ``model`` recompute activations in the backward pass.

    Args:
        model: it has layers that Transformers can checkpoint.
        tokens: of a micro-batch; then only as many layers are checkpointed, from the first on, as the free memory of
            the model's device asks for. None: all.

    Raises:
        ValueError: the model has no such layers.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
    layers = checkpointing_layers(model)
    if tokens is not None:
        count = layers_to_checkpoint(layers, tokens, _free_memory(model), model.dtype.itemsize)
        for layer in layers[count:]:
            layer.gradient_checkpointing = False


def checkpointing_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of a model that Transformers can checkpoint, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpointed_share(model: nn.Module) -> float:
    """Return the share of the layers that is computed again in the backward pass."""
    layers = checkpointing_layers(model)
    return sum(layer.gradient_checkpointing for layer in layers) / max(len(layers), 1)


def keeps_attention(model: nn.Module) -> bool:
    """Return whether checkpointed layers keep what attention has computed."""
    function: Any = next((getattr(m, "_gradient_checkpointing_func", None) for m in checkpointing_layers(model)), None)
    context = getattr(function, "keywords", {}).get("context_fn")
    return getattr(context, "args", None) == (_policy,)


def layers_to_checkpoint(layers: list[Any], tokens: int, free: int, itemsize: int) -> int:
    """Return how many layers must be checkpointed for the activations of ``tokens`` tokens to fit in ``free`` bytes."""
    sizes = [tokens * itemsize * _numbers(layer) for layer in layers]
    kept = [tokens * itemsize * _kept_numbers(layer) for layer in layers]
    total = sum(sizes)
    for count, (size, rest) in enumerate(zip(sizes, kept, strict=True)):
        if total <= free:
            return count
        total -= max(size - rest, 0)
    return len(layers)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.rolltree.tree_attention.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _numbers(layer: nn.Module) -> int:
    """Return the numbers a token that a layer keeps for its backward: what its products read and write, and the norms'
    inputs and results. An expert's product counts for one token."""
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    experts = [p for p in layer.parameters() if p.dim() == 3]
    products = sum(m.in_features + m.out_features for m in linear) + sum(p.shape[1] + p.shape[2] for p in experts)
    return products + 4 * _width(layer)


def _kept_numbers(layer: nn.Module) -> int:
    """Return the numbers a token that a checkpointed layer keeps: its input, and its attention."""
    return 3 * _width(layer)


def _width(layer: nn.Module) -> int:
    """Return the width of a layer's rows, as that of its norms."""
    return max((p.numel() for p in layer.parameters() if p.dim() == 1), default=0)


def _free_memory(model: PreTrainedModel) -> int:
    """Return the bytes that activations may take besides the optimizer's and the head's."""
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return int(KEPT * (free - OPTIMIZER_BYTES * trained - HEAD_BYTES))
