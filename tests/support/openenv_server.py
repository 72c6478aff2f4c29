"""Environments on a server of OpenEnv, for tests: one whose action is a text, one with fields, one with tools, one
that has a single session, and one that answers no OpenEnv at all. Run as ``python openenv_server.py PORT``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel

LIVE: set[int] = set()
"""The episodes that have begun and not ended, of all environments."""


class Say(Action):
    text: str


class Heard(Observation):
    heard: str = ""
    truncated: bool = False


class Words(Environment[Say, Heard, State]):
    """Asks for a word that its seed gives, and rewards the share of its letters; some words make it misbehave."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.seed = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        self.turns, self.seed = 0, seed or 0
        LIVE.add(id(self))
        return Heard(heard=f"word {self.seed}", done=seed == 99)

    def step(self, action: Say, timeout_s: float | None = None, **options: Any) -> Heard:
        self.turns += 1
        match action.text.split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["raise"]:
                raise ValueError("no such word")
            case ["cut"]:
                return Heard(heard="too long", reward=0.5, done=True, truncated=True)
            case ["long", number]:
                return Heard(heard="x" * int(number))
        done = self.turns == 3 or action.text == "end"
        return Heard(heard=f"{action.text} {self.turns} {self.seed}", reward=self.turns / 4, done=done)

    def close(self) -> None:
        LIVE.discard(id(self))

    @property
    def state(self) -> State:
        return State()


class Place(BaseModel):
    row: int
    column: int


class Move(Action):
    """Moves a piece."""

    piece: str
    to: Place
    hard: bool = False


class Moves(Words):
    def step(self, action: Move, timeout_s: float | None = None, **options: Any) -> Heard:  # type: ignore[override]
        return Heard(heard=f"{action.piece} {action.to.row} {action.hard}", reward=1.0)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")
        self.total = 0

        @server.tool
        def add(number: int) -> int:
            """Adds to the total, and gives it."""
            self.total += number
            if number < 0:
                raise ValueError("only more")
            return self.total

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self.total = 0
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


def guarded(app: Any) -> Any:
    """Return an application that lets only requests with a token in."""

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        if (b"authorization", b"Bearer hidden") in scope["headers"]:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4401})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no token"})

    return checked


def made() -> FastAPI:
    """Return all environments, each below an address of its own."""
    whole = FastAPI()
    for name, kind, action, sessions in (
        ("words", Words, Say, 200), ("single", Words, Say, 1), ("moves", Moves, Move, 100),
    ):  # fmt: skip
        whole.mount(f"/{name}", create_fastapi_app(kind, action, Heard, max_concurrent_envs=sessions))
    whole.mount("/guarded", guarded(create_fastapi_app(Words, Say, Heard, max_concurrent_envs=10)))
    whole.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=100))

    @whole.get("/health")
    def health() -> dict[str, str]:
        return {"status": "healthy"}

    @whole.get("/live")
    def live() -> int:
        return len(LIVE)

    @whole.get("/bad/schema")
    def schema() -> dict[str, Any]:
        return {"action": {"type": "object", "properties": {"text": {"type": "string"}}}}

    @whole.websocket("/bad/ws")
    async def garbage(socket: WebSocket) -> None:
        await socket.accept()
        answers = {"reset": '{"type": "observation", "data": {"observation": {"heard": "go"}}}'}
        while True:
            message = await socket.receive_json()
            if message["type"] == "close":
                await socket.close()
                return
            said = message["data"].get("text", "")
            if said == "leave":
                await socket.close()
                return
            await socket.send_text(answers.get(message["type"], said))

    return whole


if __name__ == "__main__":
    uvicorn.run(made(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
