"""The endpoints: ``/v1/models``, ``/v1/models/NAME``, ``/v1/completions``, ``/v1/chat/completions``, ``/health``.

Requests of all clients share the engine's batch and its cached prefixes, so each turn of a conversation is computed
once. If a client disconnects, its request is aborted. Every error has OpenAI's format.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ...data.segment import LeafStatus
from ...rollout import Completion, RolloutEngine, SamplingParams
from .form import Form, Scored, error, event, usage
from .grammar import Grammars
from .keys import KeyGate
from .prompts import Offered, answer_schema, chat_prompt, completion_prompts, forced_tool, offered_tools
from .rollouts import EngineFailedError, Job, Rollouts
from .schema import ChatBody, CompletionBody, Sampling
from .streamed import Streamed

Body = TypeVar("Body", bound=Sampling)
T = TypeVar("T")
MOST_BYTES = 16 << 20
"""Largest body, in bytes; it is parsed and tokenised before its length in tokens is known."""
MOST_TOKENS = 4096
"""Longest answer of a chat, in tokens, if neither the request nor the engine has a limit."""
LOOK_S = 0.5  # between checks whether a client is still connected


class RefusedError(Exception):
    """A request that cannot be served; the message is one sentence, ``code`` OpenAI's name of the mistake, if any."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def make_app(engine: RolloutEngine, name: str, *, api_key: str | None = None, stalled_after_s: float = 60.0) -> FastAPI:
    """Make the server of ``engine``.

    Args:
        engine: the engine; from then on only the server may step it.
        name: name of the model for clients.
        api_key: key that clients must send (`KeyGate`); None: they need none.
        stalled_after_s: ``/health`` answers 503 if a step takes longer, in seconds.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    service = Service(engine, name, Rollouts(engine, stalled_after_s=stalled_after_s))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.rollouts.start()
        yield
        service.rollouts.stop()

    app = FastAPI(title="rolltree", lifespan=lifespan)
    if api_key is not None:
        app.add_middleware(KeyGate, key=api_key)
    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _fail)

    @app.get("/health")
    async def health() -> JSONResponse:
        well, known = service.rollouts.health()
        return JSONResponse(known, 200 if well else 503)

    card = {"id": name, "object": "model", "created": 0, "owned_by": "rolltree"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")  # a name may have slashes, as on the Hub
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return card

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        raw = await _read(http)
        return await service.answer(await service.aside(partial(service.completion, raw)), http)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        raw = await _read(http)
        return await service.answer(await service.aside(partial(service.chat, raw)), http)

    return app


@dataclass(frozen=True)
class Task:
    """A checked request."""

    body: Sampling
    prompts: list[list[int]]
    params: SamplingParams | None  # None: nothing is sampled
    form: Form
    top: int
    n: int
    """Number of choices returned for each prompt: the likeliest of ``params.n``."""
    echo: bool = False
    ignored: Sequence[str] = ()
    """Fields of the body that this model's template does not know."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-rolltree-ignored": ", ".join(self.ignored)} if self.ignored else {}


class Service:
    """Checks requests, submits them to the engine and formats their answers."""

    def __init__(self, engine: RolloutEngine, name: str, rollouts: Rollouts) -> None:
        if engine.tokenizer is None:
            raise ValueError("A server takes and returns texts, so its engine needs a tokenizer.")
        self.engine = engine
        self.name = name
        self.rollouts = rollouts
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self._grammars = Grammars(self.tokenizer, engine.vocabulary)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="rolltree-prompts")

    async def aside(self, function: Callable[[], T]) -> T:
        """Run a long function in a thread; a ValueError becomes a refusal of the request."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except ValueError as wrong:
            raise RefusedError(str(wrong)) from wrong

    def check_model(self, model: str) -> None:
        """Refuse a request for another model, as OpenAI does."""
        if model != self.name:
            raise RefusedError(f"There is no model '{model}' here; this is '{self.name}'.", 404, "model_not_found")

    # -- bodies; a ValueError names the mistake in the request --------------------------------------------------------

    def completion(self, raw: bytes) -> Task:
        body = self._body(CompletionBody, raw)
        prompts = completion_prompts(self.tokenizer, body)
        n, most = body.n or 1, 16 if body.max_tokens is None else body.max_tokens
        best_of, echo = body.best_of or n, bool(body.echo)
        if best_of < n:
            raise ValueError(f"`best_of` is {best_of}, fewer than the {n} choices that `n` asks for.")
        if body.stream and (echo or best_of > n):
            raise ValueError("`echo` and `best_of` are for answers in one piece; leave out `stream`.")
        if most == 0 and not echo:
            raise ValueError("`max_tokens` is 0; ask for at least one, or for the prompt itself with `echo`.")
        return self._task(body, prompts, body.logprobs, n, best_of, most, chat=False, echo=echo)

    def chat(self, raw: bytes) -> Task:
        body = self._body(ChatBody, raw)
        if body.top_logprobs and not body.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs` to be true.")
        prompt, ignored = chat_prompt(self.tokenizer, body)
        room = self.engine.room(len(prompt))
        most = body.max_completion_tokens or body.max_tokens or max(MOST_TOKENS if room is None else room, 1)
        top = (body.top_logprobs or 0) if body.logprobs else None
        n = body.n or 1
        if body.best_of not in (None, n):
            raise ValueError(f"`best_of` is {body.best_of}, but a chat gives all {n} of its `n` choices; leave it out.")
        seen = offered_tools(self.tokenizer, body)
        task = self._task(body, [prompt], top, n, n, most, chat=True, tool=forced_tool(body), tools=seen)
        return replace(task, ignored=ignored)

    def _body(self, kind: type[Body], raw: bytes) -> Body:
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as wrong:
            first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if "[" not in str(part) and part not in ("str", "int"))
            raise ValueError(f"`{where}`: {first['msg']}." if where else f"{first['msg']}.") from None
        self.check_model(self.name if body.model is None else body.model)
        if body.stream_options is not None and not body.stream:
            raise ValueError("`stream_options` needs `stream` to be true.")
        return body

    def _task(
        self,
        body: Sampling,
        prompts: list[list[int]],
        top: int | None,
        n: int,
        best_of: int,
        most: int,
        *,
        chat: bool,
        echo: bool = False,
        tool: str | None = None,
        tools: Offered | None = None,
    ) -> Task:
        params = None
        if most:
            schema = answer_schema(body)
            grammar = None if schema is None else self._grammars.of_schema(schema, best_of * len(prompts))
            seed = secrets.randbits(63)
            params = body.sampling_params(n=best_of, most=most, top_logprobs=top or 0, seed=seed, grammar=grammar)
        stop = () if params is None else params.stop
        most_calls = 1 if isinstance(body, ChatBody) and body.parallel_tool_calls is False else None
        form = Form(
            self.tokenizer,
            self.name,
            body,
            stop,
            chat=chat,
            logprobs=top is not None,
            tool=tool,
            tools=tools,
            most_calls=most_calls,
        )
        return Task(body, prompts, params, form, top or 0, n, echo)

    # -- answers ----------------------------------------------------------------------------------------------------

    async def answer(self, task: Task, http: Request) -> Response:
        scored: list[Scored | None] = [None] * len(task.prompts)
        try:
            if task.echo and task.form.logprobs:
                for i, prompt in enumerate(task.prompts):
                    records = await self.rollouts.call(partial(self.engine.prompt_logprobs, prompt, task.top))
                    scored[i] = Scored.of_prompt(prompt, records)
            job = await self._submit(task)
        except ValueError as wrong:
            raise RefusedError(str(wrong)) from wrong
        if job is None:
            nothing = [Scored() for _ in task.prompts]
            return JSONResponse(self._whole(task, [[_EMPTY] * task.n for _ in nothing], scored))
        if task.body.stream:
            return Events(self._events(job, task), partial(self.rollouts.finished, job), task.headers)
        try:
            while not job.done:
                try:
                    await asyncio.wait_for(job.changed.wait(), LOOK_S)
                except TimeoutError:
                    if await http.is_disconnected():
                        raise ClientDisconnect from None
        finally:
            self.rollouts.finished(job)
        if failed := _failure(job):
            return JSONResponse(error(failed, "server_error", 500), 500)
        choices = [rollout.completions() for rollout in job.rollouts]
        if failing := next((c.error for some in choices for c in some if c.error), None):
            return JSONResponse(error(failing, "server_error", 500), 500)
        return JSONResponse(self._whole(task, choices, scored), headers=task.headers)

    async def _submit(self, task: Task) -> Job | None:
        if task.params is None:
            return None
        seeds = [(task.params.seed + i) % 2**64 for i in range(len(task.prompts))]
        params = [task.params] * len(task.prompts)
        return await self.rollouts.submit(task.prompts, params, seeds, watched=bool(task.body.stream))

    @staticmethod
    def _whole(task: Task, choices: Sequence[Sequence[Completion]], scored: Sequence[Scored | None]) -> dict[str, Any]:
        form = task.form
        answers: list[dict[str, Any]] = []
        for prompt, some, before in zip(task.prompts, choices, scored, strict=True):
            echoed = form.decode(prompt) if task.echo else ""
            answers += [form.choice(len(answers) + i, c, echoed, before) for i, c in enumerate(_best(some, task.n))]
        written = sum(len(c.token_ids) for some in choices for c in some)
        return {**form.head(""), "choices": answers, "usage": usage(task.prompts, written)}

    async def _events(self, job: Job, task: Task) -> AsyncIterator[str]:
        """Yield server-sent events, each with the text that has become final and the tokens since the previous one."""
        form, n = task.form, task.n
        choices: dict[int, Streamed] = defaultdict(form.streamed)
        while not job.done:
            await job.changed.wait()
            job.changed.clear()
            for i, branches in enumerate(job.progress):
                for branch, records in branches.items() if form.tool is None else ():
                    index = i * n + branch[0]
                    choice, first = choices[index], not choices[index].begun
                    if text := choice.add(records["token"][choice.seen :].tolist()):
                        new = Scored.of_records(records[choice.tokens :]) if form.logprobs else Scored()
                        yield event(form.chunk(index, text, new, choice.offset, first=first))
                        choice.tokens, choice.offset = len(records), choice.offset + form.width(new.tokens)
        if failed := _failure(job):
            yield event(error(failed, "server_error", 500))
        written = 0
        for i, rollout in enumerate(job.rollouts if job.error is None else ()):
            for j, completion in enumerate(rollout.completions() if rollout.error is None else ()):
                index, written = i * n + j, written + len(completion.token_ids)
                if completion.error:
                    yield event(error(completion.error, "server_error", 500))
                yield event(form.last_chunk(index, choices[index], completion))
        if task.body.stream_options is not None and task.body.stream_options.include_usage:
            yield event({**form.head(".chunk"), "choices": [], "usage": usage(task.prompts, written)})
        yield "data: [DONE]\n\n"


class Events(StreamingResponse):
    """A stream that calls ``ended`` when it is over, even if it never started."""

    def __init__(self, content: AsyncIterator[str], ended: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._ended()


_NONE, _NO_IDS = np.zeros(0, np.float32), np.zeros(0, np.int32)
_EMPTY = Completion(
    _NO_IDS, np.zeros(0, np.int8), _NONE, _NONE, _NONE, _NO_IDS, [], None, LeafStatus.LENGTH, None
)  # the answer to a request that samples nothing


def _best(choices: Sequence[Completion], n: int) -> Sequence[Completion]:
    """Return the ``n`` choices with the highest mean log-prob of their tokens."""
    if len(choices) <= n:
        return choices
    return sorted(choices, key=lambda c: -float(c.raw_logprobs.mean()))[:n]


def _failure(job: Job) -> str | None:
    found: EngineFailedError | Exception | None = job.error
    found = found or next((rollout.error for rollout in job.rollouts if rollout.error is not None), None)
    return None if found is None else str(found) or type(found).__name__


async def _read(http: Request) -> bytes:
    """Read the body, up to `MOST_BYTES`."""
    too_long = RefusedError(f"The body exceeds {MOST_BYTES >> 20} MiB; send less at once.", 413)
    if (
        http.headers.get("content-length", "0").isdecimal()
        and int(http.headers.get("content-length", "0")) > MOST_BYTES
    ):
        raise too_long
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise too_long
        parts.append(part)
    return b"".join(parts)


async def _refuse(http: Request, wrong: Exception) -> JSONResponse:
    if isinstance(wrong, HTTPException):  # unknown path, or wrong method
        message = f"{http.method} {http.url.path}: {wrong.detail}."
        return JSONResponse(
            error(message, "invalid_request_error", wrong.status_code), wrong.status_code, wrong.headers
        )
    assert isinstance(wrong, RefusedError)
    return JSONResponse(error(str(wrong), "invalid_request_error", wrong.code or wrong.status), wrong.status)


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


async def _fail(_: Request, wrong: Exception) -> JSONResponse:
    message = " ".join(f"{type(wrong).__name__}: {wrong}".split())[:500]
    return JSONResponse(error(message, "server_error", 500), 500)
