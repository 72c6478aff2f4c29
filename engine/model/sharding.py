"""Shards a decoder over ranks by FSDP2, to match the modules that this package calls.

Losses are divided by normalisers of the whole update, so gradients of the ranks are *added*, not averaged as is FSDP's
default.

With tensor parallelism the ranks are a mesh of two dimensions, `DATA` and `TENSOR`. Those of one row compute the same
batches: `split` gives each a part of every product, by the plan of Transformers, and FSDP2 shards that part over the
ranks of the other rows. Every parameter is then a DTensor of both dimensions, also what all ranks of a row have whole,
so the optimiser, the norm of the gradient and checkpoints count each number once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rolltree.kernels import VocabShards

ADDED = "_rolltree_added"
"""Attribute of parameters whose gradients are added over the ranks."""
DATA, TENSOR = "data", "tensor"
"""Dimensions of a mesh of ranks with tensor parallelism."""
Forward = Callable[..., Any]


def split(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh``, of the dimension `TENSOR`, its part of every product of ``model``, before `shard`.

    The plan is that of the model's class. Transformers' own styles are not used: that of norms of heads adds up the
    gradients of each backward over the ranks, and so some more than once where FSDP2 accumulates several; that of
    embeddings makes the gradient of all rows on each rank. Embedding and head are split by rows, and stay tied if they
    are: the head is not called, `whole` returns a rank's rows. All other parameters are whole on every rank.

    Raises:
        ValueError: the plan of the installed Transformers leaves out a part of what it divides.
    """
    decoder, plan = model.get_decoder(), model.config.base_model_tp_plan
    embedding, layer = model.get_input_embeddings(), model.get_output_embeddings()
    tied = layer.weight is embedding.weight
    group = mesh.get_group()
    divided = {key.rpartition(".")[0] for key in plan}
    for name, module in decoder.named_modules():
        of_layers = re.sub(r"\.\d+\.", ".*.", name)
        style = plan.get(of_layers)
        if module is embedding:
            _divide(module, mesh, 0, _looked_up(module, mesh))
        elif style == "colwise":
            _divide(module, mesh, 0, _of_copies(module.forward, group))
        elif style == "rowwise":
            _divide(module, mesh, 1, _summed(module, group))
        elif style == "replicated_with_grad_allreduce":  # norms of a rank's heads
            _divide(module, mesh, None, module.forward, gradient=Partial())
        elif style is not None or (of_layers.rpartition(".")[0] in divided and any(module._parameters)):
            raise ValueError(
                f"Transformers' plan to split {type(model).__name__} says '{style}' of '{name}', which is not known "
                "here; set trainer.tensor to 1."
            )
    if tied:
        layer.weight = embedding.weight
    else:
        _divide(layer, mesh, 0, layer.forward)
    for module in model.modules():
        if any(not isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            _divide(module, mesh, None, module.forward)


def _divide(
    module: nn.Module, mesh: DeviceMesh, dim: int | None, forward: Forward, gradient: Placement | None = None
) -> None:
    """Give each rank of ``mesh`` its part of the parameters of ``module``, with which ``forward`` computes as with
    plain tensors.

    Args:
        dim: dimension along which they are divided; None: every rank has all of them, as it has those without it.
        gradient: of parameters on each rank; by default it is that of its part.
    """
    for name, weight in list(module.named_parameters(recurse=False)):
        along: Placement = Replicate() if dim is None or dim >= weight.dim() else Shard(dim)
        divided = distribute_tensor(weight.detach(), mesh, [along], src_data_rank=None)
        module._parameters[name] = nn.Parameter(divided, requires_grad=weight.requires_grad)

    def with_plain_tensors(*args: Any, **kwargs: Any) -> Any:
        before = dict(module._parameters)
        for name, weight in before.items():
            if isinstance(weight, DTensor):
                placements = weight.placements if gradient is None else [gradient]
                module._parameters[name] = weight.to_local(grad_placements=placements)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(before)

    module.forward = with_plain_tensors


def _of_copies(forward: Forward, group: Any) -> Forward:
    """Return ``forward`` of an input that every rank has and uses for its part of the result."""
    return lambda x: forward(_Copied.apply(x, group))


def _summed(linear: Any, group: Any) -> Forward:
    """Return the forward of a linear layer of which each rank has its part of the input; the bias is added once."""

    def forward(x: Tensor) -> Tensor:
        total: Tensor = _Summed.apply(functional.linear(x, linear.weight), group)
        return total if linear.bias is None else total + linear.bias

    return forward


def _looked_up(embedding: nn.Embedding, mesh: DeviceMesh) -> Forward:
    """Return the forward of an embedding of which each rank has its rows."""
    first, end = _edges(embedding.num_embeddings, mesh.size())[mesh.get_local_rank() :][:2]
    pad = embedding.padding_idx
    local_pad = pad - first if pad is not None and first <= pad < end else None

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < first) | (ids >= end)
        rows = functional.embedding((ids - first).masked_fill(elsewhere, 0), embedding.weight, local_pad)
        total: Tensor = _Summed.apply(rows.masked_fill(elsewhere[..., None], 0), mesh.get_group())
        return total

    return forward


class _Summed(torch.autograd.Function):
    """The sum of the ranks' parts, of which each rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Copied(torch.autograd.Function):
    """A value that every rank has; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Summed.forward(None, grads[0], ctx.group), None


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
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names != (TENSOR,)


def _sharded(model: PreTrainedModel) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def whole(weight: Tensor) -> Tensor:
    """Return ``weight``, gathered if it is sharded; of one that is split over the vocabulary (`shards_of`) this rank's
    rows.

    Its gradient is then reduced over the ranks as FSDP reduces those of the other parameters: added after `shard`,
    otherwise averaged.
    """
    if not isinstance(weight, DTensor):
        return weight
    if shards_of(weight) is not None:
        rows: Tensor = _Rows.apply(weight)
        return rows
    how = "sum" if hasattr(weight, ADDED) else "avg"
    full: Tensor = weight.full_tensor(grad_placements=[Partial(how)] * weight.device_mesh.ndim)
    return full


def shards_of(weight: Tensor) -> VocabShards | None:
    """Return the ranks' rows of a head or an embedding that `split` has divided; None of another one."""
    if not isinstance(weight, DTensor) or TENSOR not in (weight.device_mesh.mesh_dim_names or ()):
        return None
    mesh = weight.device_mesh[TENSOR]
    return VocabShards(mesh.get_group(), _edges(len(weight), mesh.size()))


def whole_shape(weight: Tensor) -> torch.Size:
    """Return the shape of `whole`."""
    shards = shards_of(weight)
    return weight.shape if shards is None else torch.Size([_count(shards.edges, shards.rank), *weight.shape[1:]])


def _edges(size: int, parts: int) -> list[int]:
    """Return the boundaries of the parts into which torch chunks a dimension of ``size``."""
    step = -(-size // parts)
    return [min(part * step, size) for part in range(parts + 1)]


def _count(edges: Sequence[int], rank: int) -> int:
    return edges[rank + 1] - edges[rank]


class _Rows(torch.autograd.Function):
    """This rank's rows of a head that is split over the vocabulary and sharded over the ranks of `DATA`."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight.detach()
        shape = whole_shape(weight)
        rows = DTensor.from_local(
            weight.to_local(), weight.device_mesh[DATA], [Shard(0)], run_check=False, shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
        return rows.full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        return added(grads[0], ctx.weight)


def added(gradient: Tensor, weight: DTensor) -> DTensor:
    """Return the sum of the ranks' ``gradient``, each as `whole` of ``weight`` is, sharded as ``weight`` is."""
    mesh = weight.device_mesh if shards_of(weight) is None else weight.device_mesh[DATA]
    partial = DTensor.from_local(gradient, mesh, [Partial("sum")] * mesh.ndim)
    total = joined(partial.redistribute(placements=[Shard(0)]).to_local(), weight)
    assert isinstance(total, DTensor)
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
    """Return a whole ``tensor``, which every rank has, sharded as ``like`` is; one that is sharded so as it is."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    part = tensor.to(like.device)
    for dim, (begin, count) in enumerate(region(like)):
        part = part.narrow(dim, begin, count)
    return joined(part.contiguous(), like)


def region(like: DTensor) -> list[tuple[int, int]]:
    """Return where this rank's part of ``like`` begins in each dimension of the whole, and its size."""
    parts, mesh = [(0, size) for size in like.shape], like.device_mesh
    for number, placement in reversed(list(enumerate(like.placements))):  # FSDP shards what is split already
        if not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]
            begin, size = parts[dim]
            edges, rank = _edges(size, mesh.size(number)), mesh.get_local_rank(number)
            parts[dim] = begin + edges[rank], _count(edges, rank)
    return parts


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
