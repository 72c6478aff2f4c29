"""The calls of agents' episodes, sampled: with the keys of earlier calls kept, and without.

The jobs are those of ``agents``, with the lengths of the name over ``SMALLER`` on a CPU. All episodes call at the same
time; a call's answer has a forced length, and the next call of the episode appends a tool's answer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams

from .. import workloads
from ..runner import Bench, Calls, Case
from .agents import JOBS, QUICK, Job
from .rollout import kv_tokens, make_model, vllm_engine

SMALLER = 16
Answer = Callable[[list[list[int]]], list[list[int]]]
"""Samples an answer to each prompt."""


@dataclass(frozen=True)
class Inputs:
    model: PreTrainedModel
    job: Job
    vocabulary: int

    @property
    def longest(self) -> int:
        """Tokens of the longest context with its answer."""
        grown = self.job.calls * (self.job.sampled + self.job.read)
        return (
            self.job.shared + self.job.sampled + (min(grown, self.job.full + self.job.read) if self.job.full else grown)
        )

    def play(self, answer: Answer, *, shared: bool) -> None:
        """Run all episodes, with ``answer`` for the calls of each turn; their beginnings differ in the first token
        unless ``shared``."""
        job, rng = self.job, np.random.default_rng(0)

        def words(count: int) -> list[int]:
            return rng.integers(1, self.vocabulary, count).tolist()

        begin = words(job.shared)
        begins = [begin if shared else [1 + number, *begin[1:]] for number in range(job.episodes)]
        contexts = begins
        for _ in range(job.calls):
            said = answer(contexts)
            assert all(len(each) == job.sampled for each in said)
            contexts = [context + each + words(job.read) for context, each in zip(contexts, said, strict=True)]
            if job.full and len(contexts[0]) >= job.shared + job.full:
                contexts = [begin + words(job.summary) for begin in begins]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield short jobs for a model of random weights."""
    model = cache(partial(make_model, device, small=device.type == "cpu" or quick))
    by = QUICK if quick else SMALLER if device.type == "cpu" else 1
    for name, job in JOBS.items():
        yield Case(f"{name}, all / {by}", partial(_inputs, model, job.smaller(by)))


def model_cases(path: Path, device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the jobs for the model at ``path``, in bf16 and fp32."""
    by = QUICK if quick else SMALLER if device.type == "cpu" else 1
    for dtype in (torch.bfloat16, torch.float32):
        model = cache(partial(workloads.pretrained, path, dtype, device))
        for name, job in JOBS.items():
            case = f"{path.name} {name}, all / {by} {str(dtype).removeprefix('torch.')}"
            yield Case(case, partial(_inputs, model, job.smaller(by)))


def _inputs(model: Callable[[], PreTrainedModel], job: Job) -> Inputs:
    loaded = model().eval()
    return Inputs(loaded, job, int(loaded.config.get_text_config().vocab_size))


def native(x: Inputs, *, keep: bool) -> Calls:
    """Time the native engine; with ``keep`` false each call is computed from its first token."""
    engine = NativeEngine(x.model, config=EngineConfig(kv_tokens=kv_tokens(x.model, 2 * x.longest * x.job.episodes)))
    params = SamplingParams(n=1, max_new_tokens=x.job.sampled, ignore_eos=True)

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        if not keep:
            engine.forget_prefixes()
        return [tree.token_id[tree.response_rows(0)].tolist() for tree in engine.generate(prompts, params)]

    def sample() -> None:
        engine.forget_prefixes()
        x.play(answer, shared=keep)

    return {"sample": sample}


def vllm(x: Inputs, *, keep: bool) -> Calls:
    llm = vllm_engine(x.model, x.longest, enable_prefix_caching=keep)
    import vllm

    params = vllm.SamplingParams(max_tokens=x.job.sampled, ignore_eos=True, logprobs=0, detokenize=False)

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(requests, params, use_tqdm=False)]

    def sample() -> None:
        llm.reset_prefix_cache()
        x.play(answer, shared=keep)

    return {"sample": sample}


NO_PREFIXES = "rolltree, no prefixes"
BENCH = Bench(
    op="agent_calls",
    directions=("sample",),
    cases=cases,
    providers={
        "rolltree": partial(native, keep=True),
        NO_PREFIXES: partial(native, keep=False),
        "vllm": partial(vllm, keep=True),
        "vllm, no prefixes": partial(vllm, keep=False),
    },
    speedup_over=NO_PREFIXES,
    model_cases=model_cases,
    alone=True,
    warmup=0,
)
