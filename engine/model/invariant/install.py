"""Makes the layers of a model batch-invariant, or refuses the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rolltree.kernels import dispatch
from rolltree.kernels.linear import DTYPES, compare_tiles
from rolltree.kernels.linear_logprob.head import has_equal_bits

from ...errors import UserError
from .. import recurrent
from ..fused_layers import fuse_layers
from ..head import decoder_of, head
from .functions import fixed_order

KEY = "model.batch_invariant"
MARK = "rolltree_batch_invariant"
"""Attribute of a decoder whose layers are batch-invariant; it is copied with the decoder."""


class _InOrder:
    """The ``forward`` of a module within `fixed_order`; bound by a weak reference, as fused ones are."""

    __slots__ = ("_forward", "_module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None) -> None:
        self._module, self._forward = weakref.ref(module), forward
        """The module, and the ``forward`` that it has instead of its class's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            raise UserError(f"Batch-invariant layers cannot be compiled; leave torch.compile or {KEY} out.")
        with fixed_order():
            if self._forward is not None:
                return self._forward(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _InOrder:
        module = self._module()
        assert module is not None
        return _InOrder(memo.get(id(module), module), copy.deepcopy(self._forward, memo))

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")  # the class's, as for fused ones


def make_invariant(model: PreTrainedModel) -> PreTrainedModel:
    """Let the layers of ``model`` compute each row by itself; return the same ``model``.

    Its layers are fused too (`fuse_layers`), as those of the native engine are. A second call changes nothing. Whether
    every layer of the model then has the same bits is `check.check_invariant`'s to tell. On a GPU attention and the
    head run on backend ``invariant`` from then on, in the whole process (`dispatch.set_backend`), and the tiles of its
    products are compared.

    Raises:
        UserError: a part of the model is known not to be batch-invariant.
    """
    if reason := unfit(model):
        raise UserError(f"{KEY} does not hold for {type(model).__name__}: {reason}.")
    if head(model).weight.is_cuda:
        dispatch.set_backend("invariant")
        for weight in (head(model).weight, *_weights(decoder_of(model))):
            compare_tiles(weight)
    fuse_layers(model)
    decoder = decoder_of(model)
    if not is_invariant(model):
        for module in _parts(decoder):
            module.forward = _InOrder(module, vars(module).get("forward"))
        setattr(decoder, MARK, True)
    return model


def _weights(decoder: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights [N, K] of products, and of experts in either layout."""
    for weight in decoder.parameters():
        if weight.dim() in (2, 3) and weight.dtype in DTYPES:
            matrix = weight if weight.dim() == 2 else weight[0]
            yield from (matrix,) if weight.dim() == 2 else (matrix, matrix.T)


def is_invariant(model: Any) -> bool:
    """Return whether `make_invariant` has changed a model or a decoder."""
    return hasattr(model, MARK) or hasattr(decoder_of(model), MARK)


def unfit(model: Any) -> str | None:
    """Return the part of a model that is known not to be batch-invariant, as the rest of a sentence; None if all are,
    or it is not known."""
    lm_head = head(model)
    device = lm_head.weight.device
    backend = {"cpu": "cpu", "cuda": "invariant"}.get(device.type)
    if backend is None:
        return f"it is for CPUs and GPUs, not for {device.type} devices; set model.device, or leave the key out"
    if not dispatch.usable(backend, device):
        needed = "the CPU kernels, which are not built here" if backend == "cpu" else "Triton, which is not installed"
        return f"it needs {needed} or not chosen; see `rolltree doctor`"
    if names := recurrent.scanned(model):
        return (
            f"the scan of {', '.join(names)} (tree_recurrence) sums in chunks that begin where a part of a tree does; "
            "leave the key out, or use another model"
        )
    if lm_head.lora is not None:
        return "products of an adapter on the head depend on the number of rows; leave lm_head out of its targets"
    if backend == "invariant":
        if lm_head.bias is None and lm_head.softcap is None and lm_head.scale == 1:
            return None
        return "sampling on a GPU applies its head's bias, soft cap or scale by itself; set model.device to 'cpu'"
    if not has_equal_bits(lm_head.weight):
        return "the order of sums of the head's product in torch's library is not known on this processor"
    return None


def _parts(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield what a decoder calls, and what its layers call: these are recomputed without the layer's ``forward``. What
    computes by one fused op is left out, and rotary embeddings, which have no parameters."""
    for child in decoder.children():
        layers = list(child) if isinstance(child, nn.ModuleList) else []
        if not layers and next(child.parameters(), None) is None:
            continue
        for module in (*(layers or [child]), *(part for layer in layers for part in layer.children())):
            if "forward" not in vars(module) or any(True for _ in module.children()):
                yield module
