"""The update of one step: roles score the trees, credit is assigned over the batch, packed trees are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..batches.batch import TreeBatch
from ..data.episodes import Episodes
from ..data.stored import LossVersions, enter
from ..data.tree import TokenTree
from ..errors import UserError
from ..methods.credit import give_credit
from ..methods.schedules import at_step
from ..methods.shaping import shape_rewards, weigh_credit
from ..model.roles import Role
from ..model.routes import unknown_routes
from ..record.metrics import Stopwatch, Sums
from ..record.rollout_files import write_step
from ..rollout import SamplingParams
from ..rollout.sampler import WeightSource
from ..train.phases import MODEL, Phases, Span
from ..train.trainer import Metrics, Weighted
from .learned import Learned
from .learning import Ahead, LearningParts
from .left_out import Cutting, counted, sampled
from .live import computed
from .micro_batches import MicroBatches
from .utilization import Compute

Score = Callable[[Sequence[TokenTree], float], object]
"""Scores trees into their columns, at a temperature."""


class Learner(Learned):
    """Turns judged trees into updates of the policy.

    Each of several ranks (`LearningParts.group`) has all trees and calls the same methods: credit, normalisers and
    schedules are computed by all of them on all trees, log-probs and losses by each on its share.

    Args:
        watch: accounts for the time of each part.
        note: called with sentences for the user.
    """

    def __init__(self, parts: LearningParts, watch: Stopwatch, note: Callable[[str], object]) -> None:
        self.watch, self.note = watch, note
        self.phases = Phases(parts.model.device)
        super().__init__(parts, self.phases)
        self.terms = list(parts.terms)
        self.scales = {"temperature_scale": parts.temperature_scale, "length_scale": parts.length_scale}
        self.policies: dict[str, Learner] = {}  # no other one learns with this one
        self.compute = Compute.of(parts.model, self.group.count)
        self.batches = MicroBatches(parts, note)
        self._cut = Cutting(parts.cut, self.batches, self.trainer, self.compute)
        self._alone = [role for role in self.roles if role.fixed] if parts.score_early else []

    def update(self, trees: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn from ``trees``, whose leaves have rewards (NaN where judging failed), and from ``demonstrations``.

        Returns:
            True if the policy has changed.

        Raises:
            UserError: a schedule returned a number out of range, or a term needs whole trees that do not fit.
            torch.OutOfMemoryError: not even one sequence fits into memory; or, with several ranks, an update does not.
        """
        return self.learn(self.judged(trees, step, sums), demonstrations, step, sums)

    def judged(self, trees: list[TokenTree], step: int, sums: Sums, score: Score | None = None) -> list[TokenTree]:
        """Begin the update of ``step``: give ``trees`` their credit and return those with verdicts; see `credit`."""
        self.parts.context.at(step, self.metrics)
        for sentence in self.parts.notes if step == 1 else ():
            self.note(sentence)
        kept = self.credit(trees, step, score)
        with self.watch.part("pack"):
            sums.count("filter/zero_variance_groups", sum(np.ptp(t.rewards["reward"]) == 0 for t in kept))
            sums.count("filter/failed_groups", len(trees) - len(kept))
            sums.count("filter/failed_tokens", sampled(trees) - sampled(kept))
        return kept

    def learn(self, kept: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums) -> bool:
        """Update the policy on trees that have their credit, and on ``demonstrations``; arguments as for `update`."""
        parts = self.parts
        parts.context.at(step, self.metrics)
        self.terms = [(term.now(), weight) for term, weight in parts.terms]
        with self.watch.part("pack"):
            kept = counted(kept, sums)
            if parts.replay_routes:
                for tree in kept:
                    sums.add_values("training/unknown_routes", unknown_routes(tree))
        self._let_score(parts.given_roles, demonstrations, self.temperature(step))
        with self.watch.part("pack"):
            for term, _ in self.terms:
                term.prepare(kept + demonstrations)
        updated = False
        self.trainer.lr_scale = at_step(parts.lr_scale, step, self.metrics)
        self._record_schedules(step, sums)
        for k in range(parts.epochs * parts.updates_per_step):
            again, place = divmod(k, parts.updates_per_step)
            share = slice(place, None, parts.updates_per_step)
            updated |= self._one_update(kept[share], demonstrations[share], step, sums, again=again > 0)
        self.model.eval()  # here, not at every step of the engine, because it takes as long as a layer
        self.metrics = sums.means()
        return updated

    def credit(self, trees: Sequence[TokenTree], step: int, score: Score | None = None) -> list[TokenTree]:
        """Let the roles score ``trees``, shape their rewards and give them credit; return them without responses whose
        judging failed.

        Args:
            score: scores trees at the temperature of the step. Default: `score`, for a tree that one policy sampled.
        """
        parts = self.parts
        with self.watch.part("pack"):
            failed = [np.isnan(tree.rewards["reward"]) for tree in trees]
            judged = [t.without_leaves(drop) if drop.any() else t for t, drop in zip(trees, failed, strict=True)]
            kept = [tree for tree in judged if tree is not None]
        (score or self.score)(kept, self.temperature(step))
        with self.watch.part("pack"):
            responses = [Episodes(tree) for tree in kept]
            for episodes in responses:
                shape_rewards(parts.shapings, episodes.tree)
            if kept:
                give_credit(parts.credit, parts.credit_name, [episodes.tree for episodes in responses])
            for tree, episodes in zip(kept, responses, strict=True):
                episodes.write_back()
                weigh_credit(tree, tree.meta.get("replay_weight", 1.0))
            for tree, part, drop in zip(trees, judged, failed, strict=True):
                if part is not None and part is not tree:
                    tree.advantage[~drop] = part.advantage
                    for name, values in part.rewards.items():
                        tree.rewards.setdefault(name, np.full(tree.num_leaves, np.nan, np.float32))[~drop] = values
        return kept

    def _one_update(
        self, members: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums, *, again: bool
    ) -> bool:
        """Make one update of a share of the batch; ``again``: an earlier pass has counted what the share leaves out."""
        with self.watch.part("pack"):
            weighed = [(t, w) for t, schedule in self.terms if (w := at_step(schedule, step, self.metrics))]
            rollouts = members
            if self.parts.drop_zero_variance and self.critic is None:  # which learns from every group
                rollouts = [tree for tree in members if any(term.has_gradient(tree) for term, _ in weighed)]
            terms = [
                Weighted(term, normalizer, weight)
                for term, weight in weighed
                if (normalizer := term.normalizer(rollouts, demonstrations))
            ]
            all_terms = [term for term, _ in self.terms]
            self.batches.shares_nothing(rollouts + demonstrations)  # tested on all of them
            live = computed(
                rollouts,
                demonstrations,
                [weighted.term for weighted in terms],
                self.group,
                cut=self._cut.of(terms),
                share=lambda tree: self.batches.shared(tree, all_terms),
                whole=self.critic is not None or getattr(self.model.config, "output_router_logits", False),
            )
            versions = [LossVersions.of(tree) for tree in rollouts]
            on_policy = all(of_tree.only(self.updates) for of_tree in versions)
            on_policy &= not any(tree.other_prompt.any() for tree in rollouts)
            temperature = self.temperature(step)
            if self._cut.of(terms) is not None:
                self._cut.describe(live, terms, all_terms, step, sums, temperature=temperature, on_policy=on_policy)
            if not again:
                sums.count("filter/unseen_groups", len(members) - len(rollouts))
                sums.count("filter/unseen_tokens", sampled(members) - live.total.sampled)
            batches = self.batches.packed(live, all_terms)
        if not batches or not terms:
            sums.count("actor/empty_updates")
            if self.critic is None and not again:
                sums.count("filter/unseen_tokens", live.total.sampled)
            if batches and self.critic is not None:  # it learns while the policy waits
                self._teach_critic(batches, live.total.loss, sums)
            return False
        for of_tree in versions:
            sums.add("policy/lag", float(self.updates * of_tree.tokens - of_tree.total), of_tree.tokens)
        if self.parts.trajectory is not None:
            self.parts.trajectory.record(self.model, self.updates)
        with self.watch.part(MODEL):
            metrics = None
            while metrics is None:
                try:
                    metrics = self._train(batches, live.total.logical, terms, temperature, on_policy)
                except torch.OutOfMemoryError:
                    self.trainer.drop_gradients()
                    if not self.batches.halve(live):
                        raise
                    torch.cuda.empty_cache()
                    sums.count("actor/out_of_memory")
                    batches = self.batches.packed(live, all_terms)
        tflop = metrics["perf/head_tflop"][0] + metrics.get("perf/divergence_tflop", (0.0, 1))[0]
        self.compute.train(self.model, self.batches.work, self.batches.again, 1e12 * tflop)
        for name, (total, count) in metrics.items():
            sums.add(name, total, count)
        if self.critic is not None:
            self._teach_critic(batches, live.total.loss, sums)
        for role in self.roles:
            role.follow(self.model)
        if self.parts.trajectory is not None:
            self.parts.trajectory.record(self.model, self.updates)
        return True

    def _teach_critic(self, batches: Sequence[TreeBatch], loss_tokens: int, sums: Sums) -> None:
        assert self.critic is not None
        with self.watch.part("update_critic"):
            self.compute.train(self.critic.model, self.batches.work, self.batches.again, 0.0)
            for name, (total, count) in self.critic.learn(batches, loss_tokens).items():
                sums.add(name, total, count)

    def _train(
        self,
        batches: Sequence[TreeBatch],
        tokens: int,
        terms: Sequence[Weighted],
        temperature: float,
        on_policy: bool,
    ) -> Metrics:
        for number, batch in enumerate(batches, start=1):
            temperatures = batch.temperatures(temperature)
            self.trainer.forward_backward(
                batch, terms, tokens, temperature=temperatures, on_policy=on_policy, last=number == len(batches)
            )
        return self.trainer.optim_step()

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
        for name, option in self.parts.context.schedules.items():
            sums.add(f"schedule/{name}", option.now())

    def score(self, trees: Sequence[TokenTree], temperature: float) -> None:
        """Let the roles and the critic score ``trees`` into their columns."""
        if not trees:
            return
        if self._alone:
            with self.watch.part("old_log_prob"):
                self.batches.shares_nothing(trees)  # tested on all of them
            for tree in trees:
                self._score_alone(tree, temperature)
        self._let_score([role for role in self.roles if role not in self._alone], trees, temperature)
        if self.critic is not None:
            with self.watch.part("old_log_prob"):
                batches = self.batches.to_score(trees)
                self.critic.score(trees, batches)
                self.compute.score(self.critic.model, replace(self.batches.work, heads=0))
                self._exchange(trees, batches, "value")

    gather = None
    record = staticmethod(write_step)

    @property
    def ahead(self) -> Ahead | None:
        """Scores the tree of a ready group before its batch is complete, if `loop.score_early` is set: with the roles
        of fixed weights, each tree by itself, so that log-probs do not depend on which groups were ready first. None
        before the first update, which tests how trees are computed."""
        return self._score_ahead if self._alone and self.batches.flat is not None else None

    def _score_ahead(self, step: int, tree: TokenTree) -> None:
        if not np.isnan(tree.rewards["reward"]).any():  # at its update a tree loses responses that were not judged
            self._score_alone(tree, self.temperature(step))

    def _score_alone(self, tree: TokenTree, temperature: float) -> None:
        if not tree.meta.get("scored", False):
            self._let_score(self._alone, [tree], temperature)
            tree.meta["scored"] = True

    def _let_score(self, roles: Sequence[Role], trees: Sequence[TokenTree], temperature: float) -> None:
        """Let ``roles`` score ``trees``, packed together."""
        if not trees or not roles:
            return
        with self.watch.part("old_log_prob"):
            for role in roles:
                role.prepare(trees)
            flat = self.batches.shares_nothing(trees)
            batches = self.batches.to_score(trees, in_pieces=self.batches.in_pieces and not flat, flat=flat)
            for role in roles:
                for model in role.score(trees, batches, temperature=temperature):
                    self.compute.score(model, self.batches.work)
                for column in role.columns:
                    self._exchange(trees, batches, column)

    def _exchange(self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], column: str) -> None:
        """Tell the other ranks the scores in ``column`` of this rank's ``batches``, and write theirs on ``trees``."""
        members = {i for batch in batches for i in batch.tree_index if column in trees[i].names}
        scores = {i: trees[i].columns[column] for i in members}
        for of_share in self.group.of_shares(scores) if self.group.count > 1 else ():
            for i, values in of_share.items():
                enter(trees[i], column, values)

    def weights(self) -> WeightSource:
        """Return the source of the policy's weights, for a sampler."""
        return self.trainer if self.parts.weights is None else self.parts.weights(self.model)

    def spans(self) -> list[Span]:
        """Return the phases of the updates since the last call, in order; waits until the device has finished them."""
        return self.phases.read()

    def utilization(self, times: dict[str, float]) -> dict[str, float]:
        """Return `Compute.read` of the step's account."""
        return self.compute.read(times)

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return self.model.device

    @property
    def updates(self) -> int:
        """Number of updates of the policy."""
        return self.trainer.updates
