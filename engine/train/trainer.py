"""Updates of a model on packed trees: the trainer executes loss terms and contains no algorithm.

The caller's loop is::

    for batch in batches:
        trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=True)
    metrics = trainer.optim_step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rolltree.kernels import TermsLossOutput

from ..batches.batch import TreeBatch
from ..batches.device import fetch, to_device
from ..errors import RunError, UserError
from ..model.invariant.install import is_invariant
from ..model.loss import backward
from ..model.losses.distillation import FLOP
from ..model.losses.head_pass import with_plan
from ..model.sharding import clip_by_rows, named_shards, placed, reduce_gradients
from .config import TrainerConfig
from .gradients import Gradients
from .group import ALONE, Group
from .phases import MODEL, OPTIMIZER, Phases
from .terms import LossTerm

Metrics = dict[str, tuple[float, float]]
"""Metrics as ``{name: (sum, count)}``; the caller adds them up and divides once."""


class Weighted(NamedTuple):
    """A loss term in one update."""

    term: LossTerm
    normalizer: float  # of the whole update, all micro-batches and ranks
    weight: float = 1.0


@dataclass
class _Pending:
    """Sums over the micro-batches of an unfinished update."""

    loss: Tensor  # [] fp64
    finite: Tensor  # [] int64, micro-batches of finite loss
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    head_flop: list[float] = field(default_factory=list)
    batches: int = 0
    single_term: bool | None = None  # None: the update has no loss terms

    @classmethod
    def none(cls, device: torch.device) -> _Pending:
        return cls(
            torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        )

    def add(self, out: TermsLossOutput) -> None:
        self.batches += 1
        self.loss += out.loss
        self.finite += torch.isfinite(out.loss)
        for name, (value, count) in out.metrics.items():
            before = self.sums.get(name)
            self.sums[name] = (value, count) if before is None else (before[0] + value, before[1] + count)


class Trainer:
    """AdamW on fp32 master weights: `forward_backward` sums gradients over micro-batches, `optim_step` applies them.

    For a model in fp32 the master weights *are* its parameters, the same tensors that the rollout engine reads. A bf16
    model gets fp32 copies: its gradients are added to the copies' after every micro-batch, and its parameters are
    rounded from the copies. The gradient of the head's weight is summed in fp32 and never rounded.

    Args:
        model: trained on the device of its parameters.
        config: of the optimiser; another one may be set before a step.
        phases: records which part of an update the device computes when.
        group: the ranks that train the model, which is sharded over them (`shard`); each takes a share of the batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        phases: Phases | None = None,
        group: Group = ALONE,
    ) -> None:
        self.model = model
        self.config = config
        self.phases = phases
        self.lr_scale = 1.0  # factor of the learning rate, for schedules
        self.updates = 0  # optimiser steps taken
        self.bad_steps = 0  # non-finite ones since the last good one
        self._group = group
        self._gradient_share = 1.0  # share of the last update's rows with a gradient, for the next plan
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for _, p in self._named]
        self._device = self._masters[0].device
        head = model.get_output_embeddings().weight
        self._head = next((i for i, (_, p) in enumerate(self._named) if p is head and _sums_in_fp32(p)), None)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._pending = _Pending.none(self._device)
        self._ordered = is_invariant(model)
        self._gradients = Gradients(
            [p for _, p in self._named], self._masters, self._head, ordered=self._ordered, alone=group.count == 1
        )

    def forward_backward(
        self,
        batch: TreeBatch,
        terms: Sequence[Weighted],
        tokens: int,
        *,
        temperature: float | Tensor,
        on_policy: bool,
        last: bool = True,
    ) -> None:
        """Add the gradients of one micro-batch to those of the update.

        Args:
            batch: in the host's memory; it is planned there and moved to the model's device.
            terms: the summands of the loss, with the weight and the normaliser that each has in the whole update.
            tokens: logical tokens of the whole update, on all ranks; the batch's share of them weighs the experts' load
                balancing.
            temperature: divides the logits of the distribution whose log-probs enter the loss; one for all, or one a
                target (`TreeBatch.temperatures`), in the host's memory.
            on_policy: the current weights are those that sampled, so the ratio is 1 and no old log-probs are needed.
            last: reduce the gradients of a sharded model over the ranks, those of the micro-batches before included.

        Raises:
            ValueError: off policy, a token in the loss has no old log-prob.
        """

        def compute() -> TermsLossOutput:
            on_batch = [t.term.on(batch, t.normalizer, on_policy, t.weight) for t in terms]
            by_target = isinstance(temperature, Tensor)
            planned = with_plan(self.model, batch, on_batch, gradient_share=self._gradient_share, by_target=by_target)
            plans = [planned.plan, *(piece.plan for piece in planned.pieces)]
            self._pending.head_flop.extend(self._group.tensor * plan.flop() for plan in plans if plan is not None)
            return backward(
                self.model,
                planned.to(self._device),
                to_device(on_batch, self._device),
                temperature=to_device(temperature, self._device),
                router_share=sum(tree.logical_tokens for tree in batch.trees) / tokens,
                after_each=self._gradients.gather if batch.pieces else None,
                head_grad=self._gradients.of_head,
            )

        self._pending.single_term = len(terms) == 1
        self.accumulate(compute, last)

    def accumulate(self, compute: Callable[[], TermsLossOutput], last: bool = True) -> None:
        """Run ``compute`` and add the gradients it leaves on the parameters, its loss and its metrics to the update.

        Args:
            last: as for `forward_backward`.
        """
        if self._group.count > 1:
            reduce_gradients(self.model, last or self._ordered)
        if self._pending.batches == 0:
            self._enter(MODEL)
            self.model.train()
        try:
            with nullcontext() if self.phases is None else self.phases.following(self.model):
                out = compute()
        except BaseException:
            self._enter(None)
            raise
        self._enter(MODEL)
        self._gradients.end_micro_batch()
        self._pending.add(out)

    def optim_step(self) -> Metrics:
        """Apply the gradients of the micro-batches since the last call, unless the loss or a gradient is not finite.

        The host waits for the device once, when it fetches the metrics.

        Returns:
            Sums and counts over all micro-batches and ranks.

        Raises:
            ValueError: there was no micro-batch since the last call.
            RunError: `max_bad_steps` updates in a row were not finite.
        """
        if self._pending.batches == 0:
            raise ValueError("optim_step has no gradients to apply; call forward_backward for each micro-batch first.")
        pending, self._pending = self._pending, _Pending.none(self._device)
        self._enter(OPTIMIZER)
        try:
            return self._step(pending)
        finally:
            self._enter(None)

    def _step(self, pending: _Pending) -> Metrics:
        self._gradients.finish()
        clip = clip_by_rows if self._ordered else torch.nn.utils.clip_grad_norm_
        norm = _full(clip(self._masters, self.config.max_grad_norm))
        lr = self._lr()
        self._enter(OPTIMIZER)  # again: `met` relates the last mark before the wait to the host's time
        pairs = [v for pair in pending.sums.values() for v in pair]
        loss, grad_norm, finite, *numbers = fetch([pending.loss, norm, pending.finite, *pairs])
        if self.phases is not None:
            self.phases.met()
        rank_sums: dict[str, tuple[float, ...]] = {"": (loss, finite, pending.batches, sum(pending.head_flop))}
        rank_sums |= zip(pending.sums, zip(numbers[::2], numbers[1::2], strict=True), strict=True)
        sums = self._group.added(rank_sums)
        loss, finite, batches, head_flop = sums.pop("")
        metrics: Metrics = {name: (value, count) for name, (value, count) in sums.items()}
        if FLOP in metrics:
            metrics["perf/divergence_tflop"] = (metrics.pop(FLOP)[0] / 1e12, 1)
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            self._apply()
        self._optimizer.zero_grad(set_to_none=True)
        self.bad_steps = 0 if applied else self.bad_steps + 1
        if self.bad_steps >= self.config.max_bad_steps:
            raise RunError(
                f"The loss or its gradient was not finite in {self.bad_steps} updates in a row "
                "(trainer.max_bad_steps); lower trainer.lr or look into the last rollouts."
            )
        metrics["actor/loss"] = (loss, 1)
        metrics["actor/skipped_updates"] = (0.0 if applied else 1.0, 1)
        metrics["actor/lr"] = (lr, 1)
        if applied:
            metrics["actor/grad_norm"] = (grad_norm, 1)
        else:
            metrics["actor/nonfinite_micro_batches"] = (batches - finite, 1)
        if pending.single_term is None:
            return metrics
        if pending.single_term and "actor/pg_clipfrac" in metrics and self._device.type == "cpu":
            clipped, computed = metrics["actor/pg_clipfrac"][0], metrics["actor/ppo_kl"][1]
            self._gradient_share = 1 - clipped / max(computed, clipped, 1)
        metrics["perf/head_tflop"] = (head_flop / 1e12, 1)
        return metrics

    @property
    def pending_head_flop(self) -> float:
        """FLOP of the head's products since the last `optim_step`."""
        return sum(self._pending.head_flop)

    def pending_norm(self) -> float:
        """Return the norm of this process's gradients since the last `optim_step`, which stay."""
        self._gradients.finish()
        return float(torch.nn.utils.get_total_norm([m.grad for m in self._masters if m.grad is not None]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's parameters by name, as a sampler loads them; of a sharded model the shards."""
        return named_shards(self.model)

    def drop_gradients(self) -> None:
        """Discard the micro-batches since the last `optim_step`, after an update was interrupted."""
        self._pending = _Pending.none(self._device)
        self._gradients.drop()
        self._optimizer.zero_grad(set_to_none=True)
        for _, parameter in self._named:
            parameter.grad = None

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return all tensors (fp32 weights and AdamW's moments) and counters."""
        tensors: dict[str, Tensor] = {}
        for (name, _), master in zip(self._named, self._masters, strict=True):
            tensors[f"weight.{name}"] = master.detach()
            for key, value in self._optimizer.state[master].items():
                tensors[f"{key}.{name}"] = value
        return tensors, {"updates": self.updates, "bad_steps": self.bad_steps}

    @property
    def copied(self) -> set[str]:
        """The names of the parameters whose fp32 weights are copies."""
        return {name for (name, weight), copy in zip(self._named, self._masters, strict=True) if copy is not weight}

    def like(self, name: str) -> Tensor | None:
        """Return a tensor that is sharded as the one that `state_dict` names so; None: it is not sharded."""
        kind, _, parameter = name.partition(".")
        named = {parameter_name: master for (parameter_name, _), master in zip(self._named, self._masters, strict=True)}
        return None if kind == "step" else named.get(parameter)

    def load_state_dict(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            UserError: the tensors belong to another model.
        """
        stored = {name: tuple(t.shape) for key, t in tensors.items() if (name := key.removeprefix("weight.")) != key}
        ours = {name: tuple(p.shape) for name, p in self._named}
        if stored != ours:
            name = min(dict(stored.items() ^ ours.items()))
            raise UserError(
                f"The checkpoint is of another model: '{name}' is {stored.get(name, 'missing')} in it and "
                f"{ours.get(name, 'missing')} in the model; set model.path back to the model the run began with."
            )
        with torch.no_grad():
            for (name, parameter), master in zip(self._named, self._masters, strict=True):
                master.copy_(placed(tensors[f"weight.{name}"], master))
                parameter.copy_(master)
                if f"step.{name}" in tensors:  # absent where no gradient has reached the parameter yet
                    step, *moments = (tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq"))
                    moments = [placed(moment, master).to(master.device, copy=True) for moment in moments]
                    self._optimizer.state[master] = {
                        "step": step.to(master.device, copy=True),
                        **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)),
                    }
        self.updates = counters["updates"]
        self.bad_steps = counters["bad_steps"]

    def _enter(self, phase: str | None) -> None:
        if self.phases is not None:
            self.phases.enter(phase)

    def _lr(self) -> float:
        warmup = self.config.lr_warmup_steps
        return self.lr_scale * self.config.lr * min(1.0, (self.updates + 1) / warmup if warmup else 1.0)

    def _apply(self) -> None:
        config = self.config
        for group in self._optimizer.param_groups:
            group |= {"lr": self._lr(), "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        self._optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for (_, parameter), master in zip(self._named, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)


def _sums_in_fp32(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.bfloat16)


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
