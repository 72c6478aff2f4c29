"""Credit and shaping for trees whose tokens are of several roles, such as an answer and a verdict on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..chat.marks import response_text
from ..chat.reasoning import without_reasoning
from ..data.characters import token_that_completes
from ..data.columns import Array
from ..data.policies import in_role, role_texts
from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from ..errors import UserError
from .credit import EPS, Credit, centred


def by_role(trees: Sequence[TokenTree], *, rewards: Mapping[str, str]) -> Credit:
    """Baselines by role (UnityMAS-O, RL Tango; the scope is inferred): ``(R - mu) / (sd + 1e-6)`` over the responses of
    one role in a group, R the role's own reward; plus the sum of `token_reward` at this and later tokens of the role.

    A response of a role is counted once, also where several leaves continue it; its R is their mean. Tokens of a role
    without a reward, and a role's only response, have no credit from R.

    Args:
        rewards: by the name of a role its named reward, with a minus sign before it for the opposite.

    Raises:
        UserError: no verifier gave a reward of a name.
    """
    return Credit("path", [_of_roles(tree, rewards) for tree in trees])


def _of_roles(tree: TokenTree, rewards: Mapping[str, str]) -> Array:  # [P]
    cuts = np.cumsum(tree.response_length)[:-1]
    gained = np.nan_to_num(tree.token_reward.astype(np.float64))
    credits = np.zeros(len(gained))
    for role, signed_name in rewards.items():
        name, sign = signed_name.removeprefix("-"), -1.0 if signed_name.startswith("-") else 1.0
        if name not in tree.rewards:
            raise UserError(f"The verifier named no reward '{name}'; it named {', '.join(sorted(tree.rewards))}.")
        roles = tree.meta.get("roles") or [next(iter(rewards))]
        if role not in roles:
            continue
        marked = in_role(tree, roles.index(role))[tree.path_tokens]
        last = _last_rows(tree, roles.index(role))
        credit = _normalised(last, sign * tree.rewards[name].astype(np.float64))
        later = [of_leaf[::-1].cumsum()[::-1] for of_leaf in np.split(np.where(marked, gained, 0.0), cuts)]
        credits += np.where(marked, np.repeat(credit, tree.response_length) + np.concatenate(later), 0.0)
    return credits


def _last_rows(tree: TokenTree, role: int) -> Array:  # [L] int64
    """Return the row of each leaf's last token in a role, which is that of the role's response; -1 without one."""
    rows = np.where(in_role(tree, role)[tree.path_tokens], tree.path_tokens, -1)
    return np.array(
        [of_leaf.max(initial=-1) for of_leaf in np.split(rows, np.cumsum(tree.response_length)[:-1])], np.int64
    )


def _normalised(response: Array, rewards: Array) -> Array:  # [L] int64, [L] -> [L]
    """Return the credit of each leaf's response, whose leaves share a number in ``response`` (-1: none)."""
    judged, credit = (response >= 0) & ~np.isnan(rewards), np.zeros(len(rewards))
    if not judged.any():
        return credit
    _, place, count = np.unique(response[judged], return_inverse=True, return_counts=True)
    mean = np.bincount(place, rewards[judged]) / count
    if len(mean) > 1:
        credit[judged] = (centred(mean) / (mean.std(ddof=1) + EPS))[place]
    return credit


def step_verdicts(
    tree: TokenTree,
    *,
    tokenizer: Any,
    weight: float = 1.0,
    of: str = "generator",
    by: str = "verifier",
    separator: str = "\n\n",
    pattern: str = r"(?i)step\s+(\d+)\s*:\s*(correct|incorrect)",
    says_right: str = "correct",
) -> Array:  # [L]
    """RL Tango (arXiv 2505.15034; the form is inferred): the verdicts of one role on the steps of the other's response,
    1 or -1, their mean where several judge it, normalised over the steps of the group as in `process` and multiplied by
    ``weight``, are added to `token_reward` at each step's last token; the response's reward stays. Verdicts are in the
    text after the reasoning; a text that was cut off has none.

    Args:
        of, by: the role whose steps are judged, and the one that judges.
        separator: text between steps.
        pattern: regular expression of a verdict, with groups for the number of the step, from 1 on, and what it says.
        says_right: what a verdict of 1 says, in any case of letters.

    Raises:
        UserError: the tree has no such role.
    """
    roles = tree.meta.get("roles", [])
    if of not in roles or by not in roles:
        raise UserError(f"step_verdicts needs the roles '{of}' and '{by}'; rollout.program has {list(roles) or 'one'}.")

    def decode(ids: Array) -> str:
        return response_text(tokenizer, ids)

    marked = in_role(tree, roles.index(of))
    response = _last_rows(tree, roles.index(of))
    first = np.cumsum(tree.response_length) - tree.response_length
    places: list[Array] = []  # of each leaf: the steps' last tokens, among the values of a path column
    said = dict[int, list[dict[int, float]]]()
    for leaf in range(tree.num_leaves):
        rows = tree.response_rows(leaf)
        of_role = np.flatnonzero(marked[rows])
        ends = _step_ends(tree.token_id[rows[of_role]], separator, decode)
        places.append(first[leaf] + of_role[np.array(ends, np.int64)])
        ended = tree.status[leaf] == LeafStatus.STOP
        text = without_reasoning(role_texts(tree, leaf, decode).get(by, "")) if ended else ""
        verdicts = {int(n): 2.0 * (word.casefold() == says_right) - 1.0 for n, word in re.findall(pattern, text)}
        said.setdefault(int(response[leaf]), []).append(verdicts)
    values: dict[int, Array] = {}
    for key, place in zip(response.tolist(), places, strict=True):
        values[key] = np.array([_mean([v.get(step) for v in said[key]]) for step in range(1, len(place) + 1)])
    every = np.concatenate([steps[~np.isnan(steps)] for steps in values.values()])
    if not len(every):
        return tree.rewards["reward"]
    mean = every[0] if np.ptp(every) == 0 else every.mean()
    spread = every.std(ddof=1) if len(every) > 1 else 0.0
    token_reward = tree.token_reward.copy()
    for key, place in zip(response.tolist(), places, strict=True):
        judged = ~np.isnan(values[key])
        token_reward[place[judged]] = np.nan_to_num(token_reward[place[judged]])
        np.add.at(token_reward, place[judged], weight * (values[key][judged] - mean) / (spread + EPS))
    tree.set("token_reward", token_reward)
    return tree.rewards["reward"]


def learnability(tree: TokenTree, *, of: str = "proposer", by: str = "solver", solved: str = "solved") -> Array:  # [L]
    """Absolute Zero and Search Self-play (the form is inferred): the named reward `learnability` of a proposed problem
    is ``1 - p`` for a success rate p of the answers to it that is neither 0 nor 1, else 0; the response's reward stays.

    A leaf whose problem was never answered has none (NaN), so that `by_role` gives the proposer no credit there.

    Args:
        of, by: the role that proposes, and the one that answers.
        solved: the named reward of an answer, 1 where it is right.

    Raises:
        UserError: the tree has no such role, or no verifier gave a reward of this name.
    """
    roles = tree.meta.get("roles", [])
    if of not in roles or by not in roles:
        raise UserError(f"learnability needs the roles '{of}' and '{by}'; rollout.program has {list(roles) or 'one'}.")
    if solved not in tree.rewards:
        raise UserError(f"The verifier named no reward '{solved}'; it named {', '.join(sorted(tree.rewards))}.")
    learnable, values = np.full(tree.num_leaves, np.nan, np.float32), tree.rewards[solved].astype(np.float64)
    proposed = _last_rows(tree, roles.index(of))
    judged = (_last_rows(tree, roles.index(by)) >= 0) & ~np.isnan(values)
    for problem in np.unique(proposed[judged & (proposed >= 0)]):
        rate = values[judged & (proposed == problem)].mean()
        learnable[proposed == problem] = 1 - rate if 0 < rate < 1 else 0.0
    tree.rewards["learnability"] = learnable
    return tree.rewards["reward"]


def _mean(verdicts: Sequence[float | None]) -> float:
    numbers = [verdict for verdict in verdicts if verdict is not None]
    return sum(numbers) / len(numbers) if numbers else float("nan")


def _step_ends(ids: Array, separator: str, decode: Any) -> list[int]:  # [n] int32
    """Return the index of the token that completes each step of a response."""
    text, ends, at = decode(ids), list[int](), 0
    for step in text.split(separator):
        at += len(step)
        if step.strip():
            ends.append(at)
        at += len(separator)
    return [token_that_completes(ids, end, decode) for end in ends]
