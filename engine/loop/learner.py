"""The update of one step: roles score the trees, credit is assigned over the batch, packed trees are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.batch import TreeBatch
from ..data.cost import CostModel
from ..data.equal_prefixes import share_equal_prefixes
from ..data.pack import pack
from ..data.tree import TokenTree
from ..errors import UserError
from ..methods.credit import give_credit
from ..methods.schedules import at_step
from ..methods.shaping import shape_rewards
from ..model import varlen
from ..model.self_check import skip_check, tree_error, trees_fit
from ..rollout import SamplingParams
from ..train.phases import MODEL, Phases
from ..train.terms import TokenTerm
from ..train.trainer import Metrics, Trainer, Weighted
from .metrics import Stopwatch, Sums
from .parts import LearningParts
from .utilization import Mfu


class Learner:
    """Turns judged trees into updates of the policy.

    Args:
        watch: accounts for the time of each part.
        note: called with sentences for the user.
    """

    def __init__(self, parts: LearningParts, watch: Stopwatch, note: Callable[[str], object]) -> None:
        self.parts, self.model, self.watch, self.note = parts, parts.model, watch, note
        self.terms, self.roles, self.critic = parts.terms, parts.roles, parts.critic
        self.scales = {"temperature_scale": parts.temperature_scale, "length_scale": parts.length_scale}
        self.metrics: dict[str, float] = {}  # metrics of the last step, which schedules may read
        self.phases = Phases(parts.model.device)
        self.trainer = Trainer(parts.model, parts.optimizer, self.phases)
        self.mfu = Mfu.of(parts.model)
        self.max_tokens = parts.max_tokens  # halved by each update that runs out of memory
        self._flat: bool | None = None  # None: not tested yet

    def update(self, trees: list[TokenTree], given: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn from ``trees``, whose leaves have rewards (NaN where judging failed), and from ``given`` trees.

        Returns:
            True if the policy has changed.

        Raises:
            UserError: a schedule returned a number out of range.
            torch.OutOfMemoryError: not even one sequence fits into memory.
        """
        parts = self.parts
        if step == 1:
            for sentence in parts.inert:
                self.note(sentence)
        kept = self.credit(trees, step)
        with self.watch.part("pack"):
            sums.count("filter/zero_variance_groups", sum(np.ptp(t.rewards["reward"]) == 0 for t in kept))
            sums.count("filter/failed_groups", len(trees) - len(kept))
            left = _sampled(trees) - _sampled(kept)
            sums.count("filter/failed_tokens", left)
            kept = _counted(kept, sums)
            for term, _ in self.terms:
                term.prepare(kept + given)
        updated = False
        self.trainer.lr_scale = at_step(parts.lr_scale, step, self.metrics)
        self._record_schedules(step, sums)
        for k in range(parts.updates_per_step):
            share = slice(k, None, parts.updates_per_step)
            updated |= self._one_update(kept[share], given[share], step, sums)
        self.metrics = sums.means()
        return updated

    def credit(self, trees: Sequence[TokenTree], step: int) -> list[TokenTree]:
        """Shape the rewards of ``trees``, let the roles score them and give them credit; return them without responses
        whose judging failed."""
        parts = self.parts
        with self.watch.part("pack"):
            failed = [np.isnan(tree.rewards["reward"]) for tree in trees]
            judged = [t.without_leaves(drop) if drop.any() else t for t, drop in zip(trees, failed, strict=True)]
            kept = [tree for tree in judged if tree is not None]
            for tree in kept:
                shape_rewards(parts.shapings, tree)
        self._score(kept, self.temperature(step))
        with self.watch.part("pack"):
            if kept:
                give_credit(parts.credit, parts.credit_name, kept)
            for tree, part, drop in zip(trees, judged, failed, strict=True):
                if part is not None and part is not tree:
                    tree.advantage[~drop] = part.advantage
                    for name, values in part.rewards.items():
                        tree.rewards.setdefault(name, np.full(tree.num_leaves, np.nan, np.float32))[~drop] = values
        return kept

    def _one_update(
        self,
        members: list[TokenTree],
        given: list[TokenTree],
        step: int,
        sums: Sums,
    ) -> bool:
        with self.watch.part("pack"):
            weighed = [(t, w) for t, schedule in self.terms if (w := at_step(schedule, step, self.metrics))]
            rollouts = members
            if self.parts.drop_zero_variance and self.critic is None:  # which learns from every group
                rollouts = [tree for tree in members if any(term.sees(tree) for term, _ in weighed)]
            sums.count("filter/unseen_groups", len(members) - len(rollouts))
            sums.count("filter/unseen_tokens", _sampled(members) - _sampled(rollouts))
            terms = [
                Weighted(term, normalizer, weight)
                for term, weight in weighed
                if (normalizer := term.normalizer(rollouts, given))
            ]
            live = self._shared(rollouts + given)
            batches = self._packed(live)
        if not batches or not terms:
            sums.count("actor/empty_updates")
            if self.critic is None:
                sums.count("filter/unseen_tokens", _sampled(rollouts))
            if batches and self.critic is not None:  # it learns while the policy waits
                self._teach_critic(batches, sums)
            return False
        lags = [self.trainer.updates - tree.policy_version[tree.loss_mask] for tree in rollouts]
        for lag in lags:
            sums.add_values("policy/lag", lag)
        on_policy = not any(lag.any() for lag in lags)
        with self.watch.part(MODEL):
            metrics = None
            while metrics is None:
                try:
                    metrics = self._train(batches, terms, self.temperature(step), on_policy)
                except torch.OutOfMemoryError as error:
                    self._halve(live, error)
                    sums.count("actor/out_of_memory")
                    batches = self._packed(live)
        self.mfu.add(live, metrics["perf/head_tflop"][0])
        for name, (total, count) in metrics.items():
            sums.add(name, total, count)
        if self.critic is not None:
            self._teach_critic(batches, sums)
        for role in self.roles:
            role.follow(self.model)
        return True

    def _teach_critic(self, batches: Sequence[TreeBatch], sums: Sums) -> None:
        assert self.critic is not None
        with self.watch.part("update_critic"):
            for name, (total, count) in self.critic.learn(batches).items():
                sums.add(name, total, count)

    def _train(
        self, batches: Sequence[TreeBatch], terms: Sequence[Weighted], temperature: float, on_policy: bool
    ) -> Metrics:
        tokens = sum(tree.logical_tokens for batch in batches for tree in batch.trees)
        for batch in batches:
            own = batch.temperatures(temperature)
            self.trainer.forward_backward(batch, terms, tokens, temperature=own, on_policy=on_policy)
        return self.trainer.optim_step()

    def _shared(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Merge equal prefixes of different leaves, unless an objective is defined on nodes or updates are flat."""
        by_node = (isinstance(t, TokenTerm) and t.objective.ratio_level == "segment" for t, _ in self.terms)
        return trees if self._shares_nothing(trees) or any(by_node) else [share_equal_prefixes(t) for t in trees]

    def _packed(self, trees: list[TokenTree]) -> list[TreeBatch]:
        found = pack(
            trees,
            max_tokens=self.max_tokens,
            in_pieces=True,
            flat=self._shares_nothing(trees),
            unshare=CostModel.of(self.model) if varlen.kernel() is not None else None,
        )
        return [replace(batch, of=len(found)) for batch in found]

    def _halve(self, trees: Sequence[TokenTree], error: torch.OutOfMemoryError) -> None:
        """Halve the size of micro-batches after an update that ran out of memory.

        Raises:
            torch.OutOfMemoryError: ``error``, if the longest sequence would not fit.
        """
        self.trainer.drop_gradients()
        if self.max_tokens // 2 < max(int(tree.path_length.max()) for tree in trees):
            raise
        self.max_tokens //= 2
        torch.cuda.empty_cache()
        self.note(f"An update ran out of memory; micro-batches have {self.max_tokens} tokens from now on.")

    def temperature(self, step: int) -> float:
        """Return the sampling temperature of ``step``, at which its update computes log-probs of given tokens too."""
        return self.parts.temperature * self._scale("temperature_scale", step, math.inf)

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the temperature and the maximum length of ``step``."""
        longest = max(1, round(params.max_new_tokens * self._scale("length_scale", step, 1.0)))
        return replace(params, temperature=self.temperature(step), max_new_tokens=longest)

    def _scale(self, name: str, step: int, most: float) -> float:
        value = at_step(self.scales[name], step, self.metrics)
        if not 0 < value <= most:
            least = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
            raise UserError(f"loop.{name} must be {least}; at step {step} it is {value:g}.")
        return value

    def _record_schedules(self, step: int, sums: Sums) -> None:
        """Record the values of schedules for ``step`` as metrics."""
        named = {"lr_scale": self.parts.lr_scale, **self.scales}
        named |= {f"{term.name}_weight": schedule for term, schedule in self.terms}
        for name, schedule in named.items():
            if not isinstance(schedule, int | float):
                sums.add(f"schedule/{name}", at_step(schedule, step, self.metrics))

    def _score(self, trees: Sequence[TokenTree], temperature: float) -> None:
        if not trees:
            return
        with self.watch.part("old_log_prob"):
            flat = self._shares_nothing(trees)
            for role in self.roles:
                role.score(trees, max_tokens=self.parts.max_tokens, temperature=temperature, flat=flat)
            if self.critic is not None:
                self.critic.score(trees, max_tokens=self.parts.max_tokens)

    def _shares_nothing(self, trees: Sequence[TokenTree]) -> bool:
        """Return True if the model computes trees wrongly, so that updates must be flat; tested once, on rollouts."""
        if self._flat is None and trees:
            skip_check(self.model)  # it is done here, on real rollouts, or not wanted
            error = tree_error(self.model, trees) if self.parts.self_check else None
            self._flat = not trees_fit(error, self.model.dtype)
            if self._flat:
                self.note(
                    f"{type(self.model).__name__} gives other log-probs on packed trees than on plain sequences (mean "
                    f"difference {error:.3g}): updates share no prefixes. trainer.self_check = false trains on trees "
                    "nevertheless."
                )
        return bool(self._flat)

    def weights(self) -> Trainer:
        """Return the source of the policy's weights, for a sampler."""
        return self.trainer

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and counters of the optimisers of policy and critic, and of roles whose weights change."""
        tensors, counters = self.trainer.state_dict()
        seen = [role.seen for role in self.roles]
        state: dict[str, Any] = {"trainer": counters, "roles": seen, "metrics": self.metrics}
        if self.critic is not None:
            theirs, state["critic"] = self.critic.trainer.state_dict()
            tensors |= {f"critic/{name}": t for name, t in theirs.items()}
        for role in self.roles:
            if role.weights is not None and (role.initial or role.reset_every or role.ema is not None):
                tensors |= {f"role.{role.column}/{name}": t for name, t in role.weights.items()}
        return tensors, state

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            UserError: the tensors belong to another model or to other roles.
        """
        self.metrics = state["metrics"]
        self.trainer.load_state_dict({name: t for name, t in tensors.items() if "/" not in name}, state["trainer"])
        if self.critic is not None:
            self.critic.trainer.load_state_dict(_under("critic/", tensors), state["critic"])
        if len(state["roles"]) != len(self.roles):
            raise UserError("The checkpoint has other [roles] than the configuration; restore them to resume.")
        for role, seen in zip(self.roles, state["roles"], strict=True):
            role.seen = seen
            if role.weights is not None and (saved := _under(f"role.{role.column}/", tensors)):
                role.weights = {name: saved[name].to(w.device, copy=True) for name, w in role.weights.items()}


def _counted(trees: Sequence[TokenTree], sums: Sums) -> list[TokenTree]:
    """Return the trees without the responses that credit reads and no update counts."""
    found = [t if t.trained.all() else t.without_leaves(~t.trained) for t in trees]
    left = [tree for tree in found if tree is not None]
    sums.count("filter/untrained_tokens", _sampled(trees) - _sampled(left))
    return left


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def _sampled(trees: Sequence[TokenTree]) -> int:
    return sum(tree.sampled_tokens for tree in trees)
