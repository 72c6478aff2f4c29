"""The server of a run's agents, on this machine alone. Each episode has a key of its own, which calls are known by.

    /v1/chat/completions, /responses, /messages: a call goes to the sampler and comes back as an answer
    /reward: the agent's reward

The address is the same for all, as agents tell it to the model. `answering` tells the answer, whole or while it is
sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from ..protocols.calls import CHATS, COUNT, Call, read_call
from ..protocols.grammar import Grammars
from ..protocols.http import RefusedError, handle_errors, read_body, refused
from ..protocols.keys import key_of, same_key
from ..protocols.prompts import answer_schema, chat_prompt, plain_messages, shown_tools, template_options
from ..protocols.schema import ChatBody
from ..rollout import SamplingParams
from ..rollout.records import child_seed, parent_seed
from .alike import Alike
from .answering import Answering, as_response
from .episode import WRONG_KEY, Episode, PendingCall

T = TypeVar("T")
MOST_FILES = 65536
START_S = 30.0
"""Seconds in which the server must listen."""


class Door:
    """The server; it listens from the first `address` until `close`.

    Args:
        tokenizer: the model's.
        longest: positions of the model; None without a limit.
        submit: takes a call for the sampler.
        abort: takes a call whose client is gone.
        vocabulary: number of the model's logits, for answers that keep to a schema; None: the sampler cannot have them.
        alike: replaces texts of calls that differ between episodes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        longest: int | None,
        submit: Callable[[PendingCall], object],
        abort: Callable[[PendingCall], object],
        vocabulary: int | None,
        alike: Alike,
    ) -> None:
        self.tokenizer, self.longest, self._submit, self._abort = tokenizer, longest, submit, abort
        self._alike = alike
        self.episodes: dict[str, Episode] = {}
        self._grammars = None if vocabulary is None else Grammars(tokenizer, vocabulary)
        self._gone: dict[str, str] = {}  # keys of episodes that have ended
        self._threads = ThreadPoolExecutor(2, "rolltree-door")
        self._no_key = secrets.token_urlsafe(24).encode()
        self._server: uvicorn.Server | None = None
        self._port = 0

    def address(self) -> str:
        """Return the address of all episodes, without ``/v1``."""
        if self._server is None:
            self._listen()
        return f"http://127.0.0.1:{self._port}"

    def open(self, episode: Episode) -> None:
        self.episodes[episode.id] = episode

    def shut(self, episode: Episode) -> None:
        """Answer further calls of an episode that it has ended."""
        if self.episodes.pop(episode.id, None) is not None:
            self._gone[episode.id] = episode.key
            while len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]

    def close(self) -> None:
        """End the server; calls that wait are dropped."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(5)
            self._server = None
        self._threads.shutdown(cancel_futures=True)

    def _listen(self) -> None:
        _allow_files()
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(self.app(), log_level="critical", timeout_keep_alive=60, lifespan="off")
        self._server = server = uvicorn.Server(config)
        logging.getLogger("uvicorn.error").disabled = True  # hang-ups are usual
        self._thread = threading.Thread(target=server.run, args=([listening],), name="rolltree-door", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_S
        while not server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RuntimeError("The server of the run's agents does not start; this is a defect of rolltree.")
            time.sleep(0.005)

    def app(self) -> Starlette:
        """Return the server's application."""
        app = Starlette(
            routes=[
                *(Route(path, partial(self._chat, path), methods=["POST"]) for path in CHATS),
                Route(COUNT, self._count, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._models),
                Route("/reward", self._reward, methods=["POST"]),
            ]
        )
        handle_errors(app)
        return app

    # -- requests ---------------------------------------------------------------------------------------------------

    def _episode(self, http: Request) -> tuple[Episode, str]:
        """Return the episode that a request calls by its key, and the role of that.

        Raises:
            RefusedError: it is no episode's key, or the episode has ended.
        """
        key = key_of(http.headers)
        id_ = key.partition(b"-")[0].decode("ascii", "replace")
        episode = self.episodes.get(id_)
        if episode is not None:
            return episode, episode.role(key)
        expected = self._gone.get(id_)
        right = same_key(key.partition(b":")[0], self._no_key if expected is None else expected.encode())
        if expected is not None and right:
            raise RefusedError("This episode has ended; its calls are answered no more.", 410, "episode_ended")
        raise RefusedError(WRONG_KEY, 401, "invalid_api_key")

    async def _models(self, http: Request) -> Response:
        self._episode(http)
        name = http.path_params.get("model", "policy")
        card = {"id": name, "object": "model", "created": 0, "owned_by": "rolltree"}
        return JSONResponse(card if "model" in http.path_params else {"object": "list", "data": [card]})

    async def _reward(self, http: Request) -> Response:
        episode, _ = self._episode(http)
        raw = await read_body(http)
        try:
            episode.rewarded(json.loads(raw))
        except (ValueError, RecursionError) as error:  # the latter: too many brackets
            raise RefusedError(f"The body is no reward: {str(error).rstrip('.')}.") from error
        return JSONResponse({"reward": episode.reward})

    async def _count(self, http: Request) -> Response:
        self._episode(http)
        raw = await read_body(http)

        def count() -> int:
            return len(chat_prompt(self.tokenizer, read_call(COUNT, raw).chat).ids)

        return JSONResponse({"input_tokens": await self._aside(count)})

    async def _chat(self, path: str, http: Request) -> Response:
        episode, role = self._episode(http)
        try:
            return await self._answer(path, http, episode, role)
        except RefusedError as wrong:
            episode.refused(str(wrong))
            raise

    async def _answer(self, path: str, http: Request, episode: Episode, role: str) -> Response:
        raw = await read_body(http)
        parsed = await self._aside(partial(self._asked, path, raw))
        if http.headers.get("x-stainless-retry-count", "0") != "0" and (told := episode.repeated(raw)) is not None:
            return as_response(*told)
        number = episode.admit(raw)
        try:
            call, form, ignored = await self._aside(partial(self._begin, episode, role, number, parsed))
        except BaseException:
            episode.unmade(raw)
            raise
        headers = {"x-rolltree-ignored": ", ".join(ignored)} if ignored else {}
        stream = bool(parsed.chat.stream)
        answering = Answering(call, form, raw, stream=stream, headers=headers, abort=self._abort)
        self._submit(call)
        return await answering.response(http)

    async def _aside(self, function: Callable[[], T]) -> T:
        """Run a long function in a thread; a ValueError becomes a refusal."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except ValueError as wrong:
            raise refused(wrong) from wrong

    # -- called in threads of its own; a ValueError names the mistake in the request ----------------------------------

    @staticmethod
    def _asked(path: str, raw: bytes) -> Call:
        call = read_call(path, raw)
        body = call.chat
        if (body.n or 1) != 1 or (body.best_of or 1) != 1:
            raise ValueError(
                "A call of an episode has one answer; leave out `n` and `best_of`, and call again for more."
            )
        if body.logprobs or body.top_logprobs:
            raise ValueError("Answers to an episode have no log-probs, which its records hold; leave out `logprobs`.")
        if body.stream_options is not None and not body.stream:
            raise ValueError("`stream_options` needs `stream` to be true.")
        return call

    def _begin(self, episode: Episode, role: str, number: int, parsed: Call) -> tuple[PendingCall, Any, list[str]]:
        body = parsed.chat
        tools = self._alike.tools(shown_tools(body))
        options, ignored = template_options(self.tokenizer, body, tools)
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or episode.job.params.stop)
        form = parsed.form(self.tokenizer, body.model or "policy", stop, episode.session.new_id)
        sent = {name: value for name in OWN if (value := getattr(body, name)) is not None}
        if episode.program.sampling == "run":
            ignored = [*ignored, *(name for name in DRAWN if sent.pop(name, None) is not None)]
        params = partial(self._params, episode.job.params, body, stop, sent)
        messages = self._alike.messages(plain_messages(body))
        call = episode.begin(number, role, (messages, tools, options), params, self.longest)
        return call, form, [*ignored, *parsed.ignored]

    def _params(
        self, run: SamplingParams, body: ChatBody, stop: tuple[str, ...], sent: dict[str, Any], room: int, seed: int
    ) -> SamplingParams:
        """Return the sampling of a call: the run's, where the call has ``sent`` none."""
        most = body.max_completion_tokens or body.max_tokens
        schema = answer_schema(body)
        if schema is not None and self._grammars is None:
            raise ValueError(
                "Engines in other processes have no answers that keep to a schema or must call a tool; leave out "
                "`response_format` and a `tool_choice` that requires a call, or set rollout.engines to 0."
            )
        options = dict(sent)
        if options.get("top_k") in (0, -1):
            options["top_k"] = None
        if schema is not None and self._grammars is not None:
            options["prefix_allowed_tokens_fn"] = self._grammars.of_schema(schema, 1)
        seed = seed if body.seed is None else int(child_seed(seed, body.seed % 2**31))
        return replace(
            run, n=1, max_new_tokens=min(room, most or room), stop=stop, seed=parent_seed(seed), **options
        )  # the engine gives the first branch child 0


OWN = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "logit_bias", "allowed_token_ids", "ignore_eos",
)  # fmt: skip
"""Parameters of sampling that a call may set instead of the run's."""
DRAWN = ("temperature", "top_p", "top_k", "min_p")
"""Fields of a request that set how an answer is drawn."""
MOST_GONE = 100_000
"""Ended episodes whose calls are told so."""


def _allow_files() -> None:
    """Allow this process as many open files as it may have: every call is two, where the agent is a function."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
