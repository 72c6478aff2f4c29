"""Shaping: from the named rewards that a verifier returned to the one reward that credit reads.

Each function takes a tree, whose ``rewards`` hold the verifier's named rewards (``reward`` among them), and returns the
new ``reward`` ``[L]``. Several are applied one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..chat.marks import response_text
from ..data.columns import Array
from ..data.segment import Origin
from ..data.statistics import reads
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.calling import call
from ..parts.shares import length_in, share_in
from .credit import COLUMN
from .roles import learnability, step_verdicts

Shaping = Callable[[TokenTree], Array]
GIVEN = "verifier"
"""The reward as it was before any shaping."""
ANSWER = r"(?i)answer[^\n:]{0,20}:\s*([^\n]+)"
"""The default pattern of an answer in a response's text."""


def shape_rewards(shapings: Sequence[tuple[str, Shaping]], tree: TokenTree) -> None:
    """Replace ``tree.rewards["reward"]`` by the shaped reward; the unshaped one stays in ``rewards["verifier"]``.

    Args:
        shapings: each with its key in the configuration, for error messages; applied in this order.

    Raises:
        UserError: a shaping does not return a finite number for every response.
    """
    if shapings:
        tree.rewards[GIVEN] = tree.rewards["reward"]
    for what, shaping in shapings:
        shaped = call(what, np.asarray, shaping(tree), np.float32)
        if shaped.shape != (tree.num_leaves,) or not np.isfinite(shaped).all():
            raise UserError(f"{what} must return a finite number for each of {tree.num_leaves} responses.")
        tree.rewards["reward"] = shaped


def weighted(tree: TokenTree, *, weights: Mapping[str, float]) -> Array:  # [L]
    """The reward is the weighted sum of the verifier's named rewards."""
    return sum((w * _named(tree, name) for name, w in weights.items()), np.zeros(tree.num_leaves))


def gated(tree: TokenTree, *, gate: str) -> Array:  # [L]
    """The reward counts only where the verifier's reward named ``gate`` is positive, and is 0 elsewhere."""
    return np.where(_named(tree, gate) > 0, tree.rewards["reward"], 0.0)


def overlong(tree: TokenTree, *, longest: int, buffer: int | None = None) -> Array:  # [L]
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): the reward falls linearly by up to 1 over the last
    ``buffer`` tokens before a response has ``longest`` tokens; longer ones lose 1.

    Args:
        longest: in a run by default `rollout.max_new_tokens`.
        buffer: by default a fifth of ``longest``, as the paper's 4096 of 20480.
    """
    buffer = max(longest // 5, 1) if buffer is None else buffer
    return tree.rewards["reward"] - np.clip((tree.response_length - (longest - buffer)) / buffer, 0.0, 1.0)


def cosine_length(
    tree: TokenTree,
    *,
    longest: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> Array:  # [L]
    """Cosine length reward (Yeo et al. 2025, arXiv 2502.03373, appendix C.1): from the first of two values at length 0
    along half a cosine to the second at ``longest``; two values for rewards of at least 1, two for all others.

    Args:
        longest: in a run by default `rollout.max_new_tokens`.
        right, wrong: defaults of TRL's `get_cosine_scaled_reward`.
    """
    share = (1 + np.cos(np.pi * np.minimum(tree.response_length / longest, 1.0))) / 2
    first, last = np.where(tree.rewards["reward"][:, None] >= 1, right, wrong).T
    return last + (first - last) * share


def repetition(tree: TokenTree, *, size: int = 3, most: float = 1.0) -> Array:  # [L]
    """Repetition penalty (Yeo et al. 2025, arXiv 2502.03373, appendix C.2; also MiroMind-M1): the reward falls by
    ``most * (1 - different n-grams / n-grams)`` of ``size`` tokens (token ids instead of words are inferred)."""
    rewards = tree.rewards["reward"].astype(np.float64)
    for leaf, ids in enumerate(np.split(tree.token_id[tree.path_tokens], np.cumsum(tree.response_length)[:-1])):
        if len(ids) >= size:
            grams = np.lib.stride_tricks.sliding_window_view(ids, size)
            rewards[leaf] -= most * (1 - len(np.unique(grams, axis=0)) / len(grams))
    return rewards


def concise(tree: TokenTree, *, longest: int, share: float = 1.0) -> Array:  # [L]
    """ConciseR, L-GRPO: where every response of the group has a reward of at least 1, it gains
    ``share * (1 - length / longest)`` (the form is inferred).

    Args:
        longest: in a run by default `rollout.max_new_tokens`.
    """
    rewards = tree.rewards["reward"]
    return rewards + share * (1 - tree.response_length / longest) * bool((rewards >= 1).all())


def difficulty_length(tree: TokenTree, *, longest: int, share: float = 0.5) -> Array:  # [L]
    """Length penalty by difficulty (as in Apriel-Reasoner; the form and ``share`` are inferred): the reward falls by
    ``share * p * length / longest``, p the group's mean reward within [0, 1].

    Args:
        longest: in a run by default `rollout.max_new_tokens`.
    """
    rewards = tree.rewards["reward"].astype(np.float64)
    return rewards - share * np.clip(rewards.mean(), 0, 1) * tree.response_length / longest


def noise_backward(tree: TokenTree, *, false_positives: float, false_negatives: float) -> Array:  # [L]
    """Noisy verifiers, backward correction (Cai et al. 2025; inferred): ``(R - rho0) / (1 - rho0 - rho1)``, the rates
    at which the verifier accepts wrong answers and rejects right ones."""
    return (tree.rewards["reward"] - false_positives) / (1 - false_positives - false_negatives)


def serial_exits(tree: TokenTree) -> Array:  # [L]
    """S-GRPO (Dai et al. 2025, arXiv 2505.07686): the k-th right response in the order of their exits from the thought
    has the reward ``2 ** (1 - k)``, others 0 (inferred: the whole response counts as the last exit)."""
    injected = (tree.origin == Origin.INJECTED)[tree.path_tokens]
    cuts = np.cumsum(tree.response_length)[:-1]
    exits = np.array(
        [int(of_leaf.argmax()) if of_leaf.any() else len(of_leaf) + 1 for of_leaf in np.split(injected, cuts)]
    )
    right = tree.rewards["reward"] >= 1
    order = np.argsort(exits, kind="stable")
    place = np.empty(tree.num_leaves)
    place[order] = np.cumsum(right[order])
    return np.where(right, 2.0 ** (1 - place), 0.0)


def clip_steps(tree: TokenTree, *, threshold: float) -> Array:  # [L]
    """Clip of process rewards (Gao et al. 2024; the form is inferred): a step's reward becomes
    ``min(r - threshold, 0)``, so that more steps earn nothing; the response's reward stays."""
    tree.set("token_reward", np.minimum(tree.token_reward - threshold, 0))
    return tree.rewards["reward"]


def step_differences(tree: TokenTree) -> Array:  # [L]
    """Delta of process rewards (Gao et al. 2024): a step's reward becomes ``r_k - r_k+1``, the last step's stays, so
    that their sum is the first step's; the response's reward stays."""
    rewards = tree.token_reward.copy()
    for steps in np.split(np.arange(len(rewards)), np.cumsum(tree.response_length)[:-1]):
        places = steps[~np.isnan(rewards[steps])]
        rewards[places[:-1]] -= rewards[places[1:]]
    tree.set("token_reward", rewards)
    return tree.rewards["reward"]


def length_budget(tree: TokenTree, *, budget: float, share: float = 0.5) -> Array:  # [L]
    """Train Long, Think Short: the reward gains ``share * max(0, 1 - max(0, length - budget) / budget)``, so that only
    responses over the budget lose, all of it at twice the budget; the budget may fall with the step, as
    ``budget = { schedule = [[1, 4096], [500, 1024]] }`` (the form and ``share`` are inferred)."""
    over = np.maximum(tree.response_length - budget, 0) / budget
    return tree.rewards["reward"] + share * np.maximum(1 - over, 0)


def length_peak(tree: TokenTree, *, longest: int, share: float = 1.0, peak: float = 0.5) -> Array:  # [L]
    """Format and length as surrogate signals: a reward of at least 1, such as for the form, gains ``share`` times
    ``1 - (1 - x / peak)**2`` up to ``x = peak`` and ``1 - 2 ((x - peak) / (1 - peak))**2`` beyond, x = length / longest
    within [0, 1] (the form and the defaults are inferred).

    Args:
        longest: in a run by default `rollout.max_new_tokens`.
        share: may begin at 0, as ``share = { schedule = [[50, 0.0], [100, 1.0]] }``.
    """
    x, rewards = np.minimum(tree.response_length / longest, 1.0), tree.rewards["reward"].astype(np.float64)
    gain = np.where(x <= peak, 1 - (1 - x / peak) ** 2, 1 - 2 * ((x - peak) / (1 - peak)) ** 2)
    return rewards + share * gain * (rewards >= 1)


def ensemble(tree: TokenTree, *, names: Sequence[str], how: str = "worst", penalty: float = 1.0) -> Array:  # [L]
    """Ensembles of reward models (Coste et al. 2023): the ``worst`` of several named rewards, or with "uncertain" their
    mean less ``penalty`` times their variance (the population's; ``penalty`` is inferred)."""
    if how not in ("worst", "uncertain") or not names:
        raise UserError("reward.shaping 'ensemble' needs names, and how of worst or uncertain.")
    named = np.stack([_named(tree, name) for name in names]).astype(np.float64)
    return named.min(0) if how == "worst" else named.mean(0) - penalty * named.var(0)


def flawed(tree: TokenTree, *, flaw: str = "flaw", penalty: float = 1.0) -> Array:  # [L]
    """FAPO: a right response, one of a reward of at least 1, loses ``penalty`` where the reward named ``flaw`` is
    positive (``penalty`` is inferred, for wrong ones of -1 or 0)."""
    rewards = tree.rewards["reward"].astype(np.float64)
    return rewards - penalty * ((rewards >= 1) & (_named(tree, flaw) > 0))


def tries(tree: TokenTree, *, decay: float = 0.5) -> Array:  # [L]
    """Decay over tries (as in UFO; the form and ``decay`` are inferred): the reward times ``decay ** k``, k the number
    of given texts in the response, each of which asked for another try."""
    injected = (tree.origin == Origin.INJECTED)[tree.path_tokens]
    parts = np.split(injected, np.cumsum(tree.response_length)[:-1])
    return tree.rewards["reward"] * decay ** np.array(
        [(np.diff(part.astype(int), prepend=0) > 0).sum() for part in parts]
    )


def foresight(tree: TokenTree, tokenizer: Any, *, lengths: bool = False) -> Array:  # [L]
    """MASA: the reward of a response that begins with a question about the others, as the program `foresee` makes them,
    is ``1 - |q - p|``, q the first number that it answers, within [0, 1], and p the share of the others with a reward
    of at least 1; 0 without such a number. The others keep theirs (the form is inferred).

    Args:
        lengths: the reward is the mean of that and ``max(0, 1 - |l - m| / m)``, l the second number, and m the mean
            length of the others with a reward of at least 1; 0 without l. Where none is right, the share counts alone.
    """
    rewards = tree.rewards["reward"].astype(np.float64)
    begins = begins_given(tree)
    if begins.all():
        return np.zeros(tree.num_leaves)
    right = ~begins & (rewards >= 1)
    rate, length = float(right[~begins].mean()), float(tree.response_length[right].mean()) if right.any() else 0.0
    for leaf in np.flatnonzero(begins):
        rows = tree.response_rows(int(leaf))
        answer = response_text(tokenizer, tree.token_id[rows[tree.origin[rows] == Origin.SAMPLED]])
        guess, foreseen = share_in(answer), length_in(answer)
        rewards[leaf] = 0.0 if guess is None else 1 - abs(guess - rate)
        if lengths and length:
            rewards[leaf] += 0.0 if foreseen is None else max(0.0, 1 - abs(foreseen - length) / length)
            rewards[leaf] /= 2
    return rewards


def begins_given(tree: TokenTree) -> Array:  # [L] bool
    """Tell of each response if its first token was given."""
    firsts = [tree.response_rows(leaf)[:1] for leaf in range(tree.num_leaves)]
    return np.array([bool((tree.origin[first] == Origin.INJECTED).any()) for first in firsts])


@reads("policy_mean_logprob")
def self_certainty(tree: TokenTree) -> Array:  # [L]
    """Self-certainty: the reward is the mean over a response's tokens in the loss of ``-mean_v log p_v``, the KL
    divergence of the uniform distribution to the policy's but for ``log V``, which no baseline sees; 0 without tokens.
    """
    rewards = np.zeros(tree.num_leaves)
    for leaf in range(tree.num_leaves):
        rows = tree.response_rows(leaf)
        if len(rows := rows[tree.loss_mask[rows]]):
            rewards[leaf] = -tree.policy_mean_logprob[rows].astype(np.float64).mean()
    return rewards


class Exploration:
    """Outcome-based exploration: the reward gains ``bonus / sqrt(N)``, N the number of times that the response's answer
    was given to its problem so far in the run, and loses ``repeated`` for each other response of the group that has the
    same answer. A response without an answer neither gains nor loses (the forms and defaults are inferred).

    Args:
        bonus, repeated: see above.
        pattern: a regular expression; the first group of its last match is the answer.

    Raises:
        ValueError: the pattern is none, or has no group.
    """

    def __init__(self, bonus: float = 0.1, repeated: float = 0.0, pattern: str = ANSWER) -> None:
        self._bonus, self._repeated = bonus, repeated
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"its option `pattern` is no regular expression: {error}") from error
        if not self._pattern.groups:
            raise ValueError("its option `pattern` needs a group, the answer")
        self._seen: dict[str, dict[str, int]] = {}  # by problem: number of times of each answer

    def __call__(self, tree: TokenTree, texts: Sequence[str]) -> Array:
        seen = self._seen.setdefault(str(tree.meta.get("prompt_id")), {})
        answers = [last_match(self._pattern, text) for text in texts]
        for answer in answers:
            if answer is not None:
                seen[answer] = seen.get(answer, 0) + 1
        gains = [
            0.0 if a is None else self._bonus / math.sqrt(seen[a]) - self._repeated * (answers.count(a) - 1)
            for a in answers
        ]
        return tree.rewards["reward"] + np.array(gains)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of each problem's answers."""
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._seen = {problem: dict(counts) for problem, counts in state["seen"].items()}


def last_match(pattern: str | re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match of ``pattern``, without blanks around it; None without a match."""
    matches = list(re.finditer(pattern, text))
    return matches[-1][1].strip() if matches else None


def _named(tree: TokenTree, name: str) -> Array:
    if name not in tree.rewards or np.isnan(tree.rewards[name]).any():
        raise UserError(
            f"The verifier did not give every response a reward '{name}'; it named {', '.join(sorted(tree.rewards))}."
        )
    return tree.rewards[name]


SHAPINGS: dict[str, Callable[..., Any]] = {
    "weighted": weighted,
    "gated": gated,
    "overlong": overlong,
    "cosine_length": cosine_length,
    "repetition": repetition,
    "concise": concise,
    "difficulty_length": difficulty_length,
    "noise_backward": noise_backward,
    "serial_exits": serial_exits,
    "clip_steps": clip_steps,
    "step_differences": step_differences,
    "step_verdicts": step_verdicts,
    "learnability": learnability,
    "length_budget": length_budget,
    "length_peak": length_peak,
    "ensemble": ensemble,
    "flawed": flawed,
    "tries": tries,
    "foresight": foresight,
    "self_certainty": self_certainty,
    "exploration": Exploration,
}


def weigh_credit(tree: TokenTree, weight: float) -> None:
    """Multiply the credit of a tree, such as a replayed group's, by ``weight``."""
    for name in COLUMN.values():
        if weight != 1 and name in tree.columns:
            tree.set(name, weight * tree.columns[name])
