"""Shards a decoder over ranks by FSDP2, to match the modules that this package calls.

Losses are divided by normalisers of the whole update, so gradients of the ranks are *added*, not averaged as is FSDP's
default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from transformers import PreTrainedModel

ADDED = "_rolltree_added"
"""Attribute of parameters whose gradients are added over the ranks."""


def shard(model: PreTrainedModel, **options: Any) -> None:
    """Shard every layer, then the decoder, the head, which stays tied to the embedding if it is, and all other modules.

    The gradient of a parameter is then the sum of the ranks' gradients, so each rank computes its share of one loss.

    The causal model itself stays unsharded: its own forward, which would compute logits, is never called.

    Args:
        options: passed to ``fully_shard``: ``mesh``, ``mp_policy`` (default: reductions in fp32),
            ``reshard_after_forward``, ...

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} | options
    decoder = model.get_decoder()
    embedding, layer = model.get_input_embeddings(), model.get_output_embeddings()
    tied = layer.weight is embedding.weight
    for block in decoder.layers:
        fully_shard(block, **options)
    fully_shard(decoder, **options)
    if tied:
        getattr(layer, "base_layer", layer).weight = embedding.weight  # the sharded parameter
    for module in list(model.modules()):  # an untied head, adapters of a head, a value head
        parameters = list(module.parameters(recurse=False))
        if not all(map(_is_sharded, parameters)):
            fully_shard(module, ignored_params=set(filter(_is_sharded, parameters)), **options)
    for module in _sharded(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        module.set_gradient_divide_factor(1.0)
    for parameter in model.parameters():
        setattr(parameter, ADDED, True)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _sharded(model: PreTrainedModel) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def whole(weight: Tensor) -> Tensor:
    """Return ``weight``, gathered if it is sharded.

    Its gradient is then reduced over the ranks as FSDP reduces those of the other parameters: added after `shard`,
    otherwise averaged.
    """
    if not isinstance(weight, DTensor):
        return weight
    how = "sum" if hasattr(weight, ADDED) else "avg"
    full: Tensor = weight.full_tensor(grad_placements=[Partial(how)] * weight.device_mesh.ndim)
    return full


def added(gradient: Tensor, weight: DTensor) -> DTensor:
    """Return the sum of the ranks' ``gradient``, a whole tensor on each, sharded as ``weight`` is."""
    partial = DTensor.from_local(gradient, weight.device_mesh, [Partial("sum")] * weight.device_mesh.ndim)
    total: DTensor = partial.redistribute(placements=weight.placements)
    return total


def clip_by_rows(weights: Sequence[Tensor], most: float) -> Tensor:  # []
    """Scale the gradients of ``weights`` so that their norm is at most ``most``, and return their norm before.

    Rows are added up by themselves in fp64 and then in order, so that sharding does not show.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return torch.zeros(())
    of_rows: list[Tensor] = []
    for gradient in gradients:
        local_gradient = local(gradient)
        rows = torch.linalg.vector_norm(
            local_gradient.flatten(1) if local_gradient.dim() > 1 else local_gradient[:, None],
            dim=1,
            dtype=torch.float64,
        )
        if isinstance(gradient, DTensor):
            mesh, placements, size = gradient.device_mesh, gradient.placements, gradient.shape[:1]
            rows = DTensor.from_local(rows, mesh, placements, run_check=False, shape=size, stride=(1,)).full_tensor()
        of_rows.append(rows)
    norm = torch.linalg.vector_norm(torch.cat(of_rows)).float()
    for gradient in gradients:
        local(gradient).mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole ``tensor``, which every rank has, sharded as ``like`` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which each rank has its ``part`` in the way that it has its part of ``like``."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_shards(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters by name, of a sharded model the shards: after a forward some are gathered still."""
    for module in _sharded(model):
        module.reshard()
    return dict(model.named_parameters())


def gathered(model: PreTrainedModel, kept: bool) -> dict[str, Tensor]:
    """Return the state of a sharded model with whole tensors on the CPU, each gathered from all ranks, which must call
    it; an empty one unless it is ``kept``. Tied weights are one tensor."""
    named_shards(model)
    state: dict[str, Tensor] = {}
    of_shard: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in of_shard:
            full = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
            of_shard[id(tensor)] = full.cpu() if kept else full.new_empty(0)
        state[name] = of_shard[id(tensor)]
    return state if kept else {}


def reduce_gradients(model: PreTrainedModel, now: bool) -> None:
    """Let the next backward of a sharded model reduce the gradients over the ranks, or only add to this rank's."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(now, recurse=False)
