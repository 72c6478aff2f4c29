"""``rolltree rollout``: sample some trees and print them, shared text once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree as RichTree
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus
from ..data.store import write_rollouts
from ..data.tree import TokenTree
from ..loop import setup
from ..loop.buffer import Responses
from ..loop.failures import unsampled
from ..loop.judging import item
from ..loop.replay import write_groups
from ..loop.sources import PromptSource, held_out
from ..rewards.verdicts import put_rewards
from ..settings import TrainConfig


def sample_and_show(
    config: TrainConfig,
    count: int,
    out: Path | None,
    record: Path | None = None,
    console: Console | None = None,
) -> None:
    """Sample ``count`` training prompts with the configured program, judge the responses, print the trees.

    Args:
        out: a parquet file to write.
        record: a file of groups to write, for `Replay`.
    """
    console = console or Console(highlight=False)
    model, tokenizer = setup.prepare_model(config)
    engine = setup.make_engine(config, model, tokenizer)
    source = PromptSource(config.data, tokenizer, config.seed, held_out(config, tokenizer))
    prompts = source.next(count)
    program = setup.rollout_program(config.rollout)
    seeds = [int(s) for s in np.random.SeedSequence([config.seed]).generate_state(count)]
    trees = engine.generate(
        [p.token_ids for p in prompts],
        setup.sampling_params(config.rollout),
        program,
        seeds=seeds,
        contexts=[p.context for p in prompts],
    )
    recorded = []
    texts, decode = [], partial(tokenizer.decode, skip_special_tokens=True)
    with setup.rewards(config, engine, tokenizer) as pool:
        for tree, prompt in zip(trees, prompts, strict=True):
            leaves = [decode(s.response) for s in tree.flatten()]
            failed = unsampled(tree)
            judged = [leaf for leaf in range(len(leaves)) if leaf not in failed]
            part = Responses(tree, leaves, dict(failed))
            part.verdicts = results = pool.score([item(prompt, part, leaf) for leaf in judged])
            verdicts = dict(zip(judged, results, strict=True))
            recorded.append((prompt, [part]))
            failed |= {leaf: v.reason or f"skipped, {v.skipped}" for leaf, v in verdicts.items() if v.value is None}
            put_rewards(tree, [verdicts.get(leaf) for leaf in range(len(leaves))], decode)
            tree.meta |= {"prompt_id": prompt.id, "task": prompt.task, "prompt_text": prompt.text}
            texts.append(leaves)
            console.print(draw(tree, tokenizer))
            given = [verdict.value for verdict in results if verdict.value is not None]
            console.print(
                f"reward {np.mean(given) if given else np.nan:.2f}, {tree.num_leaves} leaves, {tree.num_tokens} unique "
                f"tokens for {tree.logical_tokens} ({tree.logical_tokens / tree.num_tokens:.2f}x)"
            )
            if failed:
                console.print(escape(f"{len(failed)} of {len(leaves)} have no reward: {next(iter(failed.values()))}."))
            console.print()
    if out is not None:
        write_rollouts(out, 0, trees, texts)
        console.print(f"Written to {out}.")
    if record is not None:
        write_groups(record, recorded)
        console.print(f"Recorded in {record}.")


def draw(tree: TokenTree, tokenizer: PreTrainedTokenizerBase) -> RichTree:
    """The tree as rich draws trees: a branch a node, leaves with their reward and how they ended."""

    def text(node: int) -> str:
        ids = tree.token_id[tree.start[node] : tree.start[node] + tree.length[node]]
        return escape(tokenizer.decode(ids)).rstrip("\n")

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
