"""Group callbacks decide what to do with a group after its responses are judged and before it is trained on.

A group callback is a function of the group's tree, whose ``rewards["reward"]`` has a value per leaf (NaN: no verdict)
and whose ``meta`` has ``prompt_id``, ``task``, ``prompt_text`` and ``attempt`` (requests made for it before this one).
During the call it has ``problem`` (the problem's text before `data.template`) and ``entry`` (its row) too. It returns
an instance of one of the classes below; None accepts. A class with ``__call__`` may keep state, which ``state_dict``
and ``load_state_dict`` exchange with checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import UserError
from .priors import Values, number_in


@dataclass(frozen=True)
class Accept:
    """Train on the group."""

    leaves: Sequence[int] | None = None
    """Leaves to train on; the others are left out of the group and of its credit. None: all."""


@dataclass(frozen=True)
class Drop:
    """Discard the group; another prompt takes its place. Counted as ``group/dropped_<reason>``."""

    reason: str


@dataclass(frozen=True)
class More:
    """Sample ``n`` further responses to the group's prompt, or to another one, then call the callback again."""

    n: int
    text: str | None = None
    """The other problem, before `data.template`; needs `loop.train_context` = "plain"."""


@dataclass(frozen=True)
class Retry:
    """Discard the group's responses and sample another prompt in its place, such as one with a hint."""

    text: str
    """The problem, before `data.template`."""
    entry: Mapping[str, Any] | None = None
    """The entry passed to the verifier; the group's own if None."""


@dataclass(frozen=True)
class Add:
    """Add given responses to the sampled ones: they count in the group's rewards, and in a policy's loss only where its
    selection says so."""

    responses: Sequence[str]
    rewards: Sequence[float]
    leaves: Sequence[int] | None = None
    """Sampled responses that stay in the group, at least one. None: all."""


Answer = Accept | Drop | More | Retry | Add | None
GroupCallback = Callable[[TokenTree], Answer]


def dynamic_sampling(tree: TokenTree) -> Answer:
    """DAPO (Yu et al. 2025, eq. 11): drop groups whose rewards are all equal, and sample other prompts instead."""
    rewards = tree.rewards["reward"]
    judged = rewards[~np.isnan(rewards)]
    return Drop("equal_rewards") if len(judged) == 0 or np.ptp(judged) == 0 else None


def until_unequal(tree: TokenTree, *, more: int = 4, most: int = 2) -> Answer:
    """Sample ``more`` responses, up to ``most`` times, while all rewards are equal; then drop the group (both defaults
    are inferred)."""
    if dynamic_sampling(tree) is None:
        return None
    return More(more) if tree.meta["attempt"] < most else Drop("equal_rewards")


def screening(tree: TokenTree, *, n: int = 8) -> Answer:
    """SPEED (Zhang et al. 2025, arXiv 2506.09016): the first responses of a group, ``rollout.n``, decide; where these
    are all right or all wrong the group is dropped, else responses up to ``n`` follow to the same prompt, decoded
    together with the first ones of other groups; the engine has the prompt's keys still unless other requests took
    their pages (the default of n is inferred).

    Raises:
        UserError: ``n`` is not above the number of first responses.
    """
    rewards = tree.rewards["reward"]
    if tree.meta["attempt"]:
        return None
    if len(rewards) >= n:
        raise UserError(f"loop.callback = 'screening' needs `n` above rollout.n = {len(rewards)}, and it is {n}.")
    return dynamic_sampling(tree) or More(n - len(rewards))


def prune_majority(tree: TokenTree, *, more: int = 4, ratio: float = 1.0) -> Answer:
    """AERO (Zhang et al. 2026, arXiv 2602.14338), by its abstract: a group of equal rewards gets ``more`` responses
    once; of a mixed group all responses of the smaller side are trained on, and of the larger one at most ``ratio``
    times as many, the first ones (the sizes, and which are kept, are inferred).

    Raises:
        UserError: ``ratio`` is below 1.
    """
    if ratio < 1:
        raise UserError(f"loop.callback = 'prune_majority' needs a `ratio` of at least 1, and it is {ratio:g}.")
    rewards = tree.rewards["reward"]
    right, wrong = np.flatnonzero(rewards >= 1), np.flatnonzero(rewards < 1)  # NaN is in neither
    small = min(len(right), len(wrong))
    if not small:
        return None if tree.meta["attempt"] or not len(right) + len(wrong) else More(more)
    most = max(1, round(ratio * small))
    return Accept(sorted([*right[:most].tolist(), *wrong[:most].tolist()]))


def top_up(tree: TokenTree, *, most: int = 4) -> Answer:
    """DARS (as in Depth-Breadth Synergy in RLVR): sample hard problems more often, so that all have the same sum of
    absolute `group_norm` advantages, which is ``2 n sqrt(p (1 - p))`` for n rewards of 0 and 1: after n responses with
    a pass rate p below 1/2, ``n / (2 sqrt(p (1 - p))) - n`` more.

    Args:
        most: at most this many times n responses altogether (the default is inferred, and so is p = 1 / (2 n) where
            none is right).
    """
    rewards = tree.rewards["reward"]
    judged = rewards[~np.isnan(rewards)]
    n = len(judged)
    if tree.meta["attempt"] > 1 or n == 0:
        return None
    rate = max(float(np.mean(judged >= 1)), 0.5 / n)
    more = round(min(n / (2 * (rate * (1 - rate)) ** 0.5), most * n) - n) if rate < 0.5 else 0
    return More(more) if more > 0 else None


def refine(
    tree: TokenTree, texts: Sequence[str], *, template: str = "{prompt}\nA draft:\n{draft}\nImprove it."
) -> Answer:
    """iGRPO: sample the group again after the problem with the best of its responses, the first of the highest reward,
    and train on the second group alone.

    Args:
        template: the problem with its draft (inferred).

    Raises:
        UserError: the template lacks a place.
    """
    if "{prompt}" not in template or "{draft}" not in template:
        raise UserError("loop.callback = 'refine' needs a `template` with {prompt} and {draft}.")
    rewards = tree.rewards["reward"]
    if tree.meta["attempt"] or np.isnan(rewards).all():
        return None
    draft = texts[int(np.nanargmax(rewards))]
    return Retry(_filled(template, prompt=tree.meta["problem"], draft=draft))


def _filled(template: str, **values: str) -> str:
    """Return ``template`` with each ``{name}`` replaced; what a value itself says in braces stays."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], template)


def critique(
    tree: TokenTree,
    texts: Sequence[str],
    *,
    keep: str = "right",
    failed: bool = False,
    template: str = "{prompt}\nAn attempt, which is wrong:\n{draft}\nFind the mistake and solve the problem.",
) -> Answer:
    """Critique-GRPO: sample as many responses again after the problem with a wrong one of the group, the first of the
    lowest reward, and train on the group with these refinements. Needs `loop.train_context` = "plain": refinements are
    trained under the problem's own prompt.

    Inferred: that the critique says only that the attempt is wrong, one attempt for all refinements, and the words.

    Args:
        keep: "right": the refinements of a reward of at least 1 join the group; "refined": all refinements take its
            place (RLTF-SD).
        failed: only where no response has a reward of at least 1 (Cog-Rethinker).
        template: the problem with the attempt.

    Raises:
        UserError: ``keep`` is neither, or the template lacks a place.
    """
    if keep not in ("right", "refined") or "{prompt}" not in template or "{draft}" not in template:
        raise UserError(
            "loop.callback = 'critique' needs a `keep` of 'right' or 'refined', and a `template` with {prompt} and "
            "{draft}."
        )
    rewards, newest = tree.rewards["reward"], tree.other_prompt > 0
    if tree.meta["attempt"]:
        kept = newest if keep == "refined" else ~newest | (rewards >= 1)
        return Accept(np.flatnonzero(kept).tolist())
    wrong = rewards < 1
    if not wrong.any() or (failed and (rewards >= 1).any()):
        return None
    draft = texts[int(np.nanargmin(rewards))]
    return More(len(rewards), _filled(template, prompt=tree.meta["problem"], draft=draft))


class OnDemand:
    """V_0.5 (arXiv 2603.10848): sample ``more`` responses while the group's mean reward is further than ``errors``
    standard errors from the predicted one; with the advantage `prior_fusion`.

    The squared standard error is ``max(s^2, V (1 - V)) / n``, s^2 the variance of the n rewards and V the prediction;
    so a small group of equal rewards does not seem exact. Before anything can be predicted groups stay as they are. The
    test and all defaults are inferred.

    Args:
        column: of the problem's row, with V. None: V is the mean reward of similar problems in earlier steps, see
            `engine/methods/priors.py`.
        most: largest number of responses.
    """

    def __init__(self, column: str | None = None, more: int = 4, most: int = 16, errors: float = 1.0) -> None:
        self._column, self._more, self._most, self._errors = column, more, most, errors
        self._values = Values()

    def __call__(self, tree: TokenTree, step: int) -> Answer:
        rewards, meta = tree.rewards["reward"].astype(np.float64), tree.meta
        judged = rewards[~np.isnan(rewards)]
        if self._column is not None:
            prior: float | None = number_in(meta["entry"], self._column, "loop.callback = 'on_demand'")
        else:
            prior = self._values.predict(str(meta["prompt_text"]), step)
        if prior is not None and 2 <= len(judged) < self._most:
            error = np.sqrt(max(judged.var(ddof=1), prior * (1 - prior)) / len(judged))
            if abs(judged.mean() - prior) > self._errors * error:
                return More(min(self._more, self._most - len(judged)))
        if self._column is None and len(judged):
            self._values.add(str(meta["prompt_id"]), str(meta["prompt_text"]), float(judged.mean()), step)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the rewards of earlier groups."""
        return self._values.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values.load_state_dict(state)


def demonstrate(
    tree: TokenTree, *, column: str = "solution", failed: bool = True, replace: bool = False, reward: float = 1.0
) -> Answer:
    """Add the problem's solution to its group: always (ViSurf), where no response is right (HPT), or there in place of
    the first response of the lowest reward (AMPO with one teacher).

    Args:
        column: of the problem's row, with the solution; an empty one is not added.
        failed: only where no response has a reward of at least 1.
        replace: one response makes room, if the group has several.
        reward: of the solution.

    Raises:
        UserError: the row lacks the column.
    """
    rewards = tree.rewards["reward"]
    if column not in tree.meta["entry"]:
        raise UserError(
            f"loop.callback = 'demonstrate' reads the column '{column}', which the problem "
            f"'{tree.meta['problem'][:60]}' does not have; add it to the data, or change `column`."
        )
    solution = tree.meta["entry"][column]
    if solution in (None, "") or np.isnan(rewards).all() or (failed and (rewards >= 1).any()):
        return None
    worst = int(np.nan_to_num(rewards, nan=np.inf).argmin())
    kept = [leaf for leaf in range(len(rewards)) if leaf != worst] if replace and len(rewards) > 1 else None
    return Add([str(solution)], [reward], kept)


class HintLadder:
    """Scaf-GRPO: while no response of a group is right, sample as many again after one hint of the problem's row, the
    most abstract first; right ones replace members of the group.

    The smallest hint under which a response is right ends the ladder. If none is, the group stays as it was. Needs
    `loop.train_context` = "plain": hinted responses are trained under the problem's own prompt.

    Args:
        columns: of the problem's row, one for each hint, the most abstract first; an empty one is passed over.
        replace: at most this many members with the lowest rewards are replaced, by as many right responses (the default
            is inferred); "all": the responses under the last hint, right and wrong, replace the whole group (Guide).
        template: the problem with its hint (inferred).
        patience: a problem gets hints after this many of its groups in a row had no right response (the plateau; the
            default is inferred, and so is the count over a problem's own groups).

    Raises:
        ValueError: there is no column, ``replace`` or ``patience`` is out of range, or the template lacks a place.
    """

    def __init__(
        self,
        columns: Sequence[str],
        replace: int | str = 1,
        template: str = "{prompt}\nHint: {hint}",
        patience: int = 0,
    ) -> None:
        if isinstance(columns, str) or not columns:
            raise ValueError("`columns` must be a list of at least one column of the problems' rows")
        if replace != "all" and (isinstance(replace, bool | str) or replace < 1):
            raise ValueError(f"`replace` must be an integer of at least 1, or 'all', got {replace!r}")
        if "{prompt}" not in template or "{hint}" not in template:
            raise ValueError("`template` must contain {prompt} and {hint}")
        if patience < 0:
            raise ValueError(f"`patience` must be at least 0, got {patience}")
        self.columns, self.replace, self.template, self.patience = tuple(columns), replace, template, patience
        self._failed: dict[str, int] = {}  # by problem: groups in a row without a right response

    def hinted(self, problem: str, entry: Mapping[str, Any]) -> list[str]:
        """Return the problem with each of its hints.

        Raises:
            UserError: the row lacks a column.
        """
        if missing := [name for name in self.columns if name not in entry]:
            raise UserError(
                f"loop.callback = 'hint_ladder' reads the column '{missing[0]}', which the problem '{problem[:60]}' "
                "does not have; add it to the data, or change `columns` in loop.callback_options."
            )
        hints = [str(entry[name]) for name in self.columns if entry[name] not in (None, "")]
        return [_filled(self.template, prompt=problem, hint=hint) for hint in hints]

    def __call__(self, tree: TokenTree) -> Answer:
        rewards, meta = tree.rewards["reward"], tree.meta
        right, rung = rewards >= 1, int(meta["attempt"])
        own_prompt = tree.other_prompt == 0
        if rung == 0:
            before = self._failed.pop(meta["prompt_id"], 0)
            if right.any() or np.isnan(rewards).all():
                return None
            self._failed[meta["prompt_id"]] = before + 1
            if before < self.patience:
                return None
        newest = tree.other_prompt == rung
        if rung and (right & newest).any():
            return Accept(self._kept(rewards, own_prompt, newest))
        hinted = self.hinted(meta["problem"], meta["entry"])
        return (
            More(int(own_prompt.sum()), hinted[rung])
            if rung < len(hinted)
            else Accept(np.flatnonzero(own_prompt).tolist())
        )

    def _kept(self, rewards: Array, own_prompt: Array, newest: Array) -> list[int]:
        """Return the leaves of the group with its right hinted responses."""
        if self.replace == "all":
            return np.flatnonzero(newest).tolist()
        right = np.flatnonzero(newest & (rewards >= 1))[: int(self.replace)]
        own_leaves = np.flatnonzero(own_prompt)
        worst = np.argsort(np.nan_to_num(rewards[own_leaves], nan=-np.inf), kind="stable")[: len(right)]
        return sorted([*np.delete(own_leaves, worst).tolist(), *right.tolist()])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of failed groups of each problem."""
        return {"failed": dict(self._failed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._failed = dict(state["failed"])


def every(tree: TokenTree) -> bool:
    """Every group."""
    return True


def unequal(tree: TokenTree) -> bool:
    """Selective sample replay (VL-Rethinker): groups whose responses have different rewards, so that their advantages
    are not all 0; with ``prefer = 1`` for its sampling by ``|A|``."""
    return bool(np.ptp(tree.rewards["reward"]) > 0)


def solved(tree: TokenTree) -> bool:
    """Groups with a right response, one of a reward of at least 1."""
    return bool((tree.rewards["reward"] >= 1).any())


def none(tree: TokenTree) -> bool:
    """No group: those of other runs in `replay.paths` are the only ones (SAPO, the swarm)."""
    return False


KEEPS: dict[str, Callable[..., bool]] = {"every": every, "unequal": unequal, "solved": solved, "none": none}
"""Choices of groups for the replay store."""
GROUP_CALLBACKS: dict[str, Callable[..., Any]] = {
    "dynamic_sampling": dynamic_sampling,
    "until_unequal": until_unequal,
    "top_up": top_up,
    "screening": screening,
    "prune_majority": prune_majority,
    "hint_ladder": HintLadder,
    "refine": refine,
    "critique": critique,
    "on_demand": OnDemand,
    "demonstrate": demonstrate,
}
