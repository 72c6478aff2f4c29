"""Rows about runs of agents: methods that ask more of responses than episodes of agents have.

Credit, shaping, selections, group callbacks and curricula see one response an episode (`engine/data/episodes.py`), and
objectives see its chains as sequences. What follows from where a sampler let responses fork, compares the log-probs of
two responses, or samples under another prompt has no meaning for an agent, which asks what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..algorithm import TermConfig
from ..keys import RunKeys
from .row import Fires, Row, against

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


def _of_agents(
    other: str, has: Callable[[RunKeys], Fires], key: str, reason: str, remedy: str
) -> tuple[Row[RunKeys], ...]:
    return against(
        '`rollout.program` = "agent"',
        lambda run: run.rollout.program == "agent",
        f'{key} {reason}, which `rollout.program` = "agent" does not have',
        remedy,
        {other: has},
    )


def _advantage(names: Collection[str]) -> Callable[[RunKeys], Fires]:
    return lambda run: run.algorithm.advantage in names and {"advantage": run.algorithm.advantage}


def _term(is_refused: Callable[[TermConfig], bool]) -> Callable[[RunKeys], Fires]:
    def fires(run: RunKeys) -> Fires:
        terms = [term for term in run.algorithm.terms if is_refused(term)]
        return bool(terms) and {"name": terms[0].name, "pairs": terms[0].pairs, "loss": terms[0].loss}

    return fires


AGENTS: tuple[Row[RunKeys], ...] = (
    *_of_agents("`models`", lambda run: bool(run.models) and {"name": next(iter(run.models))}, "`models.{name}`",
                "plays a role of a program", "leave it out"),
    *_of_agents(f"`algorithm.advantage` = {', '.join(sorted(FORKS))}", _advantage(FORKS),
                "`algorithm.advantage` = '{advantage}'", "follows from where a program lets responses fork",
                "use another, such as group_norm"),
    *_of_agents(f"`algorithm.advantage` = {', '.join(sorted(UNTRAINED))}", _advantage(UNTRAINED),
                "`algorithm.advantage` = '{advantage}'", "needs responses that a program samples for it alone",
                "use another, such as group_norm"),
    *_of_agents('`loop.train_context` = "plain"', lambda run: run.loop.train_context == "plain",
                '`loop.train_context` = "plain"', "needs one prompt for all responses of a group", "leave it out"),
    *_of_agents(f"`loop.callback` = {', '.join(sorted(OTHER_PROMPTS))}",
                lambda run: run.loop.callback in OTHER_PROMPTS and {"callback": run.loop.callback},
                "`loop.callback` = '{callback}'", "needs responses to a prompt that it chooses",
                "use another, such as dynamic_sampling, or none"),
    *_of_agents("`algorithm.terms.pairs` of responses",
                _term(lambda term: term.pairs is not None and term.pairs != "chosen_and_rejected"),
                "`algorithm.terms` '{name}' with pairs = '{pairs}'", "compares responses of one sequence each",
                "use pairs of demonstrations, chosen_and_rejected, or another term"),
    *_of_agents(f"`algorithm.terms.loss` = {', '.join(sorted(COMPARED))}", _term(lambda term: term.loss in COMPARED),
                "`algorithm.terms` '{name}' with loss = '{loss}'", "needs responses of one sequence each",
                "use another term"),
)  # fmt: skip
