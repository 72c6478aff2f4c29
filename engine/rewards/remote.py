"""Judges and reward models on a server with OpenAI's protocol: a hosted one, vLLM, or `rolltree serve`.

Requests run concurrently on one event loop, up to a limit, each with a time limit that includes its retries. An error
in one request leaves only its own response without a verdict, and becomes the reason for that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any
from urllib.parse import urlsplit

from ..chat.reasoning import without_reasoning
from ..errors import UserError
from ..settings import RewardConfig
from .interface import RewardItem, RewardResult, Rewards
from .references import digits

SCORE = r"(?i:score|rating)[*_`]*\s*(?:\([^)\n]*\)\s*)?(?:[:=：]|is\b)[*_`\s]*(-?\d+(?:\.\d+)?)"
"""Matches the word, an optional range in parentheses, a colon and the number, with or without Markdown's emphasis."""
QUESTION = """Problem:
{problem}

Reference answer:
{answer}

Response:
{response}

How good is the response? Reason briefly, then end with "Score: " and a number from 0 to 10."""


class RemoteRewards(Rewards):
    """Sends each response to a server for a verdict.

    Args:
        config: `reward.timeout_s` is the time limit of a verdict, counted from the start of its request.
        base_url: of the server, such as ``http://localhost:8000/v1``.
        model: its name on the server.
        at_once: the number of concurrent requests.
        retries: of one request, with growing waits, if the server is busy, failing or unreachable.
        api_key_env: the environment variable with the key; not needed for a server without keys.

    Raises:
        UserError: the client is not installed, or an argument is out of range.
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
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=key,
            max_retries=retries,
            timeout=config.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(mounts=past_proxies(base_url)),
        )
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
            except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
                said = " ".join(str(error).split())[:200]
                return RewardResult(None, f"{type(error).__name__}: {said}".rstrip("."))
        if not math.isfinite(value):
            return RewardResult(None, f"the judge's score is {value:g}, which is not finite")
        return RewardResult(value, None)

    @abstractmethod
    async def _ask(self, item: RewardItem) -> float:
        """Return the server's score of a response.

        Raises:
            ValueError: the server's answer cannot be used.
        """


class Judge(RemoteRewards):
    """Asks a chat model to score a response.

    The last match of ``pattern`` after the reasoning of its answer is the score, mapped from ``lowest`` ... ``highest``
    to 0 ... 1; an answer that does not end by itself has none. With ``yes`` and ``no`` its first token decides instead:
    the reward is P(yes) / (P(yes) + P(no)), as with a generative reward model.

    Args:
        prompt: the question; ``{problem}``, ``{response}`` and ``{answer}`` are replaced. The default is inferred.
        system: the system message; empty: none.
        pattern: a regular expression whose first group is the score.
        lowest, highest: range of the scores; others are errors.
        yes, no: the two words of a yes-or-no question.
        max_tokens, temperature: for sampling the model's answer.
        remote: see `RemoteRewards`.

    Raises:
        UserError: an argument is invalid, or as for `RemoteRewards`.
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
            raise UserError(f"{what} needs a prompt with {{response}}, where the response is inserted.")
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
        messages.append({"role": "user", "content": self._question(item)})
        if self._words[0]:
            return await self._share(messages)
        completion = await self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=self._max_tokens, temperature=self._temperature
        )
        choice = completion.choices[0]
        if choice.finish_reason == "length":
            raise ValueError(f"the judge's answer was cut off at max_tokens = {self._max_tokens}; raise it")
        if choice.finish_reason != "stop":
            raise ValueError(f"the judge gave no score: its answer ended with '{choice.finish_reason}'")
        text = without_reasoning(choice.message.content or "")
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise ValueError(f"the judge gave no score, but {text[-80:]!r}")
        lowest, highest = self._range
        try:
            score = float(matches[-1][1])
        except (TypeError, ValueError):
            raise ValueError(f"the judge gave no score, but {matches[-1][1]!r}") from None
        if not lowest <= score <= highest:
            raise ValueError(f"the judge gave no score from {lowest:g} to {highest:g}, but {score:g}")
        return (score - lowest) / (highest - lowest)

    def _question(self, item: RewardItem) -> str:
        return filled(self._prompt, item)

    async def _share(self, messages: list[Any]) -> float:
        """Return the share of ``yes`` in the probability of both words as the first token."""
        completion = await self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=1, temperature=self._temperature,
            logprobs=True, top_logprobs=20,
        )  # fmt: skip
        choice = completion.choices[0]  # it is cut off after its first token
        if choice.finish_reason not in ("stop", "length"):
            raise ValueError(f"the judge gave no score: its answer ended with '{choice.finish_reason}'")
        text = choice.message.content or ""
        if (text.strip() and not without_reasoning(text).strip()) or getattr(choice.message, "reasoning_content", None):
            raise ValueError("the judge gave no score: its first token begins its reasoning; ask for a score instead")
        logprobs = choice.logprobs
        first = logprobs.content[0].top_logprobs if logprobs is not None and logprobs.content else []
        yes, no = (
            sum(math.exp(t.logprob) for t in first if t.token.strip().casefold() == word.strip().casefold())
            for word in self._words
        )
        if not yes + no:
            raise ValueError(f"the judge gave no score: neither of {self._words} is among its most likely tokens")
        return yes / (yes + no)


class RewardModel(RemoteRewards):
    """Calls a sequence classifier at ``/classify``, as vLLM serves reward models.

    Args:
        text: the input; ``{prompt}`` (the prompt as the policy read it), ``{problem}``, ``{response}`` and ``{answer}``
            are replaced.
        label: the index of the output that is the reward.
        remote: see `RemoteRewards`; vLLM's ``/classify`` is not below ``/v1``, so leave that out of ``base_url``.

    Raises:
        UserError: ``text`` has no ``{response}``, or as for `RemoteRewards`.
    """

    def __init__(self, config: RewardConfig, text: str = "{prompt}{response}", label: int = 0, **remote: Any) -> None:
        if "{response}" not in text:
            raise UserError(f"reward.verifier = '{config.verifier}' needs a text with {{response}}.")
        self._text, self._label = text, label
        super().__init__(config, **remote)

    async def _ask(self, item: RewardItem) -> float:
        body = {"model": self.model, "input": filled(self._text, item)}
        classified: Any = await self._client.post("/classify", cast_to=object, body=body)
        return float(classified["data"][0]["probs"][self._label])


def past_proxies(base_url: str) -> dict[str, None]:
    """Return the mount of httpx that has no proxy asked for a server on this machine; proxies do not reach it."""
    host = urlsplit(base_url).hostname or ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
        here = address.is_loopback or address.is_unspecified
    except ValueError:
        here = host == "localhost" or host.endswith(".localhost")
    return {f"all://{f'[{host}]' if ':' in host else host}": None} if here else {}


def filled(template: str, item: RewardItem, **more: str) -> str:
    """Return ``template`` with the fields of ``item`` and ``more`` filled in; other words in braces stay.

    Halves of surrogate pairs, which no encoding has, become U+FFFD.
    """
    answer = item.entry.get("answer", "")
    values = {
        **more,
        "prompt": item.prompt,
        "problem": item.problem,
        "response": item.response_text,
        "answer": digits(answer) if type(answer) is int else str(answer),
    }
    text = re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], template)
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
