"""Entries of `data.tools` that name a server of MCP, and values with secrets, which come from environment variables."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import UserError

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""Stands for an environment variable in a header or in a variable of a command."""
ADDRESS, COMMAND = {"mcp", "shared", "tools", "headers"}, {"mcp", "shared", "tools", "env"}
"""Keys of an entry with an address, and of one with a command."""

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Entry:
    """A server of MCP.

    Attributes:
        place: its address, or the words of the command that runs it.
        shared: all episodes of a process use one session.
        tools: names of those that are offered; None: all.
        headers: of requests to the address, with `VARIABLE` in them.
        env: variables of the command beside those of the run, with `VARIABLE` in them.
    """

    place: str | tuple[str, ...]
    shared: bool = False
    tools: tuple[str, ...] | None = None
    headers: Pairs = ()
    env: Pairs = ()

    def __str__(self) -> str:
        return f"The MCP server `{self.place if isinstance(self.place, str) else ' '.join(self.place)}`"

    def offered(self, schemas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the descriptions of the tools that are offered, of all that the server lists.

        Raises:
            UserError: there are none, or `tools` names another.
        """
        names = [schema["function"]["name"] for schema in schemas]
        if absent := [name for name in self.tools or () if name not in names]:
            raise UserError(
                f"{self} lists no tool '{absent[0]}', which `tools` names; it has {', '.join(names) or 'none'}."
            )
        if not names:
            raise UserError(f"{self} lists no tools.")
        return [schema for name, schema in zip(names, schemas, strict=True) if self.tools is None or name in self.tools]


def entry_of(tool: Mapping[str, Any]) -> Entry:
    """Return what an entry of `data.tools` says.

    Raises:
        UserError: it has another form, there is no such program, or a variable that it names is not set.
    """
    place = tool["mcp"]
    is_address = isinstance(place, str)
    keys = ADDRESS if is_address else COMMAND
    if rest := sorted(set(tool) - keys):
        kind = "with an address" if is_address else "with a command"
        raise UserError(f"A server of data.tools has the key '{rest[0]}'; one {kind} takes {', '.join(sorted(keys))}.")
    shared, tools = tool.get("shared", False), tool.get("tools")
    if not isinstance(shared, bool):
        raise UserError(f"A server of data.tools has shared = {shared!r}; it is true or false.")
    if tools is not None and (isinstance(tools, str) or not tools):
        raise UserError(f"A server of data.tools has tools = {tools!r}; name at least one of its tools in a list.")
    words = [] if is_address else list(place) if isinstance(place, Sequence) else []
    fits = place.startswith(("http://", "https://")) if is_address else words and all(isinstance(w, str) for w in words)
    if not fits:
        raise UserError(f"data.tools has mcp = {place!r}; give an address, or the words of a command as a list.")
    if is_address and VARIABLE.search(place):
        raise UserError(f"data.tools has mcp = '{place}'; environment variables stand in `headers` alone.")
    if words and shutil.which(words[0]) is None:
        raise UserError(f"data.tools has mcp = {words}; there is no program '{words[0]}'.")
    entry = Entry(
        place if is_address else tuple(words), shared, None if tools is None else tuple(tools),
        tuple(sorted(tool.get("headers", {}).items())), tuple(sorted(tool.get("env", {}).items())),
    )  # fmt: skip
    filled(entry.headers, "header")
    filled(entry.env, "variable")
    return entry


def filled(pairs: Pairs, what: str) -> dict[str, str]:
    """Return values with environment variables in place of ``${NAME}``.

    Args:
        what: "header" or "variable", for errors, which show no value.

    Raises:
        UserError: a variable is not set, or no header may have its value.
    """
    values = {}
    for name, text in pairs:
        if missing := [variable for variable in VARIABLE.findall(text) if variable not in os.environ]:
            raise UserError(
                f"The {what} `{name}` of a server takes the environment variable {missing[0]}, which is not set."
            )
        values[name] = VARIABLE.sub(lambda match: os.environ[match[1]], text)
        if what == "header" and not (values[name].isascii() and values[name].isprintable()):
            raise UserError(
                f"The header `{name}` of a server has a character that no header may have, such as a line's end; see "
                "the environment variables that it takes."
            )
    return values


def is_loopback(url: str) -> bool:
    """Return whether an address is one of this machine, which is reached by no proxy."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
