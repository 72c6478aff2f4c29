"""The policy as a run samples with it, for callbacks and sources of the user's that name an argument ``policy``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..chat.marks import response_text
from ..data.columns import Array
from ..errors import UserError
from ..parts.context import Context
from ..rollout import SamplingParams
from ..rollout.sampler import Job, Sampler


class Policy:
    """Samples with the present weights, and scores with them, between two steps of the run's sampler.

    Unfinished groups of the run go on meanwhile; at staleness 0 what is returned follows from the seed, the step and
    the calls before in it, so that a resumed run gets the same.

    Args:
        sampler: the run's.
        params: the run's sampling parameters.
        context: knows the step.
        seed: the run's.
        chat: prompts are texts of the chat template, which have the special tokens that they need.
        answered_by: name of the run's program if it answers held-out problems itself, so that there are no plain
            responses; None otherwise.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        context: Context,
        seed: int,
        *,
        chat: bool,
        answered_by: str | None,
    ) -> None:
        self._sampler, self._tokenizer, self._params = sampler, tokenizer, params
        self._context, self._seed, self._chat, self._answered_by = context, seed, chat, answered_by
        self._calls = (0, 0)  # a step, and the calls in it

    def generate(
        self,
        prompts: Sequence[str],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[list[str]]:
        """Return the texts of ``n`` responses to each of ``prompts``.

        Args:
            temperature: 0 is greedy. Default: `rollout.temperature`.
            max_new_tokens: default: `rollout.max_new_tokens`.

        Raises:
            UserError: the run's program answers held-out problems itself, so that it has no plain responses.
            ValueError: an argument is out of range.
        """
        if self._answered_by is not None:
            raise UserError(
                f"`policy.generate` samples plain responses, and rollout.program = '{self._answered_by}' "
                "answers all problems in its own way; use `policy.score`, or another program."
            )
        run_params = self._params
        params = replace(
            run_params,
            n=n,
            temperature=run_params.temperature if temperature is None else temperature,
            max_new_tokens=max_new_tokens or run_params.max_new_tokens,
        )
        step, calls = self._calls
        self._calls = self._context.step, calls + 1 if step == self._context.step else 1
        seeds = np.random.default_rng([self._seed, *self._calls]).integers(2**31, size=len(prompts)).tolist()
        jobs = [Job(ids, params, seed) for ids, seed in zip(self._ids(prompts), seeds, strict=True)]
        return [
            [response_text(self._tokenizer, tree.token_id[tree.response_rows(leaf)]) for leaf in range(tree.num_leaves)]
            for tree in self._sampler.generate(jobs)
        ]

    def score(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[Array]:
        """Return the log-probs ``[tokens]`` (fp32, nats, at temperature 1) of a continuation of each prompt; none of an
        empty one."""
        token_ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in continuations]
        scores = self._sampler.score(self._ids(prompts), [[ids] if ids else [] for ids in token_ids])
        return [of_prompt[0] if of_prompt else np.zeros(0, np.float32) for of_prompt in scores]

    def _ids(self, prompts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer(text, add_special_tokens=not self._chat)["input_ids"] for text in prompts]
