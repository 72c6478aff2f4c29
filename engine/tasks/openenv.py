"""Prompts that are the first observations of an OpenEnv server, for ``data.source = "openenv"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..programs.servers.episode import SHOWN, said
from ..programs.servers.openenv import find_server


class ServedPrompts:
    """``data.source = "openenv"`` yields a row for each seed: the text of a reset with it.

    Args:
        url, command, headers, observation: as for the environment.
        first_seed: the seed of the first row; it increases by 1 with each row.

    Raises:
        UserError: the server cannot be reached.
    """

    def __init__(
        self,
        url: str | None = None,
        command: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        observation: str | None = None,
        first_seed: int = 0,
    ) -> None:
        self._server, self._show, self._seed = find_server(url, command, headers), observation, first_seed

    def next(self, count: int) -> list[dict[str, Any]]:
        rows = []
        for _ in range(count):
            text = said(self._server.first(self._seed).observation, self._show)
            if not text.strip():
                raise UserError(f"{self._server} shows nothing at a reset; give prompts by data.path.")
            rows.append({"prompt": text, "answer": "", "seed": self._seed, SHOWN: text})
            self._seed += 1
        return rows

    def state_dict(self) -> int:
        """Return the seed of the next row."""
        return self._seed

    def load_state_dict(self, state: int) -> None:
        self._seed = state
