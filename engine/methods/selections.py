"""Selections: weights of a tree's leaves ``[L]`` or tokens ``[T]`` in a loss term. Pairings: pairs of its leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..data.characters import tokens_between
from ..data.columns import Array
from ..data.segment import Origin
from ..data.statistics import reads
from ..data.tree import TokenTree
from ..errors import UserError


def sampled(tree: TokenTree) -> Array:  # [T]
    """Select the tokens that the policy sampled and that are in the loss."""
    return tree.loss_mask & (tree.origin == Origin.SAMPLED)


def injected(tree: TokenTree) -> Array:  # [T]
    """Select the tokens that were not sampled but given: hints, a teacher's text, demonstrations."""
    return tree.origin == Origin.INJECTED


def demonstrated(tree: TokenTree, *, of: str | None = None) -> Array:  # [T]
    """Select the tokens of demonstrations, those of the table ``of`` or of all tables, each with the weight that its
    file gives it (`demonstrations.weight_key`); of a pair, the better response."""
    if not _is_demonstration(tree, of):
        return np.zeros(tree.num_tokens)
    weights = np.zeros(tree.num_tokens)
    rows = tree.response_rows(0)  # of a pair, the better one
    weights[rows] = tree.demonstration_weight[rows]
    return weights * injected(tree)


def _is_demonstration(tree: TokenTree, of: str | None) -> bool:
    name = tree.meta.get("demonstrations")
    return name is not None and of in (None, name)


def observed(tree: TokenTree) -> Array:  # [T]
    """Select the tokens of observations, such as an environment's feedback, to learn to foretell them (RLTF-FM)."""
    return tree.origin == Origin.OBSERVATION


def own_prompt(tree: TokenTree) -> Array:  # [L]
    """Select the responses that were sampled under the problem's own prompt."""
    return (tree.other_prompt == 0) & (tree.loss_length > 0)


def other_prompt(tree: TokenTree) -> Array:  # [L]
    """Select the responses that were sampled under another prompt, such as one with a critique, and are trained under
    the problem's own (`loop.train_context`)."""
    return (tree.other_prompt != 0) & (tree.loss_length > 0)


def sampled_and_given(tree: TokenTree) -> Array:  # [T]
    """Select the tokens in the loss and those that were given: with `demonstrate`, the solution is trained on as a
    member of the group (ViSurf). Ratios need ``algorithm.old_logprob = "recompute"``."""
    return tree.loss_mask | injected(tree)


@reads("policy_entropy")
def sampled_and_uncertain(tree: TokenTree, *, share: float = 0.2) -> Array:  # [T]
    """Prefix-RFT: select the tokens in the loss, and the ``share`` of each response's given tokens at which the
    policy's entropy is highest, at least one (the default is inferred). Ratios need
    ``algorithm.old_logprob = "recompute"``."""
    selected, given_tokens = tree.loss_mask.copy(), injected(tree)
    for leaf in range(tree.num_leaves):
        rows = tree.response_rows(leaf)
        if len(rows := rows[given_tokens[rows]]):
            order = np.argsort(-tree.policy_entropy[rows], kind="stable")
            selected[rows[order[: max(1, round(share * len(rows)))]]] = True
    return selected


class Calm:
    """EKSFT: select the given tokens but the ``entropy_share`` at which the policy's entropy is highest and the
    ``kl_share`` at which its KL divergence from the reference is, of all given tokens of the step. Needs a
    ``[roles.reference]``.

    The divergence is exact, over the whole vocabulary. A token is left out with the k-th highest value and above, k the
    share of the tokens rounded down, unless the value is 0: a policy that still is its reference leaves none out for
    its KL. Shares of 0.2, the exact divergence and the union of both are those of the authors' code
    (github.com/MINE-USTC/EKSFT); it ranks the tokens of a micro-batch, and leaves out the token before each of them
    (inferred to be a mistake).

    Args:
        entropy_share, kl_share: in [0, 1).

    Raises:
        ValueError: a share is not in [0, 1).
    """

    reads = ("policy_entropy", "policy_kl")

    def __init__(self, entropy_share: float = 0.2, kl_share: float = 0.2) -> None:
        if not (0 <= entropy_share < 1 and 0 <= kl_share < 1):
            raise ValueError("its options `entropy_share` and `kl_share` must be in [0, 1)")
        self._shares = dict(zip(self.reads, (entropy_share, kl_share), strict=True))
        self._least: dict[str, float] = {}  # value from which on a token of the step is left out, by column

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        """Find the thresholds of the step.

        Raises:
            UserError: a given token was not scored.
        """
        for column, share in self._shares.items():
            parts = [getattr(tree, column)[_given(tree)] for tree in trees]
            values = np.sort(np.concatenate(parts)) if parts else np.zeros(0)
            if np.isnan(values).any():
                raise UserError(
                    f"The selection 'calm' reads the column {column}, which some given token does not have."
                )
            count = int(share * len(values))
            self._least[column] = float(values[-count]) if count else np.inf

    def __call__(self, tree: TokenTree) -> Array:  # [T]
        selected = _given(tree)
        for column, least in self._least.items():
            values = getattr(tree, column)
            selected &= ~((values >= least) & (values > 0))
        return selected


def _given(tree: TokenTree) -> Array:  # [T] bool
    """Return the given tokens of responses."""
    return injected(tree) & (tree.response_leaves > 0)


def between(
    tree: TokenTree,
    tokenizer: Any,
    *,
    begin: str = "<think>",
    end: str = "</think>",
    inside: bool = True,
    given: bool = False,
    least: float = -math.inf,
) -> Array:  # [T]
    """Span losses (GTR, IM-RAG, Cog-Rethinker): select the sampled tokens whose text lies between ``begin`` and
    ``end``, such as thoughts, so that they and the others may be in different terms of the loss.

    A token with some text of each side counts as inside, and so does one that several responses share if it is inside
    in one of them. The two texts themselves are outside. Special tokens count as their text.

    Args:
        begin, end: the texts; several parts of a response may be between them, and the last may lack its end. An empty
            ``begin`` is the beginning of the response, an empty ``end`` its end.
        inside: select the tokens between the texts; false: all others.
        given: select among the given tokens instead of the sampled ones.
        least: only in responses with a reward of at least this.

    Raises:
        UserError: both texts are empty.
    """
    if not begin and not end:
        raise UserError("The selection 'between' needs a text in `begin` or in `end`.")
    chosen, enclosed = np.zeros(tree.num_tokens, bool), np.zeros(tree.num_tokens, bool)
    for leaf in np.flatnonzero(_rewards(tree) >= least):
        rows = tree.response_rows(int(leaf))
        chosen[rows] = True
        for part in tokens_between(tree.token_id[rows], begin, end, tokenizer.decode):
            enclosed[rows[part]] = True
    return chosen & (injected(tree) if given else sampled(tree)) & (enclosed == inside)


def unaided(tree: TokenTree) -> Array:  # [L]
    """HPT: select the responses of groups to which nothing was given, so that a problem with a demonstration is learned
    from that alone."""
    return np.full(tree.num_leaves, not (injected(tree) & (tree.response_leaves > 0)).any())


def rewarded(tree: TokenTree, *, least: float = 1.0) -> Array:  # [L]
    """RAFT, rejection sampling (Dong et al. 2023, arXiv 2304.06767): select responses with a reward of at least
    ``least`` (default inferred, for rewards of 0 and 1)."""
    return _rewards(tree) >= least


def best(tree: TokenTree) -> Array:  # [L]
    """Best of n: select the response of the highest reward, the first if several have it."""
    rewards = _rewards(tree)
    return (np.arange(tree.num_leaves) == rewards.argmax()) & (rewards > -np.inf)


def reward_weighted(tree: TokenTree, *, beta: float = 1.0) -> Array:  # [L]
    """Reward-weighted regression (Peters & Schaal 2007): weigh the n responses of a group by ``n softmax(R / beta)``
    (default of ``beta`` inferred)."""
    rewards = _rewards(tree) / beta
    if np.isinf(rewards).any():
        return np.zeros(tree.num_leaves)
    weights = np.exp(rewards - rewards.max())
    return len(rewards) * weights / weights.sum()


def unlikely(tree: TokenTree, *, below: float = 0.9) -> Array:  # [T]
    """SPO's probability mask (Guo et al. 2025, arXiv 2505.23564): select the sampled tokens that had a probability
    under ``below`` (default inferred), where continuations part."""
    return sampled(tree) & (np.exp(tree.behaviour_logprob) < below)


def random_share(tree: TokenTree, *, share: float = 0.2) -> Array:  # [T]
    """Random tokens (Not All Tokens Learn Alike): select each sampled token with probability ``share``, by its group
    and place alone; the loss is a mean over the selected."""
    rng = np.random.default_rng([int(tree.group[0]), 0x5EED])
    return sampled(tree) & (rng.random(tree.num_tokens) < share)


def most_varied(tree: TokenTree, *, keep: int) -> Array:  # [L]
    """PODS (Xu et al. 2025, arXiv 2504.13818): select the ``keep`` responses of a group whose rewards have the largest
    variance, which are some of the highest and some of the lowest; with the advantage `pods`."""
    return np.isin(np.arange(tree.num_leaves), _most_varied(_rewards(tree), keep))


def _most_varied(rewards: Array, keep: int) -> Array:  # [min(keep, L)] int64
    if np.isinf(rewards).any():
        return np.zeros(0, np.int64)
    order = np.argsort(rewards, kind="stable")
    keep = min(keep, len(order))
    chosen = [np.concatenate([order[:low], order[len(order) - keep + low :]]) for low in range(keep + 1)]
    return max(chosen, key=lambda places: rewards[places].var())


def consistent(tree: TokenTree, *, keep: int) -> Array:  # [L]
    """PROF (Ye et al. 2025, arXiv 2509.03403): select ``keep`` responses of a group, as many right as wrong ones where
    there are enough: the right with the highest and the wrong with the lowest mean process reward (in `token_reward`;
    responses without steps come last, and the balance is inferred)."""
    rewards = _rewards(tree)
    if np.isinf(rewards).any():
        return np.zeros(tree.num_leaves, bool)
    steps = np.split(tree.token_reward.astype(np.float64), np.cumsum(tree.response_length)[:-1])
    mean = np.array([np.nanmean(of_leaf) if (~np.isnan(of_leaf)).any() else np.nan for of_leaf in steps])
    right = rewards >= 1
    score = np.nan_to_num(np.where(right, mean, -mean), nan=-np.inf)
    first, second = (np.flatnonzero(side)[np.argsort(-score[side], kind="stable")] for side in (right, ~right))
    most = keep - min(len(second), keep // 2)
    first = first[:most]
    return np.isin(np.arange(tree.num_leaves), np.concatenate([first, second[: keep - len(first)]]))


def _rewards(tree: TokenTree) -> Array:  # [L] float64
    """Return the rewards of responses; -inf if they were not judged (demonstrations), so that none is selected."""
    if "reward" not in tree.rewards:
        return np.full(tree.num_leaves, -np.inf)
    return tree.rewards["reward"].astype(np.float64)


SELECTIONS: dict[str, Callable[..., Any]] = {
    "sampled": sampled,
    "injected": injected,
    "demonstrated": demonstrated,
    "observed": observed,
    "own_prompt": own_prompt,
    "other_prompt": other_prompt,
    "sampled_and_given": sampled_and_given,
    "sampled_and_uncertain": sampled_and_uncertain,
    "calm": Calm,
    "between": between,
    "unaided": unaided,
    "rewarded": rewarded,
    "best": best,
    "reward_weighted": reward_weighted,
    "unlikely": unlikely,
    "random_share": random_share,
    "most_varied": most_varied,
    "consistent": consistent,
}


def best_and_worst(tree: TokenTree) -> list[tuple[int, int]]:
    """Pair the first response of the highest reward with the first of the lowest; no pair if all rewards are equal."""
    rewards = _rewards(tree)
    if (rewards == rewards[0]).all():
        return []
    return [(int(rewards.argmax()), int(rewards.argmin()))]


def every_unequal(tree: TokenTree, *, gap: float = 0.0) -> Sequence[tuple[int, int]]:
    """Pair every two responses whose rewards differ by more than ``gap``."""
    rewards = _rewards(tree)
    if np.isinf(rewards).any():
        return []
    better, worse = np.nonzero(rewards[:, None] - rewards[None, :] > gap)
    return list(zip(better.tolist(), worse.tolist(), strict=True))


def siblings(tree: TokenTree, *, gap: float = 0.0) -> list[tuple[int, int]]:
    """Pair responses that part at a node whose children differ in their value by more than ``gap``, V the mean reward
    of the responses below a node: the best response below the best child, and the worst one below the worst child. The
    tokens that both share cancel in a preference loss, so it compares the steps after the node (iTool, Optima: trees of
    steps or turns; the choice of responses is inferred).
    """
    rewards, children = _rewards(tree), dict[int, dict[int, list[int]]]()
    if np.isinf(rewards).any():
        return []
    for leaf, node in enumerate(tree.leaf_node.tolist()):
        while (above := int(tree.parent[node])) >= 0:
            children.setdefault(above, {}).setdefault(node, []).append(leaf)
            node = above
    pairs = []
    for _, below in sorted(children.items()):
        values = {child: float(rewards[leaves].mean()) for child, leaves in below.items()}
        best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
        if values[best] - values[worst] > gap:
            better = max(below[best], key=rewards.__getitem__)
            worse = min(below[worst], key=rewards.__getitem__)
            pairs.append((better, worse))
    return pairs


def chosen_and_rejected(tree: TokenTree, *, of: str | None = None) -> list[tuple[int, int]]:
    """Pair the two responses of a demonstration with a worse one (`demonstrations.rejected_key`), in the table ``of``
    (default: in all): a preference loss on a file of pairs, as in offline DPO."""
    return [(0, 1)] if _is_demonstration(tree, of) and tree.num_leaves == 2 else []


PAIRINGS: dict[str, Callable[..., Sequence[tuple[int, int]]]] = {
    "best_and_worst": best_and_worst,
    "every_unequal": every_unequal,
    "siblings": siblings,
    "chosen_and_rejected": chosen_and_rejected,
}
