"""Segment trees (TreePO) against independent responses of the same number and length, by the same engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.programs import TreePO

from ..runner import Bench, Calls, Case
from .rollout import kv_tokens, make_model

FLAT = "rolltree flat"


@dataclass(frozen=True)
class Inputs:
    model: Any
    prompts: list[list[int]]
    width: int
    segment: int
    depth: int
    rows: int
    """Branches decoded together: fewer than there are, so that the time is proportional to the tokens."""

    @property
    def flat_tokens(self) -> int:
        """Tokens computed without trees: each prompt once, and every response in full."""
        return sum(len(p) + self.width * self.segment * self.depth for p in self.prompts)

    @property
    def tree_tokens(self) -> int:
        """Yield trees whose branches double from 2 to the full width."""
        branches = sum(min(2 ** (level + 1), self.width) for level in range(self.depth))
        return sum(len(p) + self.segment * branches for p in self.prompts)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    model = cache(partial(make_model, device, small=device.type == "cpu"))
    shapes = [(1, 64, 4, 8, 4, 4)] if quick else [(2, 1024, 16, 512, 7, 16)]
    if device.type == "cuda":
        shapes = [(32, 1024, 16, 512, 7, 256), (32, 1024, 16, 512, 14, 256)]
    for count, prompt, width, segment, depth, rows in shapes:
        prompts = torch.randint(1024 if device.type == "cpu" else 151936, (count, prompt)).tolist()
        name = f"{count} x P={prompt} S={segment} D={depth} W={width}, {rows} rows"
        shape = (prompts, width, segment, depth, rows)
        yield Case(name, partial(lambda shape: Inputs(model(), *shape), shape))


def _engine(x: Inputs) -> NativeEngine:
    capacity = kv_tokens(x.model, 2 * x.flat_tokens)
    return NativeEngine(x.model, config=EngineConfig(kv_tokens=capacity, max_batch_rows=x.rows))


def _params(x: Inputs) -> SamplingParams:
    return SamplingParams(n=x.width, max_new_tokens=x.segment * x.depth, ignore_eos=True)


def treepo(x: Inputs) -> Calls:
    engine, program = _engine(x), TreePO(segment_tokens=x.segment, max_depth=x.depth)

    def call() -> None:
        engine.forget_prefixes()
        trees = engine.generate(x.prompts, _params(x), program)
        assert sum(tree.num_tokens for tree in trees) == x.tree_tokens
        assert all(tree.num_leaves == x.width for tree in trees)

    return {"generate": call}


def flat(x: Inputs) -> Calls:
    engine = _engine(x)

    def call() -> None:
        engine.forget_prefixes()
        trees = engine.generate(x.prompts, _params(x))
        assert sum(tree.num_tokens for tree in trees) == x.flat_tokens

    return {"generate": call}


BENCH = Bench(
    op="treepo",
    directions=("generate",),
    cases=cases,
    providers={"rolltree treepo": treepo, FLAT: flat},
    speedup_over=FLAT,
    alone=True,
    speedup_ceiling=lambda x: x.flat_tokens / x.tree_tokens,
)
