"""Shaping: from the named rewards that a verifier returned to the one reward that credit reads.

Each function takes a tree, whose ``rewards`` hold the verifier's named rewards (``reward`` among them), and returns the
new ``reward`` ``[L]``. Several are applied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..data.columns import Array
from ..data.segment import Origin
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.calling import call
from .roles import step_verdicts

Shaping = Callable[[TokenTree], Array]
GIVEN = "verifier"
"""The reward as it was before any shaping."""


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
        found = call(what, np.asarray, shaping(tree), np.float32)
        if found.shape != (tree.num_leaves,) or not np.isfinite(found).all():
            raise UserError(f"{what} must return a finite number for each of {tree.num_leaves} responses.")
        tree.rewards["reward"] = found


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
    found = tree.rewards["reward"].astype(np.float64)
    for leaf, ids in enumerate(np.split(tree.token_id[tree.path_tokens], np.cumsum(tree.response_length)[:-1])):
        if len(ids) >= size:
            grams = np.lib.stride_tricks.sliding_window_view(ids, size)
            found[leaf] -= most * (1 - len(np.unique(grams, axis=0)) / len(grams))
    return found


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
    given = (tree.origin == Origin.INJECTED)[tree.path_tokens]
    cuts = np.cumsum(tree.response_length)[:-1]
    exits = np.array([int(some.argmax()) if some.any() else len(some) + 1 for some in np.split(given, cuts)])
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
    found = tree.token_reward.copy()
    for steps in np.split(np.arange(len(found)), np.cumsum(tree.response_length)[:-1]):
        places = steps[~np.isnan(found[steps])]
        found[places[:-1]] -= found[places[1:]]
    tree.set("token_reward", found)
    return tree.rewards["reward"]


def _named(tree: TokenTree, name: str) -> Array:
    if name not in tree.rewards or np.isnan(tree.rewards[name]).any():
        raise UserError(
            f"The verifier did not give every response a reward '{name}'; it named {', '.join(sorted(tree.rewards))}."
        )
    return tree.rewards[name]


SHAPINGS: dict[str, Callable[..., Array]] = {
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
}
