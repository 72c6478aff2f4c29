"""Judges and reward models behind a server that speaks OpenAI's protocol: a hosted one, vLLM, or `rolltree serve`.

Requests run side by side on one event loop, a bounded number at once, each with a time limit that its retries share.
What goes wrong with one is the reason why one response has no verdict.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from ..errors import UserError
from ..settings import RewardConfig
from .interface import RewardItem, RewardResult, Rewards

SCORE = r"(?i:score|rating)[*_`]*\s*(?:\([^)\n]*\)\s*)?(?:[:=：]|is\b)[*_`\s]*(-?\d+(?:\.\d+)?)"
"""The word, a range in parentheses, a colon and the number, each of them perhaps with Markdown's emphasis."""
QUESTION = """Problem:
{problem}

Reference answer:
{answer}

Response:
{response}

How good is the response? Reason briefly, then end with "Score: " and a number from 0 to 10."""


class RemoteRewards(Rewards):
    """Asks a server about each response.

    Args:
        config: `reward.timeout_s` is the time limit of a verdict once it has its place among ``at_once``.
        base_url: of the server, such as ``http://localhost:8000/v1``.
        model: its name there.
        at_once: requests outstanding at the same time.
        retries: of one request, with growing waits, where the server is busy, out of order or out of reach.
        api_key_env: the environment variable with the key; a server without keys needs none.

    Raises:
        UserError: the client is not installed, or an argument makes no sense.
    """

    def __init__(
        self,
        config: RewardConfig,
        base_url: str,
        model: str,
        at_once: int = 32,
        retries: int = 3,
        api_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError(
                f"reward.verifier = '{config.verifier}' needs OpenAI's client; install it with "
                '`pip install "rolltree[judge]"`.'
            ) from error
        if at_once < 1 or retries < 0:
            raise UserError(f"reward.verifier = '{config.verifier}' needs at_once >= 1 and retries >= 0.")
        self.model, self._timeout_s, self._at_once = model, config.timeout_s, at_once
        key = os.environ.get(api_key_env) or "none"
        self._loop = asyncio.new_event_loop()
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=config.timeout_s)
        self._places = asyncio.Semaphore(at_once)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolltree-judge", daemon=True)
        self._thread.start()
        self._closed = False

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        if self._closed:
            raise ValueError("The judge is closed; make another one.")
        try:
            return asyncio.run_coroutine_threadsafe(self._all(items), self._loop).result()
        except CancelledError:
            raise ValueError("The judge was closed before it had answered.") from None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    async def _all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return list(await asyncio.gather(*map(self._one, items)))

    async def _one(self, item: RewardItem) -> RewardResult:
        import openai

        async with self._places:
            try:
                async with asyncio.timeout(self._timeout_s):
                    value = await self._ask(item)
            except (TimeoutError, openai.APITimeoutError):
                return RewardResult(None, "timeout")
            except (openai.OpenAIError, LookupError, TypeError, ValueError) as error:
                said = " ".join(str(error).split())[:200]
                return RewardResult(None, f"{type(error).__name__}: {said}".rstrip("."))
        if not math.isfinite(value):
            return RewardResult(None, f"the judge's score is {value:g}, which is not finite")
        return RewardResult(value, None)

    @abstractmethod
    async def _ask(self, item: RewardItem) -> float:
        """
        Raises:
            ValueError: the server's answer cannot be used.
        """


class Judge(RemoteRewards):
    """A chat model is asked how good a response is.

    Its answer's last match of ``pattern`` is the score, brought from ``lowest`` ... ``highest`` to 0 ... 1. With
    ``yes`` and ``no`` its first token decides instead: the reward is P(yes) / (P(yes) + P(no)), as of a generative
    reward model.

    Args:
        prompt: what it is asked; ``{problem}``, ``{response}`` and ``{answer}`` are replaced.
        system: what it is told before.
        max_tokens, temperature: of its answer.
        remote: see `RemoteRewards`.
    """

    def __init__(
        self,
        config: RewardConfig,
        prompt: str = QUESTION,
        system: str = "",
        pattern: str = SCORE,
        lowest: float = 0.0,
        highest: float = 10.0,
        yes: str = "",
        no: str = "",
        max_tokens: int = 512,
        temperature: float = 0.0,
        **remote: Any,
    ) -> None:
        what = f"reward.verifier = '{config.verifier}'"
        if "{response}" not in prompt:
            raise UserError(f"{what} needs a prompt with {{response}}, the place of what is judged.")
        if bool(yes) != bool(no):
            raise UserError(f"{what} needs both of yes and no, or none of them.")
        if not lowest < highest:
            raise UserError(f"{what} needs lowest < highest.")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{what} has a pattern that is no regular expression: {error}.") from None
        if not self._pattern.groups:
            raise UserError(f"{what} needs a pattern with a group, the score.")
        self._prompt, self._system, self._range = prompt, system, (lowest, highest)
        self._words, self._max_tokens, self._temperature = (yes, no), max_tokens, temperature
        super().__init__(config, **remote)

    async def _ask(self, item: RewardItem) -> float:
        messages: list[Any] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": filled(self._prompt, item)})
        if self._words[0]:
            return await self._share(messages)
        found = await self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=self._max_tokens, temperature=self._temperature
        )
        text = found.choices[0].message.content or ""
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise ValueError(f"the judge gave no score, but {text[-80:]!r}")
        lowest, highest = self._range
        score = float(matches[-1][1])
        if not lowest <= score <= highest:
            raise ValueError(f"the judge gave no score from {lowest:g} to {highest:g}, but {score:g}")
        return (score - lowest) / (highest - lowest)

    async def _share(self, messages: list[Any]) -> float:
        """Of ``yes`` in the probability of both words as the first token."""
        found = await self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=1, temperature=self._temperature,
            logprobs=True, top_logprobs=20,
        )  # fmt: skip
        logprobs = found.choices[0].logprobs
        first = logprobs.content[0].top_logprobs if logprobs is not None and logprobs.content else []
        yes, no = (
            sum(math.exp(t.logprob) for t in first if t.token.strip().casefold() == word.strip().casefold())
            for word in self._words
        )
        if not yes + no:
            raise ValueError(f"the judge gave no score: neither of {self._words} is among its likeliest tokens")
        return yes / (yes + no)


class RewardModel(RemoteRewards):
    """A sequence classifier behind ``/classify``, as vLLM serves reward models.

    Args:
        text: what it is given; ``{prompt}`` (the prompt as the policy was given it), ``{problem}``, ``{response}`` and
            ``{answer}`` are replaced.
        label: which of its outputs is the reward.
        remote: see `RemoteRewards`; ``base_url`` is the server's, without ``/v1`` where the server has it so.
    """

    def __init__(self, config: RewardConfig, text: str = "{prompt}{response}", label: int = 0, **remote: Any) -> None:
        if "{response}" not in text:
            raise UserError(f"reward.verifier = '{config.verifier}' needs a text with {{response}}.")
        self._text, self._label = text, label
        super().__init__(config, **remote)

    async def _ask(self, item: RewardItem) -> float:
        body = {"model": self.model, "input": filled(self._text, item)}
        found: Any = await self._client.post("/classify", cast_to=object, body=body)
        return float(found["data"][0]["probs"][self._label])


def filled(template: str, item: RewardItem) -> str:
    """``template`` with what is known of a response; braces of other words stay."""
    values = {
        "prompt": item.prompt,
        "problem": item.problem,
        "response": item.response_text,
        "answer": str(item.entry.get("answer", "")),
    }
    return re.sub(r"\{(prompt|problem|response|answer)\}", lambda match: values[match[1]], template)
