"""Metrics that describe the groups of a step, whatever learns from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ..data.episodes import Episodes, answers
from ..data.segment import LeafStatus
from ..data.stored import Counted
from ..data.tree import TokenTree
from ..prompts.group import Group
from ..record.failures import Failures
from ..record.metrics import Sums
from ..record.progress import Progress


def describe_replay(trees: Sequence[TokenTree], updates: int, sums: Sums) -> None:
    """Record the number of replayed groups and the updates since their tokens were sampled."""
    sums.count("replay/groups", len(trees))
    for tree in trees:
        sums.add_values("replay/lag", updates - tree.policy_version[tree.loss_mask])


def describe_lag(batch: Sequence[Group], steps: int, sums: Sums) -> None:
    """Record the age of a batch after ``steps`` steps, and the share of responses that several policies sampled."""
    for group in batch:
        lag, tree = steps - group.started, Episodes(group.tree).tree
        sums.add("training/off_policy/trajectory_staleness/mean", lag)
        sums.maximum("training/off_policy/trajectory_staleness/max", lag)
        oldest, newest = Counted.of(tree).versions.T
        sums.add_values("training/off_policy/partial_ratio", newest > oldest)


def describe(trees: Sequence[TokenTree], max_new_tokens: int, sums: Sums) -> None:
    """Record lengths, reward spread, what programs counted and the tokens that sharing saved; nothing of a step without
    rollouts."""
    if not trees:
        return
    responses = [Episodes(tree).tree for tree in trees]
    length = np.concatenate([tree.response_length for tree in responses])
    sums.add_values("response_length/mean", length)
    sums.maximum("response_length/max", float(length.max()))
    for tree in responses:  # an agent's limits are its own
        by_status = tree.status == LeafStatus.LENGTH
        cut = by_status if "agent" in tree.meta else tree.response_length >= max_new_tokens
        sums.add_values("response_length/clip_ratio", cut)
    prompts = [tree.leaf_prompt[np.unique(answers(tree))].mean() for tree in trees]
    sums.add_values("prompt_length/mean", np.array(prompts))
    for tree in responses:
        rewards = tree.rewards["reward"]
        if not np.isnan(rewards).any():
            sums.add("reward/group_std", float(rewards.std()))
        for name, number in tree.meta.get("counts", {}).items():
            sums.count(f"rollout/{name}", number)
    for tree, episodes in zip(trees, responses, strict=True):
        if "agent" in tree.meta:
            counts = tree.meta["agent"]
            sums.add("agent/calls", counts["calls"], episodes.num_leaves)
            sums.add("agent/branches", tree.num_leaves, episodes.num_leaves)
            sums.add("agent/shared_ratio", counts["call_tokens"], tree.num_tokens)
            sums.add("agent/tool_s", counts["tool_s"], episodes.num_leaves)
            if (shared := Counted.of(tree).first_difference) is not None:
                sums.add("agent/first_difference", shared)
            if "greedy_calls" in counts:
                sums.count("agent/greedy_calls", counts["greedy_calls"])
            for cause in (name.removeprefix("failed_") for name in counts if name.startswith("failed_")):
                sums.count(f"agent/failed_{cause}", counts[f"failed_{cause}"])
    sums.count("rollout/sampled_tokens", sum(tree.sampled_tokens for tree in trees))
    logical, unique = sum(t.logical_tokens for t in trees), sum(t.num_tokens for t in trees)
    sums.add("tree/token_ratio", float(logical), float(unique))


def describe_verdicts(
    batch: Sequence[Group], failures: Mapping[str, Failures], sums: Sums, console: Progress, *, more: bool = True
) -> None:
    """Record the rewards of a batch, and the failures of sampling and judging.

    Args:
        more: further steps follow.

    Raises:
        RunError: nothing succeeds; see `Failures.record`. So it is where agents have sampled nothing in a first step.
    """
    for group in batch:
        for verdict in group.verdicts:
            if verdict.value is not None:
                sums.add("reward/mean", verdict.value)
            for what, why in (("unparsed", verdict.unparsed), ("skipped", verdict.skipped)):
                sums.count(f"reward/{what}", why is not None)
                if why is not None:
                    sums.count(f"reward/{what}_{why}")
            sums.add("reward/unparsed_ratio", verdict.unparsed is not None)
    reasons = [reason for group in batch for reason in group.unsampled]
    trees = [part.tree for group in batch for part in group.parts]
    silent = more and all("agent" in tree.meta and not tree.sampled_tokens for tree in trees)
    failures["rollout"].record(reasons, sum(group.responses for group in batch), sums, console, from_start=silent)
    verdicts = [verdict for group in batch for verdict in group.verdicts]
    reasons = [verdict.reason for verdict in verdicts if verdict.reason is not None]
    skipped = sum(verdict.skipped is not None for verdict in verdicts)
    failures["reward"].record(reasons, len(verdicts), sums, console, skipped=skipped)


def describe_skipped(skipped: deque[str], told: set[str], sums: Sums, console: Progress) -> None:
    """Count the rows that could not be used, and tell of each the first time.

    Args:
        skipped: sentences about them, which are taken out.
        told: the sentences that were told before; new ones are added.
    """
    while skipped:
        said = skipped.popleft()
        sums.count("data/skipped_rows")
        if said not in told:
            told.add(said)
            console.note(f"A row is skipped (data.on_bad_row). {said}")
