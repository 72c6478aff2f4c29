"""The endpoints: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/health``.

Requests of all clients share the engine's batch and its cached prefixes, so the turns of a conversation are computed
once. A client that hangs up aborts its request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedTokenizerBase

from ...data.segment import LeafStatus
from ...rollout import Completion, RolloutEngine, SamplingParams
from ...rollout import Request as Rollout
from .schema import ChatBody, CompletionBody, Sampling

REASONS = {LeafStatus.STOP: "stop", LeafStatus.LENGTH: "length"}


def make_app(engine: RolloutEngine, name: str) -> FastAPI:
    """The server of ``engine``, whose model clients know as ``name``."""
    service = Service(engine, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        driver = asyncio.create_task(service.drive())
        yield
        driver.cancel()

    app = FastAPI(title="rolltree", lifespan=lifespan)
    app.add_exception_handler(ValueError, _refuse)  # what the client asked for cannot be done; one sentence
    app.add_exception_handler(RequestValidationError, _refuse)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "policy_version": engine.policy_version}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rolltree"}]}

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Any:
        prompts = service.prompts(body.prompt)
        params = body.sampling_params(body.max_tokens, body.logprobs or 0, secrets.randbits(63))
        return await service.answer(body, prompts, params, http, chat=False, logprobs=body.logprobs is not None)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Any:
        prompt = service.chat_prompt(body)
        asked = body.max_completion_tokens or body.max_tokens
        most = asked or max((engine.longest or len(prompt) + 4096) - len(prompt), 1)
        params = body.sampling_params(most, body.top_logprobs if body.logprobs else 0, secrets.randbits(63))
        return await service.answer(body, [prompt], params, http, chat=True, logprobs=body.logprobs)

    return app


class Service:
    """Between HTTP and the engine's steps."""

    def __init__(self, engine: RolloutEngine, name: str) -> None:
        if engine.tokenizer is None:
            raise ValueError("A server speaks in texts, so its engine needs a tokenizer.")
        self.engine = engine
        self.name = name
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self._stepped = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._numbers = itertools.count()

    async def drive(self) -> None:
        """Step the engine while anything is asked of it."""
        while True:
            await self._wanted.wait()
            while self.engine.loop.busy:
                await asyncio.to_thread(self.engine.step)
                async with self._stepped:
                    self._stepped.notify_all()
            self._wanted.clear()

    # -- prompts ----------------------------------------------------------------------------------------------------

    def prompts(self, given: Any) -> list[list[int]]:
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise ValueError("`prompt` is empty; give a text or token ids.")
        return [self.tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in given]

    def chat_prompt(self, body: ChatBody) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.name} has no chat template; use /v1/completions.")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        ids = self.tokenizer.apply_chat_template(
            messages,
            tools=body.tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **body.chat_template_kwargs,
        )
        return cast("list[int]", ids)

    # -- answers ----------------------------------------------------------------------------------------------------

    async def answer(
        self,
        body: Sampling,
        prompts: list[list[int]],
        params: SamplingParams,
        http: Request,
        *,
        chat: bool,
        logprobs: bool,
    ) -> Any:
        if body.model not in (None, self.name):
            raise ValueError(f"There is no model '{body.model}' here; this is '{self.name}'.")
        rollouts = self.engine.submit(prompts, params, seeds=[params.seed + i for i in range(len(prompts))])
        self._wanted.set()
        form = Form(self, body, params, chat=chat, logprobs=logprobs)
        if body.stream:
            return StreamingResponse(self._events(rollouts, form), media_type="text/event-stream")
        async for _ in self._progress(rollouts):
            if await http.is_disconnected():
                break
        if failed := next((r.error for r in rollouts if r.error is not None), None):
            return JSONResponse(_error(str(failed), "server_error"), 500)
        choices = [c for r in rollouts for c in r.completions()]
        if failing := next((c.error for c in choices if c.error), None):
            return JSONResponse(_error(failing, "server_error"), 500)
        return {
            **form.head(""),
            "choices": [form.choice(i, completion) for i, completion in enumerate(choices)],
            "usage": _usage(prompts, choices),
        }

    async def _progress(self, rollouts: Sequence[Rollout]) -> AsyncIterator[None]:
        """After every step, until all are done; leaving early aborts them."""
        try:
            while not all(rollout.done for rollout in rollouts):
                async with self._stepped:
                    await self._stepped.wait()
                yield
        finally:
            left = [rollout for rollout in rollouts if not rollout.done]
            if left:
                self.engine.abort(left)

    async def _events(self, rollouts: Sequence[Rollout], form: Form) -> AsyncIterator[str]:
        """Server-sent events with the text that has become certain since the last one."""
        sent: dict[tuple[int, int], int] = {}
        n = form.params.n
        async for _ in self._progress(rollouts):
            for i, rollout in enumerate(rollouts):
                if rollout.done:
                    continue
                for branch, ids in self.engine.progress(rollout).items():
                    text = form.certain(ids.tolist())
                    begin = sent.setdefault((i, branch[0]), 0)
                    if len(text) > begin:
                        sent[i, branch[0]] = len(text)
                        yield _event(form.chunk(i * n + branch[0], text[begin:], None))
        for i, rollout in enumerate(rollouts):
            if rollout.error is not None:
                yield _event(_error(str(rollout.error), "server_error"))
                continue
            for j, completion in enumerate(rollout.completions()):
                rest = form.text(completion)[sent.get((i, j), 0) :]
                yield _event(form.chunk(i * n + j, rest, completion))
        if form.body.stream_options is not None and form.body.stream_options.include_usage:
            choices = [c for r in rollouts if r.error is None for c in r.completions()]
            prompts = [rollout.prompt.tolist() for rollout in rollouts]
            yield _event({**form.head(".chunk"), "choices": [], "usage": _usage(prompts, choices)})
        yield "data: [DONE]\n\n"


class Form:
    """How the answer to one body is spelt."""

    def __init__(self, service: Service, body: Sampling, params: SamplingParams, *, chat: bool, logprobs: bool) -> None:
        self.body, self.params, self.chat, self.logprobs = body, params, chat, logprobs
        self._tokenizer = service.tokenizer
        self._model = service.name
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if self.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def text(self, completion: Completion) -> str:
        """Without the text that stopped it, as the API wants it."""
        return self._cut(self._decode(completion.token_ids.tolist()))

    def certain(self, ids: list[int]) -> str:
        """The beginning of the text that further tokens cannot change."""
        text = self._decode(ids)
        whole = self._cut(text)
        if len(whole) < len(text):
            return whole
        held = max((len(stop) for stop in self.params.stop), default=1) - 1
        while text.endswith("\ufffd"):
            text = text[:-1]
        return text[: len(text) - held] if held else text

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = self.text(completion)
        body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": index, **body, **self._end(completion)}

    def chunk(self, index: int, text: str, completion: Completion | None) -> dict[str, Any]:
        body = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        end = {"finish_reason": None} if completion is None else self._end(completion)
        return {**self.head(".chunk"), "choices": [{"index": index, **body, **end}]}

    def _end(self, completion: Completion) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": REASONS.get(completion.status, "error"), "logprobs": None}
        if self.logprobs:
            end["logprobs"] = self._chat_logprobs(completion) if self.chat else self._logprobs(completion)
        if self.body.return_token_ids:
            end["token_ids"] = completion.token_ids.tolist()
        return end

    def _chat_logprobs(self, completion: Completion) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._decode([token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        tops = completion.top or [{} for _ in completion.token_ids]
        return {
            "content": [
                {**entry(token, logprob), "top_logprobs": [entry(t, lp) for t, lp in top.items()]}
                for token, logprob, top in zip(
                    completion.token_ids.tolist(), completion.logprobs.tolist(), tops, strict=True
                )
            ]
        }

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        tokens = [self._decode([token]) for token in completion.token_ids.tolist()]
        offsets = itertools.accumulate((len(token) for token in tokens), initial=0)
        return {
            "tokens": tokens,
            "token_logprobs": completion.logprobs.tolist(),
            "top_logprobs": [{self._decode([t]): lp for t, lp in top.items()} for top in completion.top] or None,
            "text_offset": list(offsets)[:-1],
        }

    def _decode(self, ids: list[int]) -> str:
        return cast("str", self._tokenizer.decode(ids, skip_special_tokens=True))

    def _cut(self, text: str) -> str:
        ends = [at for stop in self.params.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def _usage(prompts: Sequence[Sequence[int]], choices: Sequence[Completion]) -> dict[str, int]:
    read, written = sum(map(len, prompts)), sum(len(c.token_ids) for c in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if not str(part).startswith(("list[", "str")))
        return JSONResponse(_error(f"`{where}`: {first['msg']}.", "invalid_request_error"), 400)
    return JSONResponse(_error(str(error), "invalid_request_error"), 400)
