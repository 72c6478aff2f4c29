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
from . import credit, estimators
from .credit import EPS, Credit, rewards_of
from .priors import Values, number_in
from .roles import in_role


class Cumulative:
    """DCPO, smooth standardisation (Yang et al. 2025; the blend is inferred): of ``(i - 1)/i C + 1/i S`` and ``1/i C +
    (i - 1)/i S`` the one of the smaller magnitude, S the advantage `group_norm` in the problem's i-th group and C the
    same with mu and sd over all its responses so far. In the first group both are S.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}  # by problem: groups, responses, mean, sum of squared deviations

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        step = estimators.group_norm(trees).values
        return Credit("leaf", [self._blended(tree, advantage) for tree, advantage in zip(trees, step, strict=True)])

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
        advantages = estimators.group_norm(trees).values
        for name, weight in self._weights.items():
            named = [_rewards_named(tree, name) for tree in trees]
            for total, values in zip(advantages, named, strict=True):
                spread = values.std(ddof=1) if len(values) > 1 else 1.0
                total += weight * credit.centred(values) / (spread + EPS)
            short = self._targets[name] - float(np.concatenate(named).mean())
            self._weights[name] = max(0.0, weight + self._rate * short)
        return Credit("leaf", advantages)

    def state_dict(self) -> dict[str, Any]:
        """Return the multipliers."""
        return {"weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._weights = dict(state["weights"])


class Reweighted:
    """RECAP, weights of objectives: ``sum_k w_k A_k`` over named rewards, A_k `group_norm` of reward k, ``w_k = K s_k /
    sum s`` with ``s_k = max(0, 1 - m_k) + v_k``, m_k the mean and v_k the standard deviation of the reward's means in
    the newest ``window`` batches before: a saturated reward counts less, one that falls short or is unstable more.

    All weights are 1 in the first batch, and where every s is 0. The abstract names the signals alone; the form and
    the default are inferred. A reward that judges no response of a group (all NaN, see `reward.parts`) adds nothing
    there.

    Args:
        names: the named rewards, of about 0 to 1.
        window: batches that count.

    Raises:
        ValueError: there is no name, or the window is below 1.
    """

    def __init__(self, names: Sequence[str], window: int = 8) -> None:
        if isinstance(names, str) or not names or window < 1:
            raise ValueError("`names` must list at least one reward, and `window` be at least 1")
        self._window = window
        self._means: dict[str, list[float]] = {name: [] for name in names}

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        advantages = [np.zeros(tree.num_leaves) for tree in trees]
        weights = self._weights()
        for name, means in self._means.items():
            judged = []
            for tree, total in zip(trees, advantages, strict=True):
                values = _rewards_named(tree, name)
                if np.isnan(values).all():
                    continue
                judged.append(values)
                spread = values.std(ddof=1) if len(values) > 1 else 1.0
                total += weights[name] * credit.centred(values) / (spread + EPS)
            if judged:
                self._means[name] = [*means, float(np.concatenate(judged).mean())][-self._window :]
        return Credit("leaf", advantages)

    def _weights(self) -> dict[str, float]:
        shares = {
            name: max(0.0, 1 - float(np.mean(means))) + float(np.std(means)) if means else 0.0
            for name, means in self._means.items()
        }
        total = sum(shares.values())
        return {name: len(shares) * value / total if total else 1.0 for name, value in shares.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the means of the newest batches."""
        return {"means": self._means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._means = {name: list(means) for name, means in state["means"].items()}


class RoleMeans:
    """Advantages against a role's running mean (prime-rl, `rae`): a token has ``R - m`` of its role, R the role's own
    reward and m the exponential mean of the role's rewards in the batches before, ``m = decay m + (1 - decay) mean R``,
    which begins with the first batch's mean; 0 for tokens of other roles and without a verdict.

    Args:
        rewards: the named reward of each role; a single one for responses of one role.
        decay: of the running mean (default inferred).

    Raises:
        ValueError: there is no role, or decay is outside of [0, 1).
    """

    def __init__(self, rewards: Mapping[str, str], decay: float = 0.95) -> None:
        if not rewards or not 0 <= decay < 1:
            raise ValueError("`rewards` must name the reward of at least one role, and `decay` be in [0, 1)")
        self._rewards, self._decay = dict(rewards), decay
        self._mean: dict[str, float] = {}

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        credits = [np.zeros(len(tree.path_tokens)) for tree in trees]
        for role, name in self._rewards.items():
            played = [(tree, total) for tree, total in zip(trees, credits, strict=True) if role in self._roles(tree)]
            judged = [reward for tree, _ in played for reward in _rewards_named(tree, name) if not math.isnan(reward)]
            if not judged:
                continue
            new = float(sum(judged) / len(judged))
            mean = self._mean.get(role, new)
            for tree, total in played:
                centred_reward = np.nan_to_num(_rewards_named(tree, name) - mean)
                of_role = in_role(tree, self._roles(tree).index(role))[tree.path_tokens]
                total += np.where(of_role, np.repeat(centred_reward, tree.response_length), 0.0)
            self._mean[role] = self._decay * mean + (1 - self._decay) * new
        return Credit("path", credits)

    def _roles(self, tree: TokenTree) -> list[str]:
        return tree.meta.get("roles") or [next(iter(self._rewards))]

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"mean": self._mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._mean = dict(state["mean"])


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
        advantages = []
        for tree in trees:
            rewards = rewards_of(tree)
            prior = self._prior(tree, step)
            off = 0.0 if prior is None else prior - rewards.mean()
            error = rewards.var(ddof=1) / len(rewards) if len(rewards) > 1 else 0.0
            advantages.append(credit.centred(rewards) - (off * error / (error + off**2) if off else 0.0))
            self._values.add(*_problem(tree), float(rewards.mean()), step)
        return Credit("leaf", advantages)

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


def _rewards_named(tree: TokenTree, name: str) -> Array:  # [L] float64
    """Return a named reward of each response.

    Raises:
        UserError: the verifier gave no reward of this name.
    """
    if name not in tree.rewards:
        raise UserError(f"The verifier named no reward '{name}'; it named {', '.join(sorted(tree.rewards))}.")
    return tree.rewards[name].astype(np.float64)


def _problem(tree: TokenTree) -> tuple[str, str]:
    """Return the id and the text of a tree's problem."""
    return str(tree.meta.get("prompt_id")), str(tree.meta.get("prompt_text"))
