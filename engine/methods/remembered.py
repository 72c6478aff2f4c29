"""Credit that remembers earlier steps: classes whose state is in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.context import NotReadyError
from . import credit
from .credit import EPS, Credit, rewards_of
from .priors import Values, number_in


class Cumulative:
    """DCPO, smooth standardisation (Yang et al. 2025; the blend is inferred): of ``(i - 1)/i C + 1/i S`` and ``1/i C +
    (i - 1)/i S`` the one of the smaller magnitude, S the advantage `group_norm` in the problem's i-th group and C the
    same with mu and sd over all its responses so far. In the first group both are S.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}  # by problem: groups, responses, mean, sum of squared deviations

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        step = credit.group_norm(trees).values
        return Credit("leaf", [self._blended(tree, own) for tree, own in zip(trees, step, strict=True)])

    def _blended(self, tree: TokenTree, step: Array) -> Array:  # [L]
        rewards, problem = rewards_of(tree), str(tree.meta.get("prompt_id"))
        i, count, mean, squares = self._seen.get(problem, (0.0, 0.0, 0.0, 0.0))
        for reward in rewards.tolist():  # Welford's update
            count, off = count + 1, reward - mean
            mean += off / count
            squares += off * (reward - mean)
        i += 1
        self._seen[problem] = [i, count, mean, squares]
        if i == 1:
            return step
        spread = math.sqrt(max(squares, 0.0) / (count - 1))
        whole = (rewards - mean) / (spread + EPS) if squares > 0 else np.zeros(len(rewards))
        first, second = ((i - 1) * whole + step) / i, (whole + (i - 1) * step) / i
        return np.where(np.abs(first) < np.abs(second), first, second)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of each problem's rewards."""
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._seen = {problem: list(moments) for problem, moments in state["seen"].items()}


class Constrained:
    """Constraints by dual ascent (as in FGRPO; the form is inferred): ``A + sum_k l_k A_k``, A `group_norm` of the
    reward and A_k of a named reward; after each batch ``l_k = max(0, l_k + rate (target_k - mean of the reward k))``.

    Args:
        targets: the least mean of each named reward.
        rate: of the multipliers, which begin at 0 (default inferred).

    Raises:
        ValueError: there is no target.
    """

    def __init__(self, targets: Mapping[str, float], rate: float = 0.1) -> None:
        if not targets:
            raise ValueError("`targets` must name at least one reward")
        self._targets, self._rate = dict(targets), rate
        self._weights = dict.fromkeys(self._targets, 0.0)

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        found = credit.group_norm(trees).values
        for name, weight in self._weights.items():
            if missing := [tree for tree in trees if name not in tree.rewards]:
                raise UserError(
                    f"The verifier named no reward '{name}'; it named {', '.join(sorted(missing[0].rewards))}."
                )
            named = [tree.rewards[name].astype(np.float64) for tree in trees]
            for total, values in zip(found, named, strict=True):
                spread = values.std(ddof=1) if len(values) > 1 else 1.0
                total += weight * credit.centred(values) / (spread + EPS)
            short = self._targets[name] - float(np.concatenate(named).mean())
            self._weights[name] = max(0.0, weight + self._rate * short)
        return Credit("leaf", found)

    def state_dict(self) -> dict[str, Any]:
        """Return the multipliers."""
        return {"weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._weights = dict(state["weights"])


class PriorFusion:
    """V_0.5 (arXiv 2603.10848): ``R - b``, ``b = w V + (1 - w) mu`` with ``w = e / (e + (V - mu)^2)`` and ``e = s^2 /
    n``: a predicted mean reward V counts as far as it agrees with the mean of the n responses, whose variance is s^2;
    without a prediction b = mu (the form is inferred).

    Args:
        column: of the problem's row, with V. None: V is the mean reward of similar problems in earlier steps, see
            `engine/methods/priors.py`.
    """

    def __init__(self, column: str | None = None) -> None:
        self._column, self._values = column, Values()

    def __call__(self, trees: Sequence[TokenTree], step: int) -> Credit:
        found = []
        for tree in trees:
            rewards = rewards_of(tree)
            prior = self._prior(tree, step)
            off = 0.0 if prior is None else prior - rewards.mean()
            error = rewards.var(ddof=1) / len(rewards) if len(rewards) > 1 else 0.0
            found.append(credit.centred(rewards) - (off * error / (error + off**2) if off else 0.0))
            self._values.add(*_problem(tree), float(rewards.mean()), step)
        return Credit("leaf", found)

    def _prior(self, tree: TokenTree, step: int) -> float | None:
        if self._column is None:
            return self._values.predict(_problem(tree)[1], step)
        if "entry" not in tree.meta:
            raise NotReadyError("A made-up group has no entry.")
        return number_in(tree.meta["entry"], self._column, "algorithm.advantage = 'prior_fusion'")

    def state_dict(self) -> dict[str, Any]:
        """Return the rewards of earlier groups."""
        return self._values.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values.load_state_dict(state)


def _problem(tree: TokenTree) -> tuple[str, str]:
    """Return the id and the text of a tree's problem."""
    return str(tree.meta.get("prompt_id")), str(tree.meta.get("prompt_text"))
