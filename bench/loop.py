"""Updates on rollouts with a long tail of lengths: synchronous, with partial rollouts, and with staleness.

Every response has a length of its own, log-normal as in recorded runs, so that a batch waits for its longest. A call is
one update with the rollouts it needs, in the steady state of a run. The idle share is that of the decoder: rows of its
full batch, over the steps it took, that sampled nothing.
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
    """Of the decoder's full batch."""
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
    shape = (2, 16, 2, 8, 32, 8) if quick else (4, 32, 4, 24, 384, 16) if small else (16, 512, 16, 512, 8192, 512)
    prompts, prompt, width, median, longest, rows = shape
    name = f"{prompts} x {width}, P={prompt}, lengths log-normal, median {median}, at most {longest}, {rows} rows"
    for of, make in of_model:
        yield Case(of + name, partial(Inputs, make, prompts, prompt, width, median, longest, rows))


def _provider(name: str, **loop: Any) -> Callable[[Inputs], Calls]:
    def provider(x: Inputs) -> Calls:
        from .long_tail import Loop  # needs the extra `train`, which listing benchmarks does not

        return {"update": Loop(x, name, **loop).update}

    return provider


SETTINGS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    "rolltree S=1, partial rollouts (APRIL)": {"staleness": 1, "overlap": False, "window": 0.5},
    "rolltree S=1 (Relax)": {"staleness": 1},
    "rolltree S=3 (Relax)": {"staleness": 3},
    "rolltree S=4": {"staleness": 4},
}
"""Those named after others have their numbers, run by this loop. Relax's `--max-staleness` is 1 by default, and its
guide to performance calls 2 to 3 a good balance. AsyncFlow (arXiv 2507.01663) has none: its abstract states no number.
"""

BENCH = Bench(
    op="loop",
    cases=cases,
    providers={name: _provider(name, **loop) for name, loop in SETTINGS.items()},
    speedup_over=SYNCHRONOUS,
    alone=True,
    shares=lambda x: {f"rows idle, {provider}": share for provider, share in x.idle.items()},
)
