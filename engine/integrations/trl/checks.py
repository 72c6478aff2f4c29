"""Checks that refuse trainers and options that are not supported, each with one sentence."""

from __future__ import annotations

import logging
from typing import Any

import torch
import trl
from peft import PeftModel
from transformers import PreTrainedModel
from trl import DistillationTrainer, GRPOTrainer

from ...errors import UserError
from ...model import recurrent
from ...model.head import head
from ...model.pictures import FAMILIES
from ...model.self_check import check_model
from ..trees import odd_layers

log = logging.getLogger("rolltree.trl")
TRL = (1, 16)


def version() -> None:
    """Raise UserError unless TRL has the version whose methods are overridden here."""
    if tuple(int(part) for part in trl.__version__.split(".")[:2]) != TRL:
        supported = ".".join(map(str, TRL))
        raise UserError(
            f"TRL is of version {trl.__version__}; rolltree supports {supported}: pip install 'trl=={supported}.*'."
        )


def base_model(model: Any) -> PreTrainedModel:
    """Return the Transformers model inside an adapter."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trainer(trainer: Any) -> None:
    """Raise UserError if no part of rolltree supports the trainer."""
    name, args = type(trainer).__name__, trainer.args
    if getattr(trainer, "_is_vlm", False) or hasattr(trainer.model.config, "vision_config"):
        _images(trainer, name)
    if isinstance(trainer, DistillationTrainer) and not isinstance(trainer.teacher_model, torch.nn.Module):
        raise UserError(f"{name} has its teacher elsewhere than in `teacher_model`; train it without accelerate.")
    if args.use_liger_kernel:
        raise UserError(f"{name} replaces layers by Liger's (use_liger_kernel); leave it out to use rolltree.")
    kind = str(trainer.accelerator.distributed_type).rsplit(".", 1)[-1]
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UserError(f"{name} is sharded by {kind}, which rolltree does not compute under TRL; use DDP or one GPU.")
    if isinstance(trainer.model, PeftModel) and trainer.model.active_peft_config.is_prompt_learning:
        raise UserError(f"{name} trains a prompt of virtual tokens, which rolltree does not compute; use LoRA.")
    try:
        head(base_model(trainer.model))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def _images(trainer: Any, name: str) -> None:
    """Raise UserError unless rolltree computes the images that the trainer trains on."""
    kind = base_model(trainer.model).config.model_type
    if not isinstance(trainer, GRPOTrainer):
        raise UserError(
            f"{name} trains on images, which rolltree computes for GRPOTrainer only; train it without accelerate."
        )
    if kind not in FAMILIES or not FAMILIES[kind].grid:
        types = ", ".join(sorted(model_type for model_type, family in FAMILIES.items() if family.grid))
        raise UserError(
            f"{name} trains on images with a model of the type {kind}, and rolltree computes those of {types} under "
            "TRL; train it without accelerate."
        )
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None) is not None:
        raise UserError(
            f"{name} trains on images with tools, whose answers may hold images in completions; leave the tools out or "
            "train it without accelerate."
        )


def own_forward(model: PreTrainedModel) -> None:
    """Raise UserError if the model's log-probs on trees are not those of its own forward."""
    try:
        check_model(model)
    except ValueError as error:
        raise UserError(f"{error} accelerate(trainer, tree=False, rollouts=False) does the former.") from None


def tree_layers(model: PreTrainedModel) -> bool:
    """Return True if the model has recurrent layers, whose classes are then prepared for trees.

    Raises:
        UserError: the model's layers cannot be computed on trees.
    """
    config = model.config.get_text_config()
    hybrid = config.model_type in recurrent.FAMILIES and not recurrent.unfit(model)
    if not hybrid and (kinds := odd_layers(model)):
        raise UserError(
            f"{type(model).__name__} has layers that cannot be tree-masked ({', '.join(kinds)}); pass "
            "tree=False and rollouts=False."
        )
    if getattr(config, "rope_parameters", None) is None and not hybrid:  # hybrids without them have no positions
        raise UserError(
            f"{type(model).__name__} has no rotary positions: TRL counts its positions from the padding, which trees "
            "do not have; pass tree=False and rollouts=False."
        )
    if getattr(config, "attention_dropout", 0):
        raise UserError(
            f"{type(model).__name__} drops attention, which is not supported on trees; set attention_dropout=0 or pass "
            "tree=False and rollouts=False."
        )
    return hybrid and recurrent.install(model)
