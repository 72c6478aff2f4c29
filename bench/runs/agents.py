"""Updates on episodes of agents: as one tree, as merged conversations, and each call as a sequence of its own.

Three jobs: tools, whose calls append to one another; a repository, whose 16 episodes share a long beginning; and
compaction, whose calls append until the context is full and go on after a summary. A merged conversation is what
trainers without trees make of calls that append: a chain. On a CPU the lengths are those of the name over ``SMALLER``;
``rolltree bench agents --model DIR`` times a model of your own, on CUDA at full length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.engine import CostModel, TokenTree, pack
from rolltree.engine.agents.records import EpisodeRecord, SampledCall
from rolltree.engine.agents.tree import episode_tree
from rolltree.engine.data.segment import LeafStatus, Segment
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

from .. import workloads
from ..runner import Bench, Calls, Case
from ..workloads import VOCABULARY
from . import tree_step
from .tree_step import MAX_TOKENS, MAX_TREE_TOKENS, _qwen3, on_policy, own_model, step_of

SMALLER, QUICK = 32, 128
"""The lengths are divided by this on a CPU, and with --quick."""
ALONE, MERGED = "each call", "merged conversations"


@dataclass(frozen=True)
class Job:
    """Episodes of agents, in tokens.

    Attributes:
        shared: of the beginning that all calls share.
        sampled, read: of a call: its answer, and what the next one reads after it.
        full: the context's length beyond the shared beginning at which it is replaced by a summary; 0: never.
    """

    shared: int
    sampled: int
    read: int
    calls: int
    episodes: int
    full: int = 0
    summary: int = 0

    def smaller(self, by: int) -> Job:
        """Return the job with its lengths divided."""
        lengths = {name: max(getattr(self, name) // by, 1) for name in ("shared", "sampled", "read")}
        summary, full = max(self.summary // by, 1), self.full // by
        return Job(**lengths, calls=self.calls, episodes=self.episodes, full=full, summary=summary)

    def records(self) -> list[EpisodeRecord]:
        """Return the episodes, with random tokens."""
        rng = np.random.default_rng(0)

        def words(count: int) -> list[int]:
            return rng.integers(1, VOCABULARY, count).tolist()

        begin, records = words(self.shared), []
        for _ in range(self.episodes):
            context, calls = list(begin), []
            for number in range(self.calls):
                said = words(self.sampled)
                parts = [Segment.prompt(context), Segment.sampled(said, np.full(len(said), -7.0))]
                tree = TokenTree.from_nodes([-1, 0], parts, [1], [LeafStatus.STOP])
                calls.append(SampledCall(tree, number=number))
                context = context + said + words(self.read)
                if self.full and len(context) >= self.shared + self.full:
                    context = begin + words(self.summary)
            records.append(EpisodeRecord(tuple(calls), LeafStatus.STOP))
        return records


JOBS = {
    "tools 2500+4x20 calls to 6000": Job(2500, 90, 85, 20, 4),
    "repository 8000+16x10 calls to 12000": Job(8000, 200, 200, 10, 16),
    "compaction at 2000, 1000+4x20 calls": Job(1000, 150, 150, 20, 4, full=2000, summary=300),
}


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    sampled: int
    """Tokens that the calls sampled."""
    tree: TokenTree
    sequences: Mapping[str, Sequence[TokenTree]]
    """The same calls without sharing between sequences: `ALONE`, `MERGED`."""

    @staticmethod
    def of(model: Callable[[], PreTrainedModel], job: Job) -> Inputs:
        records = job.records()
        credit = np.random.default_rng(1).normal(size=len(records))
        trees = []
        for per_call in (False, True):
            tree = episode_tree([1], records, per_call=per_call)
            tree.set("advantage", credit[tree.episode])
            trees.append(tree)
        merged, alone = ([tree.chain(leaf) for leaf in range(tree.num_leaves)] for tree in trees)
        return Inputs(model(), job.sampled * job.calls * job.episodes, trees[0], {ALONE: alone, MERGED: merged})

    def tokens(self, trees: Sequence[TokenTree]) -> int:
        return sum(tree.num_tokens for tree in trees)

    def flop(self, trees: Sequence[TokenTree]) -> float:
        cost = CostModel.of(self.model)
        return sum(cost.shared(tree) for tree in trees)


def model_cases(path: Path, device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the jobs for the model at ``path`` in bf16 and fp32: at full length on CUDA, shorter ones elsewhere."""
    by = QUICK if quick else 1 if device.type == "cuda" else SMALLER
    for dtype in (torch.bfloat16, torch.float32):
        model = cache(partial(workloads.pretrained, path, dtype, device))
        for name, job in JOBS.items():
            label = name if by == 1 else f"{name}, all / {by}"
            case = f"{path.name} {label} {str(dtype).removeprefix('torch.')}"
            yield Case(case, partial(Inputs.of, lambda model=model: model().train(), job.smaller(by)))  # type: ignore[misc]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield short jobs for a small model."""
    small = cache(partial(_qwen3, device, torch.float32, 128, 384, 2, 4, 2, 32, VOCABULARY))
    by = QUICK if quick else SMALLER
    for name, job in JOBS.items():
        yield Case(f"{name}, all / {by}, layers 2 width 128", partial(Inputs.of, small, job.smaller(by)))


def updates(x: Inputs, trees: Sequence[TokenTree]) -> Calls:
    """Time an update of a run: rolltree's micro-batches, loss and optimiser on ``trees``."""
    model = own_model(tree_step.Inputs(x.model, x.tree), "rolltree")
    trainer = Trainer(model, TrainerConfig(lr=1e-6))
    term = TokenTerm(Objective.preset("dapo"))
    term.prepare(trees)
    terms = [Weighted(term, term.normalizer(trees), 1.0)]
    batches = pack(trees, max_tokens=MAX_TREE_TOKENS, in_pieces=True)
    tokens = sum(tree.logical_tokens for tree in trees)

    def step() -> None:
        for batch in batches:
            last = batch is batches[-1]
            trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=True, last=last)
        trainer.optim_step()

    return {"step": step}


def flat(x: Inputs, kind: str) -> Calls:
    """Time a trainer without trees: Transformers with sdpa on sequences of equal lengths together, the head on the
    responses alone, tokens that were not sampled left out of the loss."""
    model = own_model(tree_step.Inputs(x.model, x.tree), "sdpa")
    shapes: dict[tuple[int, int], list[TokenTree]] = {}
    for tree in x.sequences[kind]:
        shapes.setdefault((int(tree.leaf_prompt[0]), int(tree.response_length[0])), []).append(tree)
    batches = []
    for (prompt, response), trees in shapes.items():
        most = max(1, MAX_TOKENS[model.device.type] // (prompt + response))
        for begin in range(0, len(trees), most):
            of_batch = trees[begin : begin + most]
            ids = torch.tensor(np.stack([tree.token_id for tree in of_batch]), device=model.device).long()
            mask = torch.tensor(np.concatenate([tree.loss_mask[prompt:] for tree in of_batch]), device=model.device)
            credit = torch.tensor([float(tree.advantage[0]) for tree in of_batch], device=model.device)
            batches.append((ids, response, mask * credit.repeat_interleave(response)))

    def losses() -> Iterator[Tensor]:
        for ids, response, advantage in batches:
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
            target = ids[:, -response:].flatten()
            logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="none")
            yield on_policy(logprob, advantage, x.sampled)

    return step_of(model, losses)


def saved(x: Inputs) -> dict[str, float]:
    """Return what the tree computes of what the sequences do, and the tokens that it trains of those sampled."""
    shares: dict[str, float] = {}
    for kind, trees in x.sequences.items():
        shares[f"tokens of the tree, of {kind}"] = x.tree.num_tokens / x.tokens(trees)
        shares[f"FLOP of the tree, of {kind}"] = x.flop([x.tree]) / x.flop(trees)
    return shares | {"tokens trained, of those sampled": x.tree.loss_tokens / x.sampled}


def flop_ratio(x: Inputs) -> float:
    """Return the FLOP of each call as a sequence over those of the tree."""
    return x.flop(x.sequences[ALONE]) / x.flop([x.tree])


def sequences(kind: str) -> Callable[[Any], Calls]:
    return lambda x: updates(x, x.sequences[kind])


BENCH = Bench(
    op="agents",
    directions=("step",),
    cases=cases,
    providers={
        "rolltree, tree": lambda x: updates(x, [x.tree]),
        f"rolltree, {MERGED}": sequences(MERGED),
        f"rolltree, {ALONE}": sequences(ALONE),
        f"transformers sdpa, {MERGED}": partial(flat, kind=MERGED),
        f"transformers sdpa, {ALONE}": partial(flat, kind=ALONE),
    },
    speedup_over=f"rolltree, {ALONE}",
    model_cases=model_cases,
    alone=True,
    warmup=0,
    speedup_ceiling=flop_ratio,
    ceiling_is="the FLOP of each call as a sequence over the FLOP of the tree",
    shares=saved,
)
