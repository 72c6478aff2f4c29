"""A model on a server with OpenAI's protocol that tells the log-probs of given tokens.

Two forms of the endpoint ``completions`` tell them: vLLM's ``prompt_logprobs``, and ``echo`` with
``return_tokens_as_token_ids``, which vLLM and `rolltree serve` have. The first question finds out which one the server
answers, and whether its tokenizer is the policy's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .form import LEAST_LOGPROB, NAMED

PROBED = 48
"""Tokens of the question that compares tokenizers."""
FIRST_WAIT_S = 0.25
"""Seconds before the first retry; each further one waits twice as long."""

Table = dict[int, float]
"""Log-probs by token id, of the likeliest tokens at a place and of the token that stands there."""


class Known(NamedTuple):
    """Log-probs of the n tokens of a sequence after its first ones, in nats."""

    logprob: npt.NDArray[np.float32]  # [n], of the tokens themselves
    ids: npt.NDArray[np.int32]  # [n, K], the likeliest tokens and the token itself, likeliest first; -1: none
    logprobs: npt.NDArray[np.float32]  # [n, K], of these; 0 where there is none


class _NoAnswerError(Exception):
    """The server's answer cannot be read."""


class ScoringServer:
    """Asks a server for log-probs, many questions at once.

    Args:
        url: of the server, such as ``http://localhost:8000/v1``.
        model: the name there; None: the only one.
        top: number of likeliest tokens to ask for at each place.
        at_once: number of concurrent questions.
        timeout_s: time limit of one question, in seconds.
        retries: of a question to a server that is busy, late, failing or unreachable, or whose answer cannot be read.
        api_key_env: environment variable with the key; not needed for a server without keys.

    Raises:
        UserError: OpenAI's client is not installed.
    """

    def __init__(
        self, url: str, model: str | None, *, top: int, at_once: int, timeout_s: float, retries: int, api_key_env: str
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError(
                'A teacher with a `url` needs OpenAI\'s client; install it with `pip install "rolltree[judge]"`.'
            ) from error
        self.url, self.model, self.top = url, model, top
        self._at_once, self._timeout_s, self._retries = at_once, timeout_s, retries
        self._key, self._openai = os.environ.get(api_key_env) or "none", openai
        self._form: type[_PromptLogprobs] | type[_Echo] = _PromptLogprobs

    def check(self, tokenizer: Any, vocabulary: int) -> None:
        """Find out how the server answers, and check that its tokenizer is ``tokenizer``.

        Args:
            vocabulary: rows of the policy's head.

        Raises:
            UserError: it answers in neither form, or has other tokens; or as `score`.
        """
        ids, refusals = _probe(tokenizer, vocabulary), []
        for form in (_PromptLogprobs, _Echo):
            self._form = form
            try:
                (texts,) = asyncio.run(self._all([ids], form.texts, form.asks_texts))
                self.score([ids], [1], vocabulary)
            except UserError as error:
                refusals.append(str(error))
                continue
            for token, text in zip(ids[1:], texts[1:], strict=True):
                if text != (here := tokenizer.decode([token])):
                    raise UserError(
                        f"The teacher at '{self.url}' has another tokenizer than the policy: token {token} is {text!r} "
                        f"there and {here!r} here; use a teacher with the policy's tokenizer."
                    )
            return
        raise UserError("\n".join(dict.fromkeys(refusals)))

    def score(self, sequences: Sequence[Sequence[int]], first: Sequence[int], vocabulary: int) -> list[Known]:
        """Return the log-probs of the tokens of each sequence from the place ``first``, at least 1, on.

        Raises:
            UserError: the server has not answered within the retries, refused a question, or named a token that the
                policy's ``vocabulary`` does not have.
        """
        answers = asyncio.run(self._all(sequences, self._form.tables, {}))
        scored = zip(sequences, answers, first, strict=True)
        return [self._known(ids[begin:], tables[begin:], vocabulary) for ids, tables, begin in scored]

    def _known(self, tokens: Sequence[int], tables: Sequence[Table], vocabulary: int) -> Known:
        most = max((max(table) for table in tables), default=0)
        if most >= vocabulary:
            raise UserError(
                f"The teacher at '{self.url}' has another vocabulary than the policy: it names token {most}, and the "
                f"policy's has {vocabulary} tokens; use a teacher with the policy's tokenizer."
            )
        K = self.top + 1
        ids = np.full((len(tokens), K), -1, np.int32)
        logprobs = np.zeros((len(tokens), K), np.float32)
        for row, (token, table) in enumerate(zip(tokens, tables, strict=True)):
            likeliest = sorted(table, key=table.__getitem__, reverse=True)
            kept = [i for place, i in enumerate(likeliest) if place < self.top or i == token]
            ids[row, : len(kept)], logprobs[row, : len(kept)] = kept, [table[i] for i in kept]
        return Known(np.array([t[i] for i, t in zip(tokens, tables, strict=True)], np.float32), ids, logprobs)

    async def _all(
        self, sequences: Sequence[Sequence[int]], read: Callable[[Any, Sequence[int]], Any], more: dict[str, Any]
    ) -> list[Any]:
        """Return what ``read`` reads of the server's choice for each sequence."""
        places, options = asyncio.Semaphore(self._at_once), {}
        if urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"):  # past a proxy of the environment
            options["http_client"] = self._openai.DefaultAsyncHttpxClient(trust_env=False)
        async with self._openai.AsyncOpenAI(
            base_url=self.url, api_key=self._key, max_retries=0, timeout=self._timeout_s, **options
        ) as client:
            if self.model is None:
                self.model = await self._patiently(lambda: self._only_model(client))

            async def ask(ids: Sequence[int]) -> Any:
                question = {**self._form.question(self.top), **more}
                complete = client.completions.with_raw_response.create
                answer = await complete(model=self.model, prompt=list(ids), **question)
                try:
                    (choice,) = json.loads(answer.http_response.content)["choices"]
                    return read(choice, ids)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise _NoAnswerError(f"it tells no log-probs of the tokens ({error})") from error

            async def one(ids: Sequence[int]) -> Any:
                async with places:
                    return await self._patiently(lambda: ask(ids))

            tasks = [asyncio.create_task(one(ids)) for ids in sequences]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _only_model(self, client: Any) -> str:
        try:
            names = [str(model.id) for model in (await client.models.list()).data]
        except (TypeError, AttributeError) as error:
            raise _NoAnswerError(f"it lists no models ({error})") from error
        if len(names) != 1:
            raise UserError(
                f"The teacher at '{self.url}' has {len(names)} models ({', '.join(names)[:200]}); choose one by "
                "the teacher's `model`."
            )
        return names[0]

    async def _patiently(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return what ``ask`` does, which is called again after an error that may pass."""
        openai, wait, said = self._openai, FIRST_WAIT_S, ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(wait)
                wait *= 2
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await ask()
            except (TimeoutError, openai.APITimeoutError):
                said = f"it has not answered within {self._timeout_s:g} s"
            except openai.APIStatusError as error:
                said = f"it answers {error.status_code}: {' '.join(str(error).split())[:200]}"
                if error.status_code < 500 and error.status_code not in (408, 409, 429):
                    raise UserError(f"The teacher at '{self.url}' refuses a question: {said.rstrip('.')}.") from error
            except (openai.OpenAIError, _NoAnswerError) as error:
                said = " ".join(str(error).split())[:200].rstrip(".")
        raise UserError(
            f"The teacher at '{self.url}' failed {self._retries + 1} times, the last time because {said}; see its log, "
            "or raise the teacher's `timeout_s` or `retries`."
        )


def _probe(tokenizer: Any, vocabulary: int) -> list[int]:
    """Return tokens of plain text, spread over the vocabulary."""
    last = min(vocabulary, len(tokenizer)) - 1
    spread = dict.fromkeys(np.linspace(0, last, 8 * PROBED).astype(int).tolist())
    special = set(tokenizer.all_special_ids)
    texts = {i: tokenizer.decode([i]) for i in spread if i not in special}
    plain = [i for i, text in texts.items() if text.isascii() and text.strip()]
    return plain[:: max(1, len(plain) // PROBED)]


def _logprob(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-3:  # NaN is not
        raise ValueError(f"{value!r} is no log-prob")
    return max(float(value), LEAST_LOGPROB)


def _at_places(tables: Sequence[Any], ids: Sequence[int]) -> None:
    """Check that there is a table for each token, and that it has the token."""
    if len(tables) != len(ids):
        raise ValueError(f"{len(tables)} places for {len(ids)} tokens")
    if missing := [i for i, (table, token) in enumerate(zip(tables, ids, strict=True)) if i and token not in table]:
        raise ValueError(f"no log-prob of the token at place {missing[0]}")


class _PromptLogprobs:
    """vLLM's field: at each place but the first a table by ids."""

    asks_texts: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def question(top: int) -> dict[str, Any]:
        return {"max_tokens": 1, "extra_body": {"prompt_logprobs": top}}

    @staticmethod
    def tables(choice: Any, ids: Sequence[int]) -> list[Table]:
        told = choice["prompt_logprobs"]
        tables = [{}, *({int(i): _logprob(e["logprob"]) for i, e in table.items()} for table in told[1:])]
        _at_places(tables, ids)
        return tables

    @staticmethod
    def texts(choice: Any, ids: Sequence[int]) -> list[str]:
        told = choice["prompt_logprobs"]
        _at_places([{}, *({int(i) for i in table} for table in told[1:])], ids)
        return ["", *(table[str(token)]["decoded_token"] for table, token in zip(told[1:], ids[1:], strict=True))]


class _Echo:
    """OpenAI's echo of the prompt, with tokens named by ids; their texts are told where these are not asked for."""

    asks_texts: ClassVar[dict[str, Any]] = {"extra_body": {}}

    @staticmethod
    def question(top: int) -> dict[str, Any]:
        ids = {"return_tokens_as_token_ids": True}
        return {"max_tokens": 0, "echo": True, "logprobs": top, "extra_body": ids}

    @staticmethod
    def tables(choice: Any, ids: Sequence[int]) -> list[Table]:
        told = choice["logprobs"]
        tables: list[Table] = [{}]
        names = (told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:])
        for name, value, others in zip(*names, strict=True):
            of_place = {_id(other): _logprob(of_other) for other, of_other in (others or {}).items()}
            tables.append(of_place | {_id(name): _logprob(value)})
        _at_places(tables, ids)
        return tables

    @staticmethod
    def texts(choice: Any, ids: Sequence[int]) -> list[str]:
        told = choice["logprobs"]["tokens"]
        if len(told) != len(ids):
            raise ValueError(f"{len(told)} places for {len(ids)} tokens")
        return [str(text) for text in told]


def _id(name: str) -> int:
    if not name.startswith(NAMED):
        raise ValueError(f"a token is named {name[:20]!r}, not by its id")
    return int(name.removeprefix(NAMED))
