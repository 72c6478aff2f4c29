"""The endpoints: ``/v1/completions``, those of `CHATS`, ``/v1/messages/count_tokens``, ``/v1/models``, ``/health``.

Requests of all clients share the engine's batch and its cached prefixes, so each turn of a conversation is computed
once. If a client disconnects, its request is aborted. Every error has the form of its path's protocol.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from ...chat.streamed import Streamed
from ...data.segment import LeafStatus
from ...fleet.rollouts import Job, Rollouts
from ...protocols.calls import CHATS, COUNT, AnswerForm, parse, read_call
from ...protocols.form import Form, Scored
from ...protocols.grammar import Grammars
from ...protocols.http import (
    ContextLengthError,
    Events,
    RefusedError,
    handle_errors,
    read_body,
    refused,
    to_their_end,
)
from ...protocols.keys import KeyGate, key_of
from ...protocols.prompts import answer_schema, chat_prompt, completion_prompts
from ...protocols.schema import CompletionBody, Sampling
from ...rollout import Completion, RolloutEngine, SamplingParams
from ...rollout.failing import by_its_constraints
from ...rollout.native.scheduler import TooLargeError

Body = TypeVar("Body", bound=Sampling)
T = TypeVar("T")
MOST_TOKENS = 4096
"""Longest answer of a chat, in tokens, if neither the request nor the engine has a limit."""
LOOK_S = 0.5  # between checks whether a client is still connected


class Training(Protocol):
    """A training service of the same engine, whose saved adapters are models of this server too."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return what is entered for the server's life, once the engine's thread runs."""

    def models(self, key: bytes) -> list[str]:
        """Return the names of the adapters that the sender of a key has saved."""

    def knows(self, model: str, key: bytes) -> bool:
        """Return whether the sender of a key may sample with an adapter."""

    async def lend(self, model: str, key: bytes) -> tuple[str | None, Callable[[], None]]:
        """Return the engine's name of an adapter, and the function that ends its use.

        Raises:
            RefusedError: the sender of the key has no such adapter.
        """


def make_app(
    engine: RolloutEngine,
    name: str,
    *,
    api_key: str | None = None,
    stalled_after_s: float = 60.0,
    training: Callable[[FastAPI, Rollouts], Training] | None = None,
) -> FastAPI:
    """Make the server of ``engine``.

    Args:
        engine: the engine; from then on only the server may step it.
        name: name of the model for clients.
        api_key: key that clients must send (`KeyGate`); None: they need none.
        stalled_after_s: ``/health`` answers 503 if a step takes longer, in seconds.
        training: adds the endpoints of a training service of the same engine, and returns it; None: there is none.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    service = Service(engine, name, Rollouts(engine, stalled_after_s=stalled_after_s))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.rollouts.start()
        async with nullcontext() if service.training is None else service.training.running():
            yield
        service.rollouts.stop()

    app = FastAPI(title="rolltree", lifespan=lifespan)
    service.training = None if training is None else training(app, service.rollouts)
    if api_key is not None:
        app.add_middleware(KeyGate, key=api_key)
    handle_errors(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        well, details = service.rollouts.health()
        return JSONResponse(details, 200 if well else 503)

    _add_models(app, service)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        raw = await read_body(http)
        task = await service.aside(partial(service.completion, raw, key_of(http.headers)))
        return await service.answer(task, http)

    async def chat(http: Request) -> Response:
        raw = await read_body(http)
        task = await service.aside(partial(service.chat, http.url.path, raw, key_of(http.headers)))
        return await service.answer(task, http)

    for path in CHATS:
        app.add_api_route(path, chat, methods=["POST"])

    @app.post(COUNT)
    async def count(http: Request) -> JSONResponse:
        raw = await read_body(http)
        tokens = await service.aside(partial(service.count, raw, key_of(http.headers)))
        return JSONResponse({"input_tokens": tokens})

    return app


def _add_models(app: FastAPI, service: Service) -> None:
    """Add the endpoints that tell which models there are: the server's, and those that a key has saved."""

    def card(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "rolltree"}

    @app.get("/v1/models")
    async def models(http: Request) -> dict[str, Any]:
        saved = await service.aside(partial(service.saved, key_of(http.headers)))
        return {"object": "list", "data": [card(model) for model in (service.name, *saved)]}

    @app.get("/v1/models/{model:path}")  # a name may have slashes, as on the Hub
    async def model(model: str, http: Request) -> dict[str, Any]:
        await service.aside(partial(service.check_model, model, key_of(http.headers)))
        return card(model)


@dataclass(frozen=True)
class Task:
    """A checked request."""

    prompts: list[list[int]]
    model: str
    params: SamplingParams | None  # None: nothing is sampled
    form: AnswerForm
    top: int
    n: int
    """Number of choices returned for each prompt: the likeliest of ``params.n``."""
    echo: bool = False
    stream: bool = False
    ignored: Sequence[str] = ()
    """Fields of the body that ask for something and have no effect."""
    adapter: str | None = None
    """The engine's name of the model, if it is an adapter."""

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
        self.training: Training | None = None
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self._grammars = Grammars(self.tokenizer, engine.vocabulary)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="rolltree-prompts")

    async def aside(self, function: Callable[[], T]) -> T:
        """Run a long function in a thread; a ValueError becomes a refusal of the request."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except ValueError as wrong:
            raise refused(wrong) from wrong

    def saved(self, key: bytes) -> list[str]:
        """Return the names of the adapters that the sender of a key has saved."""
        return [] if self.training is None else self.training.models(key)

    def check_model(self, model: str, key: bytes) -> None:
        """Refuse a request for a model that its sender does not have, as OpenAI does."""
        if model != self.name and (self.training is None or not self.training.knows(model, key)):
            raise RefusedError(f"There is no model '{model}' here; this is '{self.name}'.", 404, "model_not_found")

    # -- bodies; a ValueError names the mistake in the request --------------------------------------------------------

    def completion(self, raw: bytes, key: bytes) -> Task:
        body, model = self._checked(parse(CompletionBody, raw), key)
        prompts = completion_prompts(self.tokenizer, body)
        n, most = body.n or 1, 16 if body.max_tokens is None else body.max_tokens
        best_of, echo = body.best_of or n, bool(body.echo)
        if best_of < n:
            raise ValueError(f"`best_of` is {best_of}, fewer than the {n} choices that `n` asks for.")
        if body.stream and (echo or best_of > n):
            raise ValueError("`echo` and `best_of` are for answers in one piece; leave out `stream`.")
        if most == 0 and not echo:
            raise ValueError("`max_tokens` is 0; ask for at least one, or for the prompt itself with `echo`.")
        params = self._params(body, body.logprobs, best_of, most, len(prompts)) if most else None
        stop = () if params is None else tuple(params.stop)
        form = Form(self.tokenizer, model, body, stop, chat=False, logprobs=body.logprobs is not None)
        return Task(prompts, model, params, form, body.logprobs or 0, n, echo, bool(body.stream))

    def chat(self, path: str, raw: bytes, key: bytes) -> Task:
        call = read_call(path, raw)
        body, model = self._checked(call.chat, key)
        if body.top_logprobs and not body.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs` to be true.")
        prompt, ignored = chat_prompt(self.tokenizer, body)
        room = self.engine.room(len(prompt))
        most = body.max_completion_tokens or body.max_tokens or max(MOST_TOKENS if room is None else room, 1)
        top = (body.top_logprobs or 0) if body.logprobs else None
        n = body.n or 1
        if body.best_of not in (None, n):
            raise ValueError(f"`best_of` is {body.best_of}, but a chat gives all {n} of its `n` choices; leave it out.")
        params = self._params(body, top, n, most, 1)
        form = call.form(self.tokenizer, model, tuple(params.stop))
        form.asked(prompt)
        ignored = [*ignored, *call.ignored]
        return Task([prompt], model, params, form, top or 0, n, stream=bool(body.stream), ignored=ignored)

    def count(self, raw: bytes, key: bytes) -> int:
        """Return the number of tokens of a conversation."""
        body, _ = self._checked(read_call(COUNT, raw).chat, key)
        return len(chat_prompt(self.tokenizer, body).ids)

    def _checked(self, body: Body, key: bytes) -> tuple[Body, str]:
        """Return a body whose model its sender has, and the model's name."""
        model = self.name if body.model is None else body.model
        self.check_model(model, key)
        if body.stream_options is not None and not body.stream:
            raise ValueError("`stream_options` needs `stream` to be true.")
        return body, model

    def _params(self, body: Sampling, top: int | None, n: int, most: int, prompts: int) -> SamplingParams:
        schema = answer_schema(body)
        grammar = None if schema is None else self._grammars.of_schema(schema, n * prompts)
        return body.sampling_params(n=n, most=most, top_logprobs=top or 0, seed=secrets.randbits(63), grammar=grammar)

    # -- answers ----------------------------------------------------------------------------------------------------

    async def answer(self, task: Task, http: Request) -> Response:
        with ExitStack() as held:  # what is in use until the answer ends
            if task.model != self.name and self.training is not None:
                adapter, give_back = await self.training.lend(task.model, key_of(http.headers))
                held.callback(give_back)
                task = replace(task, adapter=adapter)
            scored: list[Scored | None] = [None] * len(task.prompts)
            try:
                if task.echo and isinstance(task.form, Form) and task.form.logprobs:
                    for i, prompt in enumerate(task.prompts):
                        score_prompt = partial(self.engine.prompt_logprobs, prompt, task.top, task.adapter)
                        scored[i] = Scored.of_prompt(prompt, await self.rollouts.call(score_prompt))
                job = await self._submit(task)
            except ValueError as wrong:
                raise refused(wrong) from wrong
            if job is None:
                return JSONResponse(self._whole(task, [[_EMPTY] * task.n for _ in task.prompts], scored))
            held.callback(self.rollouts.finished, job)
            if task.stream:
                events = to_their_end(self._events(job, task), task.form, http.url.path)
                return Events(events, held.pop_all().close, task.headers)
            while not job.done:
                try:
                    await asyncio.wait_for(job.changed.wait(), LOOK_S)
                except TimeoutError:
                    if await http.is_disconnected():
                        raise ClientDisconnect from None
        _check_job(job)
        choices = [rollout.completions() for rollout in job.rollouts]
        if failing := next((c.error for of_prompt in choices for c in of_prompt if c.error), None):
            raise _no_answer(task, failing)
        return JSONResponse(self._whole(task, choices, scored), headers=task.headers)

    async def _submit(self, task: Task) -> Job | None:
        if task.params is None:
            return None
        seeds = [(task.params.seed + i) % 2**64 for i in range(len(task.prompts))]
        params = [replace(task.params, adapter=task.adapter)] * len(task.prompts)
        return await self.rollouts.submit(task.prompts, params, seeds, watched=task.stream)

    @staticmethod
    def _whole(task: Task, choices: Sequence[Sequence[Completion]], scored: Sequence[Scored | None]) -> dict[str, Any]:
        return task.form.whole(task.prompts, choices, scored, n=task.n, echo=task.echo)

    async def _events(self, job: Job, task: Task) -> AsyncIterator[str]:
        """Yield server-sent events, each with the text that has become final and the tokens since the previous one."""
        form, n = task.form, task.n
        choices: dict[int, Streamed] = defaultdict(form.streamed)
        yield form.begin(task.prompts)
        while not job.done:
            await job.changed.wait()
            job.changed.clear()
            for i, branches in enumerate(job.progress):
                for branch, records in branches.items() if form.tool is None else ():
                    index = i * n + branch[0]
                    choice = choices[index]
                    if told := choice.add(records["token"][choice.seen :].tolist()):
                        yield form.part(index, choice, told, records)
        _check_job(job)
        written = 0
        for i, rollout in enumerate(job.rollouts):
            for j, completion in enumerate(rollout.completions()):
                index, written = i * n + j, written + len(completion.token_ids)
                if completion.error:
                    raise _no_answer(task, completion.error)
                yield form.last(index, choices[index], completion, task.prompts)
        yield form.close(task.prompts, written)


_NONE, _NO_IDS = np.zeros(0, np.float32), np.zeros(0, np.int32)
_EMPTY = Completion(
    _NO_IDS, np.zeros(0, np.int8), _NONE, _NONE, _NONE, _NO_IDS, [], None, LeafStatus.LENGTH, None
)  # the answer to a request that samples nothing


def _check_job(job: Job) -> None:
    """Raise RefusedError if a job has no answers."""
    if job.error is not None:
        raise RefusedError(str(job.error), 500)
    error = next((rollout.error for rollout in job.rollouts if rollout.error is not None), None)
    if isinstance(error, TooLargeError):
        raise ContextLengthError(error.too_long)
    if error is not None:
        raise RefusedError(str(error) or type(error).__name__, 500)


def _no_answer(task: Task, why: str) -> RefusedError:
    """Return the refusal of a request whose answer has failed."""
    by_constraints = task.params is not None and by_its_constraints(task.params, why)
    return RefusedError(f"The answer cannot go on: {why}." if by_constraints else why, 400 if by_constraints else 500)
