"""Checks of a run of agents: methods that ask more of responses than episodes of agents have are refused at its start.

Credit, shaping, selections, group callbacks and curricula see one response an episode (`engine/data/episodes.py`), and
objectives see its chains as sequences. What follows from where a sampler let responses fork, compares the log-probs of
two responses, or samples under another prompt has no meaning for an agent, which asks what it likes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import UserError
from ...settings import TrainConfig
from ...train.terms import TokenTerm
from .learning import loss_terms

FORKS = {
    "tree_path_mean", "treepo", "treerl", "depth_norm", "branch_mean", "segment_value_diff", "sibling_group",
}  # fmt: skip
"""Advantages that follow from the forks of a tree."""
UNTRAINED = {"remax", "progress_bonus"}
"""Advantages that read responses which no update counts, and which only some programs sample."""
OTHER_PROMPTS = {"hint_ladder", "refine", "critique", "demonstrate"}
"""Group callbacks that give a response or the problem another prompt."""
COMPARED = {"laser", "rover", "regression", "pacs", "ranking"}
"""Losses of the log-probs of whole responses."""


def check_agents(config: TrainConfig) -> None:
    """Check that every method of a run of agents is one of episodes.

    Raises:
        UserError: one is not.
    """
    if config.rollout.program != "agent":
        return
    for key, why, remedy in _refused(config):
        raise UserError(f'{key} {why}, which `rollout.program` = "agent" does not have; {remedy}.')


def _refused(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield for each method that agents do not allow its key and value, what it needs, and what to do."""
    algorithm, loop = config.algorithm, config.loop
    if config.models:
        yield f"`models.{next(iter(config.models))}`", "plays a role of a program", "leave it out"
    advantage = f"`algorithm.advantage` = '{algorithm.advantage}'"
    if algorithm.advantage in FORKS:
        yield advantage, "follows from where a program lets responses fork", "use another, such as group_norm"
    if algorithm.advantage in UNTRAINED:
        yield advantage, "needs responses that a program samples for it alone", "use another, such as group_norm"
    if loop.train_context == "plain":
        yield '`loop.train_context` = "plain"', "needs one prompt for all responses of a group", "leave it out"
    if loop.callback in OTHER_PROMPTS:
        yield (
            f"`loop.callback` = '{loop.callback}'",
            "needs responses to a prompt that it chooses",
            "use another, such as dynamic_sampling, or none",
        )
    for term in algorithm.terms:
        key = f"`algorithm.terms` '{term.name}'"
        if term.pairs is not None and term.pairs != "chosen_and_rejected":
            yield (
                f"{key} with pairs = '{term.pairs}'",
                "compares responses of one sequence each",
                "use pairs of demonstrations, chosen_and_rejected, or another term",
            )
        if term.loss in COMPARED:
            yield f"{key} with loss = '{term.loss}'", "needs responses of one sequence each", "use another term"
    for made, _ in loss_terms(config):
        if isinstance(made, TokenTerm) and made.objective.ratio_level == "segment":
            yield (
                f"The loss term '{made.name}'",
                'has ratios of segments (ratio_level = "segment"), runs of tokens between the forks of a program',
                "set ratio_level to token or sequence",
            )
