"""A tool that waits, as a function and on servers of OpenEnv and MCP: ``python environment_servers.py KIND PORT``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any


def step(seconds: float, place: str) -> str:
    """Waits.

    Args:
        seconds: How long.
        place: Where.
    """
    time.sleep(seconds)
    return "waited"


def serve_openenv(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import create_model

    wait = create_model("Wait", __base__=Action, seconds=(float, ...), place=(str, ...))
    waited = create_model("Waited", __base__=Observation, text=(str, ""))

    class Waits(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, **options: Any) -> Any:
            return waited()

        def step(self, action: Any, **options: Any) -> Any:
            return waited(text=step(action.seconds, action.place))

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Waits, wait, waited, max_concurrent_envs=1000)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def serve_mcp(port: int) -> None:
    import uvicorn
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    try:
        from mcp.server.mcpserver import MCPServer as Server
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server  # before 2.0
    server: Any = Server("waits")

    async def waits(seconds: float, place: str) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    server.add_tool(waits, name="step", description="Waits.")
    app = server.streamable_http_app()
    app.router.routes.append(Route("/health", lambda request: PlainTextResponse("healthy")))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


SERVERS: dict[str, Callable[[int], None]] = {"openenv": serve_openenv, "mcp": serve_mcp}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](int(sys.argv[2]))
