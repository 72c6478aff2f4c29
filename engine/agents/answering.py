"""Tells a client the answer to its call: whole when it is complete, or as a stream while it is sampled.

A call is recorded when its answer is complete, before the end of it is told. The call of a client that hangs up earlier
is aborted and not recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from ..protocols.http import Events, RefusedError, refused, to_their_end
from ..rollout import Completion
from .episode import PendingCall

JSON, EVENTS = "application/json", "text/event-stream"


class Answering:
    """The answer to one call, from its submission on; used in the server's event loop.

    Args:
        call: the call, which the sampler has.
        form: forms its answer.
        raw: the body of the request.
        stream: the client wants a stream.
        headers: of the response.
        abort: takes the call where its client gets no answer.
    """

    def __init__(
        self,
        call: PendingCall,
        form: Any,
        raw: bytes,
        *,
        stream: bool,
        headers: Mapping[str, str],
        abort: Callable[[PendingCall], object],
    ) -> None:
        self.call, self.form, self._raw, self._abort = call, form, raw, abort
        self._stream, self._headers = stream, dict(headers)
        form.asked(call.turn.prompt)
        self._told, self._choice = "", form.streamed()  # of a stream
        self._open = True
        self._news = asyncio.Event()
        self._answer: asyncio.Future[TokenTree] = asyncio.wrap_future(call.answer)
        self._answer.add_done_callback(lambda _: self._news.set())
        self._watch = partial(asyncio.get_running_loop().call_soon_threadsafe, self._news.set)
        if stream and form.tool is None:
            call.watch = self._watch

    async def response(self, http: Request) -> Response:
        """Return the response, as soon as the call has an answer or a stream has tokens to tell.

        Raises:
            ClientDisconnect: the client has hung up before.
            RefusedError: the call has no answer.
        """
        gone = asyncio.ensure_future(_disconnected(http))
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({gone, news}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            if not self._answer.done():
                return Events(to_their_end(self._events(), self.form, http.url.path), self._drop, self._headers)
            return as_response(*self._record())
        except BaseException:
            self._drop()
            raise
        finally:
            gone.cancel()
            news.cancel()

    async def _events(self) -> AsyncIterator[str]:
        self._told = self.form.begin([self.call.turn.prompt])
        yield self._told
        while not self._answer.done():
            self._news.clear()
            ids = self.call.sampled
            if told := self._choice.add(ids[self._choice.seen :].tolist()):
                said = self.form.part(0, self._choice, told, ids)
                self._told += said
                yield said
            self.call.watch = self._watch
            await self._news.wait()
        _, whole, _ = self._record()
        yield whole[len(self._told) :]

    def _drop(self) -> None:
        """Forget the call unless its answer is recorded."""
        if self._open:
            self._open = False
            self.call.episode.dropped(self.call)
            self.call.episode.unmade(self._raw)
            self._abort(self.call)

    def _record(self) -> tuple[str, Any, dict[str, str]]:
        """Record the call, and return what tells its answer: the kind of the body, the body and headers.

        Raises:
            RefusedError: there is no answer, or the episode has ended.
        """
        try:
            tree = self._answer.result()
        except RefusedError:
            raise
        except asyncio.CancelledError:
            raise RefusedError("This episode has ended.", 410, "episode_ended") from None
        except ValueError as error:
            raise refused(error) from error
        except Exception as error:
            said = " ".join(str(error).split())[:300].rstrip(".")
            raise RefusedError(f"The engine failed: {said}.", 500) from error
        shown: tuple[str, Any, dict[str, str]]
        shown = self.call.episode.answered(self.call, tree, partial(self._read, tree), self._raw)
        self._open = False
        return shown

    def _read(self, tree: TokenTree) -> tuple[Any, tuple[str, Any, dict[str, str]]]:
        """Return the answer, and what tells it."""
        begin = int(tree.leaf_prompt[0])
        ids, status = tree.token_id[begin:], LeafStatus(int(tree.status[0]))
        stop = tree.meta.get("stopped", {}).get(0)
        none, zero = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
        completion = Completion(ids, zero.astype(np.int8), none, none, none, zero, [], None, status, None, stop)
        prompts = [tree.token_id[:begin].tolist()]
        answer = self.form.read(completion)
        if not self._stream:
            return answer, (JSON, self.form.whole(prompts, [[completion]]), self._headers)
        if self.form.rest(self._choice, answer) is None:
            raise RefusedError("The answer is not what has been told of it; ask again.", 500)
        begun = self._told or self.form.begin(prompts)
        ended = self.form.last(0, self._choice, completion, prompts) + self.form.close(prompts, len(ids))
        return answer, (EVENTS, begun + ended, self._headers)


def as_response(kind: str, body: Any, headers: Mapping[str, str]) -> Response:
    """Return the response that tells an answer which is complete."""
    return JSONResponse(body, headers=headers) if kind == JSON else Response(body, media_type=kind, headers=headers)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
