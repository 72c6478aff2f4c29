"""A server of MCP, written out so that it can misbehave: ``python mcp_server.py [LOG]`` over its standard streams, or
``python mcp_server.py PORT http`` by the SDK. Each start is a line of the file LOG."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS: dict[str, dict[str, Any]] = {
    "count": {"properties": {"by": {"type": "integer"}}},
    "where": {
        "properties": {"point": {"$ref": "#/$defs/Point"}, "name": {"type": "string"}},
        "$defs": {"Point": POINT},
    },
    "fail": {"properties": {}},
    "misbehave": {"properties": {"how": {"type": "string"}}},
}
PICTURE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def texts(*parts: Any, error: bool = False) -> dict[str, Any]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"content": content, "isError": error}


def misbehave(how: str) -> dict[str, Any]:
    match how.split():
        case ["die"]:
            sys.stderr.write("it broke\n")
            sys.stderr.flush()
            os._exit(3)
        case ["hang"]:
            time.sleep(1000)
        case ["flood"]:
            for number in range(2000):
                sys.stderr.write("x" * 1000 + "\n")
                sys.stdout.write("no JSON\n" if number % 2 else "")
                send(method="notifications/message", params={"level": "info", "data": number})
        case ["change"]:
            open(os.environ["MCP_CHANGED"], "w").close()
            send(method="notifications/tools/list_changed")
        case ["long", number]:
            return texts("x" * int(number))
        case ["tell", name]:
            return texts(os.environ.get(name, "nothing"))
        case ["refuse", code]:
            return {"code": int(code), "message": "busy"}
    return texts("done")


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    global total
    if method == "initialize":
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "t", "version": "1"}}
    if method == "tools/list":  # a page each
        changed = os.path.exists(os.environ.get("MCP_CHANGED", ""))
        names = list(TOOLS)[1:] if changed else list(TOOLS)
        place = int(params.get("cursor") or 0)
        schema = {"type": "object", **TOOLS[names[place]]}
        page = {"tools": [{"name": names[place], "description": f"It can {names[place]}.", "inputSchema": schema}]}
        if "MCP_ENDLESS" in os.environ:
            return page | {"nextCursor": "0"}
        return page | ({"nextCursor": str(place + 1)} if place + 1 < len(names) else {})
    if method != "tools/call":
        return {}
    arguments = params.get("arguments") or {}
    match params["name"]:
        case "count":
            total += arguments.get("by", 1)
            return texts(str(total))
        case "where":
            return texts(f"{arguments['name']} at {arguments['point']['x']}", PICTURE)
        case "fail":
            return texts("no luck", error=True)
    return misbehave(arguments["how"])


total = 0

if __name__ == "__main__" and sys.argv[2:] == ["http"]:
    try:
        from mcp.server.mcpserver import MCPServer as Server
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server  # before 2.0
    import uvicorn

    http: Any = Server("http")

    @http.tool()
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    app = http.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        """Let requests in that have the header of the variable MCP_GUARD, where it is set."""
        wanted = os.environ.get("MCP_GUARD", "").encode()
        if scope["type"] != "http" or not wanted or (b"authorization", wanted) in scope["headers"]:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no token"})

    @http.tool()
    def long(number: int) -> str:
        """Is long."""
        return "x" * number

    uvicorn.run(guarded, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
elif __name__ == "__main__":
    if sys.argv[1:]:
        with open(sys.argv[1], "a") as log:
            log.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(request["method"], request.get("params") or {})
            send(id=request["id"], **{"error" if "code" in result else "result": result})
