"""Evaluation on held-out problems, answered greedily: before a run, after it, and every few steps if set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..prompts.group import Responses
from ..prompts.prompts import Prompt, pictures_of
from ..record.failures import unsampled
from ..record.progress import Progress
from ..rewards import RewardResult, Rewards
from ..rollout import SamplingParams
from ..rollout.sampler import Job, Sampler
from .items import decode, item

SOLVED = 1.0 - 1e-6
"""Smallest value that counts as a correct answer."""


class Evaluation:
    """Answers held-out problems with the sampler's weights.

    Args:
        params: sampling parameters of the answers.
        every: steps between two evaluations; 0 evaluates only before and after the run.
        targets: accuracies at which the run records what it has spent.
        rightness: returns for a problem's entry the part of the reward that tells whether an answer is right; None: the
            reward does.

    Attributes:
        first, last: the first and the latest accuracy; None before there is one.
    """

    def __init__(
        self,
        problems: Sequence[Prompt],
        params: SamplingParams,
        every: int,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        console: Progress,
        rightness: Callable[[Mapping[str, Any]], str | None] = lambda entry: None,
        targets: Sequence[float] = (),
    ) -> None:
        self.problems, self.params, self.every, self.targets = problems, params, every, targets
        self.sampler, self.tokenizer, self.console = sampler, tokenizer, console
        self.rightness = rightness
        self.first: float | None = None
        self.last: float | None = None

    def due(self, step: int, steps: int) -> bool:
        """Return whether the problems are to be answered after ``step`` of ``steps``: always after the last one."""
        if not self.problems:
            return False
        return step == steps or (self.every > 0 and step % self.every == 0)

    def run(self, step: int, rewards: Rewards) -> dict[str, float]:
        """Answer all problems and return the metrics; empty if there are no problems."""
        if not self.problems:
            return {}
        self.console.phase("evaluating")
        params = self.params
        jobs = [
            Job(p.token_ids, params, params.seed, p.context, pictures=pictures_of(p, self.tokenizer))
            for p in self.problems
        ]
        trees = self.sampler.generate(jobs)
        items = [
            item(p, response, leaf)
            for tree, texts, p in zip(trees, decode(self.tokenizer, trees), self.problems, strict=True)
            for response in [Responses(tree, texts, unsampled(tree))]
            for leaf in response.judged
        ]
        results = rewards.score(items)
        parts = [self.rightness(judged.entry) for judged in items]
        solved = [_value(r, part) >= SOLVED for r, part in zip(results, parts, strict=True)]
        accuracy = sum(solved) / len(self.problems)
        failed = [reason for tree in trees for reason in list(unsampled(tree).values())[:1]]
        failed += [r.reason for r in results if r.reason is not None]
        if failed:
            self.console.note(f"{len(failed)} of {len(trees)} held-out problems could not be answered: {failed[0]}.")
        self.last = accuracy
        if self.first is None:
            self.first = accuracy
        means = _means(results)
        by = list(dict.fromkeys(part for part in parts if part is not None))
        self.console.evaluation(step, accuracy, len(self.problems), by, means.get("eval/reward"))
        return {
            "eval/accuracy": accuracy,
            **means,
            "eval/response_length": float(np.mean([tree.response_length.sum() for tree in trees])),
            "eval/failed": float(len(failed)),
            "eval/unparsed": float(sum(r.unparsed is not None for r in results)),
            "eval/skipped": float(sum(r.skipped is not None for r in results)),
        }


def _value(result: RewardResult, part: str | None) -> float:
    """Return the value of the part that judges rightness, or the reward; NaN if there is none."""
    if part is not None:
        return result.named.get(part, np.nan)
    return np.nan if result.value is None else result.value


def _means(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return the means of the rewards and of the named ones over the answers that have them."""
    values: dict[str, list[float]] = {"eval/reward": [r.value for r in results if r.value is not None]}
    for name in dict.fromkeys(name for r in results for name in r.named):
        named = [r.named[name] for r in results if name in r.named]
        values[f"eval/reward/{name}"] = [value for value in named if not np.isnan(value)]
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}
