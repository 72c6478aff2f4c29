"""The function `accelerate`, which gives a trainer the parts of rolltree that its class supports."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, SFTTrainer

from ...errors import UserError
from ...freed_memory import keep_freed_memory
from ...model import attention
from ...model.fused_layers import fuse_layers
from . import checks
from .distilled import Distiller, GkdLoss
from .fused_head import FusedHead
from .groups import GroupTrainer
from .parts import Parts
from .replaced import DIVERGENCE, GROUPS, SCORES, chain, is_gkd, own, package
from .rollouts import Rollouts


def accelerate(
    trainer: Any, *, head: bool = True, tree: bool = True, rollouts: bool = True, layers: bool = True
) -> Any:
    """Make a TRL trainer compute with rolltree. Call it before ``trainer.train()``.

    Everything except log-probs and sampling stays the trainer's own code, also if its class is a subclass of TRL's. On
    a CPU the process keeps the memory that its steps free (`keep_freed_memory`).

    Args:
        trainer: a `GRPOTrainer`, `RLOOTrainer` or `DistillationTrainer`; or a `DPOTrainer`, `SFTTrainer` or
            `GKDTrainer`, which get head and layers only. It is changed in place.
        head: compute log-probs and entropies with `linear_logprob` in place of TRL's fused head and, if `Objective`
            supports the trainer's loss, the gradients with `linear_policy_loss`. Only tokens of completions are scored.
        tree: train on the completions of one prompt as a tree, so that each micro-batch computes the prompt once; sets
            the models' attention to "rolltree". Micro-batches of one update are regrouped by prompt unless the loss
            depends on their composition.
        rollouts: sample completions with the native engine in place of ``model.generate``.
        layers: run norms, rotary embedding and gated units of the models in one pass each (`fuse_layers`);
            `unfuse_layers` undoes it.

    Returns:
        The same ``trainer``.

    Raises:
        UserError: the trainer or an option of it is not supported; the message names it.
    """
    checks.version()
    if not isinstance(trainer, (*GROUPS, DistillationTrainer, DPOTrainer, SFTTrainer)):
        raise UserError(
            "accelerate supports GRPO, RLOO, Distillation, DPO, SFT and GKD trainers of TRL, not a "
            f"{type(trainer).__name__}."
        )
    if hasattr(trainer, "rolltree"):
        raise UserError(f"This {type(trainer).__name__} is accelerated already; call accelerate once.")
    checks.trainer(trainer)
    distils = isinstance(trainer, DistillationTrainer)
    of_groups = isinstance(trainer, GROUPS) or distils
    if tree and of_groups and not head:
        raise UserError("tree=True scores by rolltree's head; leave head=True, or pass tree=False.")
    models = [checks.base_model(trainer.model)]
    if getattr(trainer, "ref_model", None) is not None:
        models.append(checks.base_model(trainer.accelerator.unwrap_model(trainer.ref_model)))
    if distils or is_gkd(trainer):
        models.append(checks.base_model(trainer.accelerator.unwrap_model(trainer.teacher_model)))
    if models[0].device.type == "cpu":
        keep_freed_memory()
    recurrent = False
    if of_groups and (tree or rollouts):
        for model in models:
            recurrent |= checks.tree_layers(model)
    fused = _head_of(models[0]) if head and not distils else None
    tree = tree and of_groups and own(trainer, DIVERGENCE if distils else SCORES) is None
    if layers:
        for model in models:
            fuse_layers(model)
    if fused is not None:
        for model in models:
            fused.install(model)
    engine = Rollouts(with_logprobs=isinstance(trainer, GRPOTrainer)) if rollouts and of_groups else None
    parts = Parts(head, tree, engine, models, recurrent, models[0].config._attn_implementation)
    if not of_groups:
        checks.log.info("%s has no groups and samples nothing: it gets head and layers.", type(trainer).__name__)
        trainer.rolltree = parts
        if is_gkd(trainer):
            _precede(trainer, GkdLoss)
        return trainer
    if tree:
        for model in models:
            model.set_attn_implementation(attention.NAME)
            checks.own_forward(model)
    _precede(trainer, Distiller if distils else GroupTrainer)
    if not distils:
        parts.read(trainer)
    elif head:
        parts.stays(trainer, DIVERGENCE)
    trainer.rolltree = parts
    return trainer


def _precede(trainer: Any, overrides: type) -> None:
    """Let the methods of ``overrides`` precede those of the trainer's class."""
    if not isinstance(trainer, overrides):
        cls = type(trainer)
        trainer.__class__ = type(cls.__name__, (overrides, cls), {"__module__": cls.__module__})


def _head_of(model: PreTrainedModel) -> FusedHead:
    """Return the head with the arguments of TRL's `add_fused_lm_head`, which made the model's forward.

    Raises:
        UserError: the forward has been replaced since.
    """
    names = ("temperature", "cast_lm_head_to_fp32", "outputs")
    for layer in chain(model.forward):
        cells = getattr(layer, "__closure__", None) or ()
        cell_of = dict(zip(layer.__code__.co_freevars, cells, strict=True)) if cells else {}
        if set(names) <= cell_of.keys():
            return FusedHead(*(cell_of[name].cell_contents for name in names))
        if package(layer) not in ("accelerate", "torch"):  # mixed precision
            break
    raise UserError(
        f"{type(model).__name__} has another forward than TRL gave it, which accelerate would replace; change the "
        "forward after accelerate, or pass head=False and tree=False."
    )


class RolltreeGRPOTrainer(GroupTrainer, GRPOTrainer):
    """TRL's `GRPOTrainer`, accelerated: takes its arguments and the options of `accelerate`.

    Raises:
        UserError: the trainer or an option of it is not supported; the message names it.
    """

    def __init__(
        self,
        *args: Any,
        head: bool = True,
        tree: bool = True,
        rollouts: bool = True,
        layers: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        accelerate(self, head=head, tree=tree, rollouts=rollouts, layers=layers)
