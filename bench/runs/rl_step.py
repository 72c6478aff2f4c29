"""A whole step of RL on random weights: rollouts with a long tail of lengths, rewards, credit, the update, new weights.

Every response ends at its drawn length, log-normal as in recorded runs, so the last rollouts of a step run with few
rows. Its reward is its length. Lengths, rewards and updates are the same for both providers: one trains on the trees,
the other on every path separately. The benchmark needs the engine alone, no settings and no files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, TokenTree, batch_loss, pack
from rolltree.engine.methods.credit import give_credit
from rolltree.engine.methods.estimators import group_norm
from rolltree.engine.programs import Action, Finish, Fork, GroupState, RolloutProgram, SegmentReport
from rolltree.kernels import Objective

from ..runner import Bench, Calls, Case
from .rollout import kv_tokens, make_model
from .tree_step import MAX_TREE_TOKENS

FLAT = "rolltree, trained flat"


class LongTail(RolloutProgram):
    """Ends every response at its drawn length."""

    segment_tokens = 8

    def __init__(self, median: int, longest: int) -> None:
        self.median, self.longest = median, longest

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        drawn = np.random.default_rng(abs(group.seed)).lognormal(np.log(self.median), 1.0, group.width)
        for segment in (s for s in finished if s.status is None):
            length = min(drawn[segment.branch[0]], self.longest)
            yield Finish(segment.branch) if segment.length >= length else Fork(segment.branch)


@dataclass(frozen=True)
class Inputs:
    make_model: Callable[[], Any]
    prompts: list[list[int]]
    group: int
    """Responses to each prompt."""
    median: int
    """Median length of a response in tokens; lengths are log-normal with sigma 1."""
    longest: int


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the case: on CUDA with the shape of Qwen3 0.6B."""
    small = device.type == "cpu"
    model = cache(partial(make_model, device, small=small))
    count, prompt, group, median, longest = (
        (1, 32, 2, 8, 32) if quick else (4, 256, 8, 48, 256) if small else (4, 2048, 16, 256, 1024)
    )
    prompts = torch.randint(1024, (count, prompt)).tolist()
    name = f"{count} x ({prompt} + {group} of median {median}, at most {longest})"
    yield Case(name, partial(Inputs, model, prompts, group, median, longest))


class Step:
    """A model, its engine and its optimiser."""

    def __init__(self, x: Inputs, *, flat: bool) -> None:
        self.x, self.flat = x, flat
        self.model = copy.deepcopy(x.make_model())
        if self.model.device.type == "cuda":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        tokens = sum(len(prompt) + x.group * x.longest for prompt in x.prompts)
        config = EngineConfig(kv_tokens=kv_tokens(self.model, tokens + tokens // 4))
        self.engine = NativeEngine(self.model, config=config)
        self.params = SamplingParams(n=x.group, max_new_tokens=x.longest, ignore_eos=True)
        self.program = LongTail(x.median, x.longest)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def __call__(self) -> None:
        trees = self.rollouts()
        self.update(trees)
        self.engine.update_weights()

    def rollouts(self) -> list[TokenTree]:
        self.model.eval()
        trees = self.engine.generate(self.x.prompts, self.params, self.program)
        for tree in trees:
            tree.rewards["reward"] = tree.response_length.astype(np.float32)
        give_credit(group_norm, "group_norm", trees)
        return trees

    def update(self, trees: list[TokenTree]) -> None:
        learn(self.model, self.optimizer, trees, flat=self.flat)


def learn(model: Any, optimizer: torch.optim.Optimizer, trees: list[TokenTree], *, flat: bool = False) -> None:
    """Update a model on trees with advantages, or on each of their paths by itself."""
    model.train()
    normalizer = sum(int(tree.loss_length.sum()) for tree in trees)
    if flat:
        trees = [tree.chain(leaf) for tree in trees for leaf in range(tree.num_leaves)]
    for batch in pack(trees, max_tokens=MAX_TREE_TOKENS, device=model.device):
        batch_loss(model, batch, Objective(), normalizer=normalizer, old_logprob=None).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _provider(x: Inputs, *, flat: bool) -> Calls:
    return {"step": Step(x, flat=flat)}


BENCH = Bench(
    op="rl_step",
    directions=("step",),
    cases=cases,
    providers={"rolltree": partial(_provider, flat=False), FLAT: partial(_provider, flat=True)},
    speedup_over=FLAT,
    alone=True,
)
