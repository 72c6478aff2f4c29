"""``rolltree rollout``: samples some trees and prints them, shared text once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.tree import Tree as RichTree
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.segment import LeafStatus
from ..data.store import write_rollouts
from ..data.tree import TokenTree
from ..fleet.publication import Publication
from ..loop.buffer import Buffer
from ..loop.controller import Controller
from ..loop.replay import write_groups
from ..parts.context import Context
from ..prompts.group import Group
from ..prompts.prompts import held_out
from ..record.metrics import Stopwatch
from ..settings import TrainConfig
from .assembly.checks import check_program, kept_entries
from .assembly.policies import further_policies
from .assembly.sampling import (
    budget,
    make_engine,
    make_run_rewards,
    prepare_model,
    prompts_of,
    rollout_program,
    sampling_parts,
    with_tools,
)
from .console import Console, Terminal
from .printable import printable


def sample_and_show(
    config: TrainConfig,
    count: int,
    out: Path | None,
    record: Path | None = None,
    console: RichConsole | None = None,
) -> None:
    """Sample the first ``count`` training prompts as a run's first step does, judge the responses, print the trees.

    Args:
        out: parquet file to write the trees to.
        record: file to write the groups to, for `Replay`.

    Raises:
        UserError: a part of the configuration names something that does not exist or cannot be used.
    """
    console = console or Terminal(highlight=False)
    model, tokenizer = prepare_model(config)
    groups = _first_groups(config, count, model, tokenizer, Console(console), recorded=record is not None)
    for group in groups:
        console.print(draw(group.tree, tokenizer))
        console.print(describe(group))
        why = [*group.unsampled, *(v.reason or f"skipped, {v.skipped}" for v in group.verdicts if v.value is None)]
        if why:
            console.print(escape(printable(f"{len(why)} of {len(group.texts)} have no reward: {why[0]}.")))
        console.print()
    if out is not None:
        write_rollouts(out, 0, [group.tree for group in groups], [group.texts for group in groups])
        console.print(f"Written to {out}.")
    if record is not None:
        write_groups(record, [(group.prompt, group.parts) for group in groups])
        console.print(f"Recorded in {record}.")


def _first_groups(
    config: TrainConfig,
    count: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    *,
    recorded: bool,
) -> list[Group]:
    """Sample and judge as a run's first step does, but without the group callback, and failures only drop responses."""
    first = {"trainer": {"prompts_per_step": count}, "reward": {"on_failure": "drop"}}
    first["loop"] = {"staleness": 0, "over_sampling": 1.0, "over_sampling_options": {}, "callback": None}
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in first.items()}
    )
    program = rollout_program(config.rollout)
    check_program(config, program)
    engine = make_engine(config, model, tokenizer)
    further_policies(config, engine, tokenizer)
    offered = with_tools(config, program)
    problems = held_out(offered.data, config.evaluation.problems, tokenizer)
    source, _ = prompts_of(offered, tokenizer, problems, kept_entries(config, recorded=recorded))
    context = Context(tokenizer)
    rewards = make_run_rewards(config, program, engine, tokenizer, context)
    parts = sampling_parts(config, program, engine, tokenizer, source, rewards)
    sends = Publication(parts.sampler, console.note)
    controller = Controller(parts, Buffer(budget(config)), sends, Stopwatch(), console)
    with closing(parts.sampler), rewards, controller.running(rewards):
        for note in filter(None, (rewards.note, parts.program.note)):
            console.note(f"{note}.")
        return controller.next_batch()


def describe(group: Group) -> str:
    """Return a line with the mean reward and how many tokens the tree saves."""
    tree, values = group.tree, [verdict.value for verdict in group.verdicts if verdict.value is not None]
    calls = f"{group.responses} episodes of {tree.meta['agent']['calls']} calls, " if "agent" in tree.meta else ""
    return (
        f"reward {np.mean(values) if values else np.nan:.2f}, {calls}{tree.num_leaves} leaves, {tree.num_tokens} "
        f"unique tokens for {tree.logical_tokens} ({tree.logical_tokens / tree.num_tokens:.2f}x)"
    )


def draw(tree: TokenTree, tokenizer: PreTrainedTokenizerBase) -> RichTree:
    """Convert to a tree of rich: one branch for each node, leaves with their reward and status."""

    rows = {picture.first_id: picture.rows for picture in tree.pictures}

    def spelled(ids: list[int]) -> str:
        begin = next((i for i, token in enumerate(ids) if token in rows), None)
        if begin is None:
            return str(tokenizer.decode(ids))
        rest = ids[begin + rows[ids[begin]] :]
        return f"{tokenizer.decode(ids[:begin])}[picture of {rows[ids[begin]]} tokens]{spelled(rest)}"

    def text(node: int) -> str:
        ids = tree.token_id[tree.start[node] : tree.start[node] + tree.length[node]]
        return escape(printable(spelled(ids.tolist()))).rstrip("\n")

    ends: dict[int, list[int]] = {}
    for leaf, node in enumerate(tree.leaf_node.tolist()):
        ends.setdefault(node, []).append(leaf)
    drawn: list[RichTree] = []
    for node in range(tree.num_nodes):
        label = f"[bold]{text(node)}[/bold]" if node == 0 else text(node)
        for leaf in ends.get(node, []):
            reward = float(tree.rewards["reward"][leaf])
            colour = "green" if reward >= 1 else "red"
            label += f"  [{colour}]{reward:g}[/{colour}] [dim]{LeafStatus(int(tree.status[leaf])).name.lower()}[/dim]"
        drawn.append(RichTree(label) if node == 0 else drawn[tree.parent[node]].add(label))
    return drawn[0]
