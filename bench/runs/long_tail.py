"""The run that `bench/runs/loop.py` times: real sampling, judging, learning, with drawn lengths and without files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.app.assembly.learning import learning_parts
from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.app.assembly.sampling import budget, sampled_model
from rolltree.engine.fleet.publication import Publication
from rolltree.engine.learn.learner import Learner
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.loop.controller import Controller
from rolltree.engine.loop.sampling import SamplingParts
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.record.metrics import Stopwatch, Sums
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rollout.local import LocalSampler
from rolltree.engine.settings import TrainConfig

from .rl_step import LongTail
from .rollout import kv_tokens


@dataclass(frozen=True)
class Inputs:
    """The sizes of a run."""

    make_model: Callable[[], Any]
    prompts: int
    """Prompts of an update."""
    prompt: int
    """Tokens of a prompt."""
    width: int
    """Responses to a prompt."""
    median: int
    """Median length of a response in tokens; lengths are log-normal with sigma 1."""
    longest: int
    rows: int
    """Rows of the decoder's full batch: the responses of two updates."""
    updates: int
    """Updates of one timed call."""
    idle: dict[str, float] = field(default_factory=dict)
    """Share of the decoder's rows that sampled nothing, by provider."""


class _Prompts:
    def __init__(self, x: Inputs) -> None:
        self.x, self.random = x, np.random.default_rng(0)

    def next(self, count: int) -> list[Prompt]:
        ids = self.random.integers(0, 1024, (count, self.x.prompt)).tolist()
        return [Prompt(str(i), "random", "", prompt_ids, {}, "") for i, prompt_ids in enumerate(ids)]

    def observe(self, trees: Sequence[Any]) -> None:
        pass


class _Texts:
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []
    all_special_tokens: ClassVar[list[str]] = []
    eos_token_id = pad_token_id = bos_token_id = None

    def __len__(self) -> int:
        return 2

    def batch_decode(self, responses: Sequence[Any], **_: object) -> list[str]:
        return [self.decode(response) for response in responses]

    def decode(self, response: Any, **_: object) -> str:
        return "x" * (int(response.sum()) % 2)


class _Verdicts(Rewards):
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(float(len(item.response_text)), None) for item in items]


class Quiet:
    """Accepts any call and does nothing; it replaces the console of a run."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Loop:
    """A run without a directory, with the settings ``loop``; ``name`` is its provider's."""

    def __init__(self, x: Inputs, name: str, **loop: Any) -> None:
        self.x, self.name = x, name
        longest = x.prompt + x.longest
        config = TrainConfig.model_validate(
            {
                "name": "bench",
                "model": {"path": "none"},
                "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": x.prompt},
                "rollout": {"n": x.width, "max_new_tokens": x.longest},
                "trainer": {"prompts_per_step": x.prompts, "max_tokens": max(8192, longest), "self_check": False},
                "algorithm": {"drop_zero_variance": False},
                "loop": loop,
            }
        )
        model: Any = x.make_model()
        watch = Stopwatch()
        quiet: Any = Quiet()
        buffer = Buffer(budget(config))
        capacity = kv_tokens(model, 2 * longest * x.width * buffer.budget.capacity)
        engine_config = EngineConfig(kv_tokens=capacity, max_batch_rows=x.rows)
        self.engine = NativeEngine(sampled_model(config, model), config=engine_config)
        params = SamplingParams(n=x.width, max_new_tokens=x.longest, ignore_eos=True)
        texts: Any = _Texts()
        program = LongTail(x.median, x.longest)
        prompts: Any = _Prompts(x)
        on_cpu = model.device.type == "cpu"
        parts = SamplingParts(
            sampler=LocalSampler(self.engine, program),
            tokenizer=texts,
            source=prompts,
            program=program,
            program_name="long tail",
            params=params,
            seed=0,
            overlaps=config.loop.overlaps(on_cpu=on_cpu),
            on_cpu=on_cpu,
        )
        sends = Publication(parts.sampler, quiet.note, keep_keys=config.loop.keep_keys)
        self.controller = Controller(parts, buffer, sends, watch, quiet)
        self.learner = Learner(learning_parts(Methods.make(config), model), watch, quiet.note)
        self.model = model
        self._running = contextlib.ExitStack()
        self._running.enter_context(self.controller.running(_Verdicts()))

    def updates(self) -> None:
        """Make the updates of one timed call."""
        for _ in range(self.x.updates):
            self.update()

    def update(self) -> None:
        self.model.eval()
        batch = self.controller.next_batch()
        changed = self.learner.update([group.tree for group in batch], [], 1, Sums())
        weights = self.learner.weights() if changed else None
        self.controller.end_step(batch, weights, self.learner.trainer.updates)
        counts = self.engine.loop.counts
        self.x.idle[self.name] = 1 - counts["row_steps"] / max(1, counts["steps"] * self.x.rows)

    def __del__(self) -> None:
        self._running.close()
