"""Updates on rollouts with a long tail of lengths: synchronous, with partial rollouts, and with staleness.

Every response has a length of its own, log-normal as in recorded runs, so that a batch waits for its longest. A call is
some updates with the rollouts they need, in the steady state of a run; one alone would not do, because above S=0 an
update that waited for a long response is followed by one whose responses are there already, and the median of the two
kinds is neither's mean. The n-th call has the same lengths by every provider, but for those that staleness moves across
its ends. The idle share is that of the decoder: rows of its full batch, over the steps it took, that sampled nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .rollout import make_model
from .runner import Bench, Calls, Case

SYNCHRONOUS = "rolltree S=0"


@dataclass(frozen=True)
class Inputs:
    make_model: Callable[[], Any]
    prompts: int
    """Of an update."""
    prompt: int
    """Tokens of each."""
    width: int
    """Responses to each."""
    median: int
    """Of the lengths; they are log-normal with sigma 1."""
    longest: int
    rows: int
    """Of the decoder's full batch: responses of two updates."""
    updates: int
    """Of a call."""
    idle: dict[str, float] = field(default_factory=dict)
    """Share of the decoder's rows, by provider."""


def smollm2(device: torch.device) -> LlamaForCausalLM:
    """The shape of SmolLM2-135M, of random weights: no length depends on them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(device).eval()


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """On the CPU a model of 3.6 M parameters, whose step costs as much as it has rows, and one of 135 M."""
    small = device.type == "cpu"
    model = cache(partial(make_model, device, small=small))
    of_model: list[tuple[str, Callable[[], Any]]] = [("", model)]
    if small and not quick:
        of_model.append(("SmolLM2-135M, ", cache(partial(smollm2, device))))
    shape = (2, 16, 2, 8, 32, 8, 4) if quick else (4, 32, 4, 16, 256, 32, 4)
    if not small and not quick:
        shape = (16, 512, 16, 512, 8192, 512, 2)
    prompts, prompt, width, median, longest, rows, updates = shape
    name = f"{prompts} x {width}, P={prompt}, lengths log-normal, median {median}, at most {longest}, {rows} rows"
    for of, make in of_model:
        yield Case(of + name, partial(Inputs, make, prompts, prompt, width, median, longest, rows, updates))


def _provider(name: str, **loop: Any) -> Callable[[Inputs], Calls]:
    def provider(x: Inputs) -> Calls:
        from .long_tail import Loop  # needs the extra `train`, which listing benchmarks does not

        return {f"{x.updates} updates": Loop(x, name, **loop).updates}

    return provider


SETTINGS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    "rolltree S=1, partial rollouts (APRIL)": {"staleness": 1, "overlap": False, "window": 0.0},
    "rolltree S=1 (Relax)": {"staleness": 1, "overlap": True},
    "rolltree S=3 (Relax)": {"staleness": 3, "overlap": True},
    "rolltree S=4": {"staleness": 4},
}
"""Those named after others have their numbers, run by this loop. APRIL's scripts have two batches of prompts under way
(`--rollout-batch-size 32 --over-sampling-batch-size 64 --partial-rollout`), as S=1 has without a window; it bounds no
lag. Relax samples beside the updates; its `--max-staleness` is 1 by default, and its guide to performance calls 2 to 3
a good balance. AsyncFlow (arXiv 2507.01663) has none: its abstract states no number.
"""

BENCH = Bench(
    op="loop",
    cases=cases,
    providers={name: _provider(name, **loop) for name, loop in SETTINGS.items()},
    speedup_over=SYNCHRONOUS,
    alone=True,
    warmup=0,  # the first call's updates are
    shares=lambda x: {f"rows idle, {provider}": share for provider, share in x.idle.items()},
)
