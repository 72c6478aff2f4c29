"""Drafts from earlier responses against none: epochs over the same prompts, with a policy that moves between them.

A call is one epoch, with its own seeds and one of four sets of weights in turn, each a small random step from the same
weights. Both providers sample the same tokens in it, so their times compare round by round. In first epochs every
epoch's prompts are new; otherwise earlier epochs precede those that are timed. Besides the times, the share of drafted
tokens that were accepted is recorded. With ``--recorded RUN`` the texts are those of a run (recorded.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rolltree.engine import DraftConfig, EngineConfig, NativeEngine, SamplingParams

from ..runner import Bench, Calls, Case
from .rollout import kv_tokens, make_model

NONE = "rolltree without drafts"
RULE = DraftConfig()
"""The drafts that are measured."""
STEP = 0.01  # from the weights to those of an epoch, as a share of their deviation
POLICIES = ("sure", 0.1), ("unsure", 0.25), ("random", 1.0)  # random weights, at a temperature


@dataclass(frozen=True)
class Inputs:
    model: Any
    policies: list[dict[str, Tensor]]
    prompts: list[list[int]]
    group: int
    new_tokens: int
    temperature: float
    before: int
    """Epochs before those that are timed; with none every epoch has prompts of its own."""
    counts: Counter[str] = field(default_factory=Counter)
    """Drafted and accepted tokens of all calls."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """1 to 256 rows in groups of 1, 8 and 16, first and later epochs."""
    small = device.type == "cpu"
    load = cache(partial(_policies, device, small=small))
    vocabulary, new_tokens = (1024 if small else 151936), (16 if quick else 64 if small else 512)
    for count, group in [(1, 2)] if quick else [(1, 1), (8, 1), (1, 8), (8, 8), (1, 16), (16, 16)]:
        for (name, temperature), before in itertools.product(POLICIES, (0, 3)):
            if quick and (name, before) != ("sure", 3):
                continue
            prompts = torch.randint(vocabulary, (count, 64), generator=torch.Generator().manual_seed(0)).tolist()
            make = partial(lambda *values: Inputs(*load(), *values), prompts, group, new_tokens, temperature, before)
            epoch = f"epochs from {before + 1}" if before else "first epochs"
            yield Case(f"{count} x {group} rows, {new_tokens} tokens, {name}, {epoch}", make)


def _policies(device: torch.device, *, small: bool) -> tuple[Any, list[dict[str, Tensor]]]:
    model = make_model(device, small=small)
    torch.manual_seed(1)
    return model, [
        {name: w + STEP * w.std(correction=0) * torch.randn_like(w) for name, w in model.named_parameters()}
        for _ in range(4)
    ]


def new_prompts(prompts: list[list[int]], number: int) -> list[list[int]]:
    """Prompts of 64 tokens made others: by how they begin, and by where they end, as the last tokens weigh the most."""
    return [[number % 1000, number // 1000, *prompt][: -1 - number % 32] for prompt in prompts]


def _calls(x: Inputs, drafts: DraftConfig | None) -> Calls:
    tokens = len(x.prompts) * x.group * x.new_tokens
    capacity = kv_tokens(x.model, 2 * tokens + 2 * sum(map(len, x.prompts)))
    engine = NativeEngine(x.model, config=EngineConfig(kv_tokens=capacity, drafts=drafts))
    params = SamplingParams(n=x.group, max_new_tokens=x.new_tokens, temperature=x.temperature, ignore_eos=True)
    numbers = itertools.count()

    def epoch() -> None:
        number = next(numbers)
        engine.update_weights(x.policies[number % len(x.policies)], version=number)
        engine.forget_prefixes()
        prompts = x.prompts if x.before else new_prompts(x.prompts, number)
        trees = engine.generate(prompts, params, seeds=[1000 * number + i for i in range(len(prompts))])
        assert sum(int(tree.response_length.sum()) for tree in trees) == tokens
        count(x.counts, engine)

    for _ in range(x.before):
        epoch()
    return {"generate": epoch}


def count(counts: Counter[str], engine: NativeEngine) -> None:
    """Add what the last call of ``engine.generate`` drafted."""
    counts.update({name: int(engine.stats[name]) for name in ("drafted_tokens", "accepted_tokens")})


def shares(x: Any) -> Mapping[str, float]:
    """Return the share of a case's drafted tokens that were accepted; nothing if none were drafted."""
    drafted = x.counts["drafted_tokens"]
    return {f"accepted of {drafted} drafted": x.counts["accepted_tokens"] / drafted} if drafted else {}


BENCH = Bench(
    op="speculation",
    directions=("generate",),
    cases=cases,
    providers={"rolltree": partial(_calls, drafts=RULE), NONE: partial(_calls, drafts=None)},
    speedup_over=NONE,
    shares=shares,
)
