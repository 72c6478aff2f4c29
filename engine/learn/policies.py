"""Several policies that learn from the same trees, each from the tokens that it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.policies import sampled_by
from ..data.tree import TokenTree
from ..record.metrics import Sums
from ..record.rollout_files import write_step
from ..rollout import SamplingParams
from ..rollout.sampler import WeightSource
from ..train.checkpoint import Saved
from ..train.phases import Span
from .learner import Learner

LEFT_OUT = ("filter/untrained_tokens", "filter/unseen_tokens")
"""Counts of sampled tokens that an update leaves out; the run's are those of all policies together."""


class Policies:
    """The learners of a run with ``[models.NAME]``; see `Learning`.

    The trees are credited once, for all roles together. Then each policy learns from them as `sampled_by` shows them,
    so no token enters another policy's loss, normaliser or metrics. The metrics of a further policy are
    ``NAME/<metric>``.

    Args:
        first: of the run's ``[model]``. It gives the credit; demonstrations are for it alone.
        others: of the further policies, by name, in the order of their numbers from 1 on.
    """

    ahead = None  # the columns of all policies are written together
    gather = None
    record = staticmethod(write_step)

    def __init__(self, first: Learner, others: Mapping[str, Learner]) -> None:
        self.first, self.policies = first, dict(others)
        self._all = [first, *self.policies.values()]

    def update(self, trees: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums) -> bool:
        """Let every policy learn from its tokens; see `Learner.update`.

        Returns:
            True if any policy has changed.
        """
        kept = self.first.judged(trees, step, sums, self._score)
        changed = self.first.learn(_seen(kept, 0), demonstrations, step, sums)
        for number, (name, learner) in enumerate(self.policies.items(), start=1):
            if step == 1 and learner.parts.notes != self.first.parts.notes:
                for sentence in learner.parts.notes:
                    learner.note(f"models.{name}: {sentence}")
            policy_sums = Sums()
            changed |= learner.learn(_seen(kept, number), [], step, policy_sums)
            for counted in LEFT_OUT:
                sums.count(counted, learner.metrics[counted])
            sums.take(policy_sums, f"{name}/")
        return changed

    def credit(self, trees: Sequence[TokenTree], step: int) -> object:
        return self.first.credit(trees, step, self._score)

    def _score(self, trees: Sequence[TokenTree], temperature: float) -> None:
        """Let the roles of each policy score the tokens that it sampled, and those of the first all that were given."""
        for number, learner in enumerate(self._all):
            scored = [replace(tree, columns=dict(tree.columns)) for tree in trees]
            for by_policy in scored:  # a role writes in place where the column is there
                for column in _scored(learner):
                    by_policy.columns.pop(column, None)
            learner.score(scored, temperature)
            for tree, by_policy in zip(trees, scored, strict=True):
                for column in _scored(learner):
                    values = by_policy.columns[column]
                    tree.set(column, np.where(tree.model == number, values, getattr(tree, column)))

    @property
    def updates(self) -> int:
        return self.first.updates

    @property
    def device(self) -> torch.device:
        return self.first.device

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        return self.first.sampling(step, params)

    def weights(self) -> WeightSource:
        return self.first.weights()

    def spans(self) -> list[Span]:
        return [span for learner in self._all for span in learner.spans()]

    def utilization(self, times: dict[str, float]) -> dict[str, float]:
        by_policy = [learner.utilization(times) for learner in self._all]
        summed = {name for name in by_policy[0] if name != "perf/peak_tflop_s"}
        return by_policy[0] | {name: sum(one.get(name, 0.0) for one in by_policy) for name in summed}

    def save(self, directory: Path) -> Saved:
        """Write the first policy's state to ``directory`` and that of each other one to the folder of its name."""
        files, state = self.first.save(directory)
        states = {}
        for name, learner in self.policies.items():
            (directory / name).mkdir()
            saved = learner.save(directory / name)
            files |= {f"{name}/{file}": fingerprint for file, fingerprint in saved.files.items()}
            states[name] = saved.state
        return Saved(files, state | {"policies": states})

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self.first.load(directory, state)
        for name, learner in self.policies.items():
            learner.load(directory / name, state["policies"][name])

    def export(self, directory: Path) -> None:
        self.first.export(directory)

    def states(self) -> dict[str, Any]:
        """Return the states of the functions of all policies; see `Learned.states`."""
        of_policies = {_key(name, key): s for name, one in self.policies.items() for key, s in one.states().items()}
        return self.first.states() | of_policies

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `states`."""
        self.first.restore(states)
        for name, one in self.policies.items():
            one.restore({key: states[_key(name, key)] for key in one.parts.stateful})


def _key(policy: str, key: str) -> str:
    return f"models.{policy}.{key}"


def _seen(trees: Sequence[TokenTree], policy: int) -> list[TokenTree]:
    return [seen for tree in trees if (seen := sampled_by(tree, policy)) is not None]


def _scored(learner: Learner) -> list[str]:
    return [column for role in learner.roles for column in role.columns]
