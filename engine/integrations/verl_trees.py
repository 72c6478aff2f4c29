"""verl's FSDP workers on packed trees: ``model.external_lib=rolltree.engine.integrations.verl_trees``.

verl imports the module named there before it makes a model's engine, and its `EngineRegistry` then gives that model
(actor, reference or critic) one of the engines below. They are verl's own FSDP engines with three changes: a
micro-batch goes to the model as trees, every shared prefix once; norms, rotary embedding and gated units are one pass
each (`fuse_layers`); and `linear_logprob` scores the rows that predict responses. Results have verl's layout, so
losses, metrics, optimizer, checkpoints and the weights for rollouts are verl's code.

Prefixes are shared only within a micro-batch; the sequences of one prompt are therefore made adjacent before verl cuts
the batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from rolltree.kernels.libraries import log_once

from ..errors import UserError
from ..model.fused_layers import fuse_layers
from ..model.head import head, target_logprob
from ..model.masks import NAME
from ..model.self_check import check_model
from .trees import odd_layers, packed

Array = npt.NDArray[Any]
FSDP = ("fsdp", "fsdp2")
OTHERS = ("fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")
"""Backends of verl whose batches this module cannot lay out as trees."""
OUTPUTS = {"calculate_entropy": ("entropy", "entropy"), "calculate_sum_pi_squared": ("sum_p2", "sum_pi_squared")}
"""Optional outputs: verl's key, and the names of the output in rolltree and in verl."""

NOTHING_SHARED = (
    "The sequences of a rank's batch have as many prompts, so that no prompt is computed once for several: verl's "
    "trainer has given a prompt's samples to different ranks, or there is one of each (docs/verl.md)."
)
COLDEST = 1e-8
"""Lower bound that verl applies to temperatures."""


class Wanted:
    """Targets and options for the head. Neither a dataclass nor a tuple, because FSDP casts the tensors in those."""

    def __init__(
        self, row: Tensor, place: Tensor, target: Tensor, temperature: float | Tensor, want: list[str]
    ) -> None:
        self.row = row  # [R] int64, packed rows; distinct unless temperatures differ
        self.place = place  # [M] int64, index of each target's row in `row`
        self.target = target  # [M] int64
        self.temperature = temperature  # a number, or [R] float32
        self.want = want


class Flat(NamedTuple):
    """A micro-batch in verl's layout, on the host: its sequences end to end."""

    ids: Array  # [N] int64
    ends: Array  # [B] int64
    length: Array  # [B] int64

    @classmethod
    def of(cls, micro_batch: Any) -> Flat:
        """Raise UserError for inputs other than text, and for positions that do not count from 0 in each sequence."""
        positions = micro_batch["position_ids"]
        images = bool(extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", [])))
        refuse({"multi_modal_inputs": images, "position_ids of several axes": positions.dim() > 2})
        ids = micro_batch["input_ids"]
        ends = ids.offsets()[1:].cpu().numpy()
        flat = cls(ids.values().cpu().numpy(), ends, np.diff(ends, prepend=0))
        counted = np.arange(len(flat.ids)) - np.repeat(flat.ends - flat.length, flat.length)
        refuse({"position_ids that do not count from 0": (positions.values().cpu().numpy() != counted).any()})
        return flat

    def scored(self, micro_batch: Any) -> Array:  # [M] int64
        """Return the tokens whose log-probs verl reads: of responses, or without any, those of its loss mask."""
        response = response_length(micro_batch)
        if response is None:
            scored = micro_batch["loss_mask"].values().cpu().numpy() != 0
        else:
            to_end = np.repeat(self.ends, self.length) - np.arange(len(self.ids))
            scored = to_end <= np.repeat(response, self.length)
        scored[self.ends - self.length] = False  # nothing predicts a first token
        return np.flatnonzero(scored)


class TreeEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, on trees.

    Raises:
        UserError: an option, a model or a batch is not supported on trees; the message names it.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(
            {
                "ulysses_sequence_parallel_size > 1": engine_config.ulysses_sequence_parallel_size > 1,
                "pad_to_length": engine_config.pad_to_length,
                "qat": engine_config.qat is not None and engine_config.qat.enable,
                "a model of images": hasattr(model_config.hf_config, "vision_config"),
            }
        )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_module(self) -> Any:
        self.model_config.hf_config._attn_implementation = NAME  # the default asks for flash-attn to be installed
        module = super()._build_module()
        refuse({"a critic with trl's value head": not isinstance(module, PreTrainedModel)})
        refuse({f"layers of the kind {kind}": True for kind in odd_layers(module)})
        module.set_attn_implementation(NAME)  # verl sets one of its own when it loads a critic
        return fuse_layers(module)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Run verl's method on the batch sorted by prompt; outputs have the order of ``data``."""
        prompts = prompt_of(data)
        if prompts is None or tu.get_non_tensor_data(data=data, key="force_group_size", default=1) > 1:
            return super().forward_backward_batch(data, loss_function, forward_only)
        if len(prompts) == prompts.max() + 1 > 1:
            log_once(NOTHING_SHARED)
        order = np.argsort(prompts, kind="stable")
        data = tu.index_select_tensor_dict(data, torch.from_numpy(order))
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            tu.assign_non_tensor(data, force_group_size=self._together(data, prompts[order]))
        out = super().forward_backward_batch(data, loss_function, forward_only)
        outputs = out["model_output"]
        out["model_output"] = {
            name: restore_dynamic_batch(values, [order.tolist()]) for name, values in outputs.items()
        }
        return out

    def _together(self, data: Any, prompts: Array) -> int:
        """Return the number of adjacent sequences that verl keeps in one micro-batch: at most a prompt's, within verl's
        token budget. The ranks agree on it, because verl needs the same number of micro-batches on every rank."""
        length = data["input_ids"].offsets().diff().cpu().numpy()
        budget = tu.get(data, "max_token_len_per_gpu")
        divisors = [n for n in range(1, int(np.bincount(prompts).max()) + 1) if len(length) % n == 0]
        fitting = {n for n in divisors if length.reshape(-1, n).sum(1).max() <= budget}
        group = self.get_data_parallel_group()
        ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, (len(length), fitting), group)
        if len({size for size, _ in ranks}) > 1:
            return 1
        return max(set.intersection(*(fits for _, fits in ranks)), default=1)


class TreeEngineWithLMHead(TreeEngine):
    """Engine of actors and references: log-probs and, on request, entropy; 0 at tokens that predict no response."""

    def _build_fsdp_module(self, module: Any) -> Any:
        install_head(module.get_base_model() if isinstance(module, PeftModel) else module)
        return super()._build_fsdp_module(module)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the micro-batch as trees with the head's targets, and the places of the results in verl's layout."""
        get = functools.partial(tu.get_non_tensor_data, data=micro_batch, default=False)
        refuse({"distillation": get(key="distillation_use_topk") or get(key="distillation_only")})
        flat, device = Flat.of(micro_batch), micro_batch["input_ids"].device
        trees = packed(np.split(flat.ids, flat.ends[:-1]), device)
        token = flat.scored(micro_batch)
        row = np.concatenate(trees.rows)[token - 1]
        temperatures = micro_batch["temperature"]
        temperature: float | Tensor
        if isinstance(
            temperatures, Tensor
        ):  # one for each sequence: a shared row is scored at each of its temperatures
            levels, level = np.unique(temperatures.float().cpu().numpy(), return_inverse=True)
            level = np.repeat(level, flat.length)[token]
            (level, row), place = np.unique(np.stack([level, row]), axis=1, return_inverse=True)
            temperature = torch.from_numpy(levels[level]).clamp(min=COLDEST).to(device)
        else:
            row, place = np.unique(row, return_inverse=True)
            temperature = max(float(temperatures), COLDEST)
        at, where, target = (torch.from_numpy(x).to(device) for x in (row, place.reshape(-1), flat.ids[token]))
        targets = Wanted(at, where, target, temperature, [ours for key, (ours, _) in OUTPUTS.items() if get(key=key)])
        return trees.inputs | {"targets": targets}, {"scored": torch.from_numpy(token - 1).to(device)}

    def prepare_model_outputs(
        self, output: dict[str, Tensor], output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return the head's results for each target, as verl's nested tensors of whole sequences."""
        ids, verl_names = micro_batch["input_ids"], {"logprob": "log_probs", **dict(OUTPUTS.values())}
        flat = {
            verl_names[name]: values.new_zeros(len(ids.values())).index_put((output_args["scored"],), values)
            for name, values in output.items()
        }
        return {name: torch.nested.nested_tensor_from_jagged(values, ids.offsets()) for name, values in flat.items()}


class TreeEngineWithValueHead(TreeEngine):
    """Engine of critics: the value at every token."""

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the micro-batch as trees, and the packed row of each of its tokens."""
        flat, device = Flat.of(micro_batch), micro_batch["input_ids"].device
        trees = packed(np.split(flat.ids, flat.ends[:-1]), device)
        return trees.inputs, {"row": torch.from_numpy(np.concatenate(trees.rows)).to(device)}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return values, as verl's nested tensors of whole sequences."""
        values = output.logits.view(-1).index_select(0, output_args["row"])
        return {"values": torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())}


def response_length(data: Any) -> Array | None:  # [B] int64
    """Return the number of response tokens at the end of each sequence; None for data without responses."""
    if "responses" not in data:
        return None
    if data["responses"].is_nested:
        length = data["responses"].offsets().diff()
    else:
        length = data["attention_mask"][:, data["prompts"].shape[1] :].sum(1)
    return np.asarray(length.cpu().numpy())


def prompt_of(data: Any) -> Array | None:  # [B] int64
    """Return the number of each sequence's prompt, in order of appearance; None for data without responses."""
    response = response_length(data)
    if response is None:
        return None
    seen: dict[bytes, int] = {}
    ids, ends = (t.cpu().numpy() for t in (data["input_ids"].values(), data["input_ids"].offsets()[1:]))
    prompts = (row[: len(row) - n].tobytes() for row, n in zip(np.split(ids, ends[:-1]), response, strict=True))
    return np.array([seen.setdefault(prompt, len(seen)) for prompt in prompts])


def install_head(model: Any) -> None:
    """Make ``model(..., targets=...)`` score targets, in the head's own forward, during which FSDP gathers its weights.

    Raises:
        UserError: the head is of a kind that is not supported, or the model fails `check_model`.
    """
    try:
        head(model)
        check_model(model)
    except ValueError as error:
        raise UserError(str(error)) from None
    layer = model.get_output_embeddings()
    whole, logits = model.forward, layer.forward

    @functools.wraps(logits)
    def score(hidden: Tensor, targets: Wanted | None = None) -> Any:  # hidden [1, T, H]
        if targets is None:
            return logits(hidden)
        out = target_logprob(
            model, hidden[0], targets.target, targets.row, targets.place, targets.temperature, targets.want
        )._asdict()
        return {name: out[name] for name in ("logprob", *targets.want)}

    @functools.wraps(whole)
    def forward(*args: Any, targets: Wanted | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return whole(*args, **kwargs)
        return layer(model.get_decoder()(*args, **kwargs).last_hidden_state, targets)

    layer.forward, model.forward = score, forward


def refuse(unsupported: dict[str, bool]) -> None:
    """Raise UserError naming the first entry of ``unsupported`` that is True."""
    for name, there in unsupported.items():
        if there:
            raise UserError(
                f"rolltree does not compute {name} on trees; change that, or take {__name__} out of external_lib."
            )


def choice(verl_engine: type[BaseEngine], ours: type[TreeEngine] | None, backend: str) -> type[BaseEngine]:
    """Return an engine class that makes ``ours`` for models that name this module, and verl's for all others."""

    class Chosen(BaseEngine):
        def __new__(cls, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            named = model_config.external_lib
            if __name__ not in (named if isinstance(named, list) else [named]):
                return verl_engine(model_config, *args, **kwargs)
            refuse({f"batches of the strategy {backend}": ours is None})
            assert ours is not None
            return ours(model_config, *args, **kwargs)

    return Chosen


def register() -> None:
    """Register the choice with verl, before its own engines; importing this module does it."""
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()  # as the registry looks engines up
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    trees = {"language_model": TreeEngineWithLMHead, "value_model": TreeEngineWithValueHead}
    for model_type, ours in trees.items():
        for backend in (*FSDP, *OTHERS):
            try:
                verl_engine = EngineRegistry.get_engine_cls(model_type, backend)
            except (AssertionError, ValueError):  # no such engine on this machine
                continue
            entered = choice(verl_engine, ours if backend in FSDP else None, backend)
            EngineRegistry.register(model_type, backend, device=device, vendor=vendor)(entered)


register()
