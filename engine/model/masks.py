"""The attention mask that Transformers asks for: a stand-in, made only if another attention reads its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import sdpa_mask

NAME = "rolltree"
NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
"""Arguments with which ``sdpa_mask`` makes a mask also where ``sdpa`` needs none."""

aten = torch.ops.aten
CUTS = (
    aten.slice, aten.select, aten.index, aten.unbind, aten.alias, aten.detach, aten.clone, aten._to_copy, aten.expand,
    aten.view, aten.unsqueeze, aten.squeeze,
)  # fmt: skip
"""Operations on a deferred mask that give the mask or parts of it."""


class DeferredMask(Tensor):  # [B, 1, Q, K] bool
    """The mask that ``sdpa_mask`` makes of the given arguments, made when an operation first needs its values.

    It has a shape, a dtype and a device, and no values. What is cut out of it or copied is the mask itself. Attention
    over trees asks for its type only and never makes one. Any other operation is an error: a model that computes with
    its mask has attention of its own, which knows no trees and may mean something else by a mask.
    """

    arguments: dict[str, Any]
    whole_mask: Tensor | None
    needless: bool  # known to be one that `sdpa` does without
    end_to_end: tuple[Tensor, Tensor] | None  # what `laid_end_to_end` has found

    @staticmethod
    def __new__(cls, **arguments: Any) -> DeferredMask:
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        mask: DeferredMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=arguments.get("device", "cpu")
        )
        mask.arguments, mask.whole_mask, mask.needless, mask.end_to_end = arguments, None, False, None
        return mask

    def make(self, skip: bool = True) -> Tensor | None:
        """Return the mask; with ``skip``, None where ``sdpa`` needs none, as with neither padding nor a window."""
        if self.whole_mask is None and not (skip and self.needless):
            self.whole_mask = sdpa_mask(**self.arguments | ({} if skip else NO_SKIP))
            self.needless = self.whole_mask is None
        if not skip and self.whole_mask is not None:
            self.whole_mask = self.whole_mask.contiguous()  # as the strides say
        return self.whole_mask

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the mask; the whole stays deferred, as some models slice what they need all of."""
        if isinstance(index, tuple) and all(isinstance(p, slice) and p in (slice(None), slice(0, None)) for p in index):
            return self
        part: Tensor = super().__getitem__(index)
        return part

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in CUTS or kwargs.get("dtype") not in (None, torch.bool):
            raise TypeError(
                f"A model computes with its attention mask ({func}) instead of handing it to an attention function of "
                f"Transformers, so attn_implementation='{NAME}' does not suit it; use 'eager', and plain sequences."
            )
        args, kwargs = tree_map_only(DeferredMask, lambda mask: mask.make(skip=False), (args, kwargs))
        return func(*args, **kwargs)


def deferred(*args: Any, **kwargs: Any) -> Tensor | None:
    if args:
        raise TypeError(
            "Transformers now passes mask arguments by position; this version of rolltree does not support that."
        )
    if getattr(kwargs.get("config"), "attn_logit_softcapping", None) is not None:
        kwargs["allow_is_causal_skip"] = False  # no mask would mean SDPA's own causal one, and SDPA has no softcap
    # keys from before: no tree; the offset of a static cache is a tensor that the first layer changes in place; and
    # compiled code cannot make a tensor without values
    at_once = isinstance(kwargs.get("q_offset"), Tensor) or torch.compiler.is_compiling()
    if at_once or kwargs.get("kv_length") != kwargs.get("q_length"):
        mask: Tensor | None = sdpa_mask(**kwargs)
        return mask
    return DeferredMask(**kwargs)
