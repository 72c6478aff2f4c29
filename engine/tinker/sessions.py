"""Sessions of clients, and the samplers in them: who may use which, also after the server was started again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .faults import FaultError
from .graph import Graph
from .store import Store

KEPT_S = 7 * 24 * 3600.0
"""Seconds for which a session is known after its last change."""


@dataclass
class Sampler:
    """The source of a sampling session's samples.

    Attributes:
        path: of the weights; None: the base model.
        inflight: the model whose newest weights are used instead, once it has published newer ones.
        clones: copies of the client that have joined.
    """

    path: str | None
    inflight: str | None = None
    clones: int = 0


@dataclass
class Session:
    """A client's session."""

    id: str
    owner: str
    facts: dict[str, Any]
    samplers: dict[str, Sampler] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)
    beat: float = field(default_factory=time.monotonic)


class Sessions:
    """All sessions of a server.

    Args:
        store: keeps them; those of an earlier process are taken from it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all: dict[str, Session] = {}
        for name, facts in store.sessions():
            if store.clock() - facts["changed"] < KEPT_S:
                samplers = {key: Sampler(**one) for key, one in facts["samplers"].items()}
                self.all[name] = Session(name, facts["owner"], facts, samplers)

    def create(self, owner: str, user_metadata: Mapping[str, Any] | None, display_name: str | None) -> Session:
        """Return a new session."""
        name = secrets.token_hex(16)
        facts = {
            "owner": owner,
            "created": self._store.clock(),
            "user_metadata": dict(user_metadata or {}),
            "display_name": display_name,
            "finished": False,
        }
        session = self.all[name] = Session(name, owner, facts)
        self.keep(session)
        return session

    def keep(self, session: Session) -> None:
        """Write a session that has changed."""
        samplers = {key: vars(sampler) for key, sampler in session.samplers.items()}
        self._store.write_session(session.id, session.facts | {"samplers": samplers, "changed": self._store.clock()})

    def find(self, name: str, owner: str) -> Session:
        """Return a session.

        Raises:
            FaultError: there is none of that name and owner.
        """
        session = self.all.get(name)
        if session is None or session.owner != owner:
            raise FaultError(f"There is no session '{name[:80]}'.", 404)
        return session

    def alive(self, name: str, owner: str) -> Session:
        """Return a session that has not finished.

        Raises:
            FaultError: it has, or there is none of that name and owner.
        """
        session = self.find(name, owner)
        if session.facts["finished"]:
            raise FaultError(f"Session '{name}' has finished.", 410)
        return session

    def of(self, owner: str) -> list[Session]:
        """Return the sessions of an owner, the newest first."""
        sessions = [session for session in self.all.values() if session.owner == owner]
        return sorted(sessions, key=lambda session: -session.facts["created"])

    def sampler(self, name: str, owner: str) -> Sampler:
        """Return a sampler.

        Raises:
            FaultError: there is none of that name and owner.
        """
        session = self.all.get(name.partition(":")[0])
        sampler = None if session is None or session.owner != owner else session.samplers.get(name)
        if sampler is None:
            raise FaultError(f"There is no sampling session '{name[:80]}'.", 404)
        return sampler

    def add_sampler(self, session: Session, seq_id: int, sampler: Sampler) -> str:
        """Return the name of a new sampler; one that was asked for before stays as it is."""
        name = f"{session.id}:sample:{seq_id}"
        if name not in session.samplers:
            session.samplers[name] = sampler
            self.keep(session)
        return name


def texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Return metadata as the client reads it."""
    return {key: str(value) for key, value in (values or {}).items()}
