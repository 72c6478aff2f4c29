"""Updates on rollouts with a long tail of lengths: synchronous, with partial rollouts, and with staleness.

Each response has its own drawn length, log-normal as in recorded runs, so a batch waits for its longest response. A
timed call is several updates with their rollouts, in the steady state of a run. A single update would not do: above
S=0 an update that waited for a long response is followed by one whose responses are ready, and the median over both
kinds is the mean of neither. The n-th call has the same lengths with every provider, except for those that staleness
moves from one call to the next. The share "rows idle" is the part of the decoder's full batch, over its steps, that
sampled nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..runner import Bench, Calls, Case
from .rollout import make_model

SYNCHRONOUS = "rolltree S=0"


def smollm2(device: torch.device) -> LlamaForCausalLM:
    """Return a model with the shape of SmolLM2-135M and random weights, on which no length depends."""
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
    """Yield the cases: on a CPU with models of 3.6 M parameters, whose step time is proportional to its rows, and of
    135 M."""
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
        yield Case(of + name, partial(_inputs, make, prompts, prompt, width, median, longest, rows, updates))


def _inputs(*sizes: Any) -> Any:
    from .long_tail import Inputs  # needs the extra `train`, which listing benchmarks does not

    return Inputs(*sizes)


def _provider(name: str, **loop: Any) -> Callable[[Any], Calls]:
    def provider(x: Any) -> Calls:
        from .long_tail import Loop

        return {f"{x.updates} updates": Loop(x, name, **loop).updates}

    return provider


SETTINGS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    "rolltree S=1, partial rollouts (APRIL)": {"staleness": 1, "overlap": False, "window": 0.0},
    "rolltree S=1 (Relax)": {"staleness": 1, "overlap": True},
    "rolltree S=3 (Relax)": {"staleness": 3, "overlap": True},
    "rolltree S=4": {"staleness": 4},
}
"""Settings named after other systems use their numbers with this loop. APRIL's scripts keep two batches of prompts
in flight (`--rollout-batch-size 32 --over-sampling-batch-size 64 --partial-rollout`), as S=1 does without a window; it
does not bound the lag. Relax samples during updates; its `--max-staleness` is 1 by default, and its performance guide
calls 2 to 3 a good balance. AsyncFlow (arXiv 2507.01663) has no setting: its abstract states no number.
"""

BENCH = Bench(
    op="loop",
    directions=("2 updates", "4 updates"),
    cases=cases,
    providers={name: _provider(name, **loop) for name, loop in SETTINGS.items()},
    speedup_over=SYNCHRONOUS,
    alone=True,
    warmup=0,  # the updates of the first, untimed call warm up
    shares=lambda x: {f"rows idle, {provider}": share for provider, share in x.idle.items()},
)
