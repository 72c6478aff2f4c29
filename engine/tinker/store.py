"""Saved weights in a directory, and what a restarted server must know: runs and sessions.

    runs/RUN/run.json                        whose run it is, its adapter
    runs/RUN/KIND/NAME/                      a directory of peft; with optimizer.safetensors where training can go on
    runs/RUN/KIND/NAME/checkpoint.json       when it was saved, when it expires, the counters of its optimiser
    sessions/SESSION.json                    whose session it is, its samplers

Files are written beside their place and renamed into it when they are on the disk, so a killed process leaves the old
or the new state and never a part of one. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..train.checkpoint import sync
from .faults import FaultError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The parts of a path that name a kind of checkpoint, with the client's names of the kinds."""
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
META, OLD, NEW = "checkpoint.json", ".old-", ".new-"
TTLS = 3600, 3650 * 24 * 3600
"""Least and most seconds until a checkpoint expires."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved state."""

    run: str
    kind: str  # a key of `KINDS`
    name: str
    place: Path
    meta: Mapping[str, Any]

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    def described(self) -> dict[str, Any]:
        """Return the client's `Checkpoint`."""
        expires = self.meta["expires"]
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": stamp(self.meta["saved"]),
            "tinker_path": self.path,
            "size_bytes": sum(file.stat().st_size for file in self.place.iterdir()),
            "user_metadata": self.meta["user_metadata"],
            "expires_at": None if expires is None else stamp(expires),
        }


def stamp(seconds: float) -> str:
    """Return a time as the client reads it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Store:
    """The directory of a server's saved states.

    Args:
        root: made if it is not there.
        clock: returns seconds since 1970.

    Raises:
        UserError: the directory cannot be used.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root, self.clock = root, clock
        try:
            for folder in (root / "runs", root / "sessions"):
                folder.mkdir(parents=True, exist_ok=True)
            self._recover()
        except OSError as error:
            raise UserError(
                f"Cannot keep states in '{root}' ({error.strerror}); choose another --tinker_dir."
            ) from None

    def _recover(self) -> None:
        """Finish or undo what a killed process had begun."""
        for folder in [*self.root.glob("runs/*/*"), self.root / "sessions", *self.root.glob("runs/*")]:
            for entry in list(folder.iterdir()) if folder.is_dir() else []:
                if entry.name.startswith(NEW):
                    _remove(entry)
                elif entry.name.startswith(OLD):
                    place = folder / entry.name.removeprefix(OLD).partition("~")[0]
                    if place.exists():
                        _remove(entry)
                    else:  # it had been moved away, and the new one not yet into its place
                        os.rename(entry, place)

    # -- runs and sessions --------------------------------------------------------------------------------------------

    def write_run(self, run: str, facts: Mapping[str, Any]) -> None:
        """Record whose run it is and what its adapter is."""
        (self.root / "runs" / run).mkdir(exist_ok=True)
        _write_json(self.root / "runs" / run / "run.json", facts)

    def run(self, run: str, owner: str) -> dict[str, Any]:
        """Return the facts of a run.

        Raises:
            FaultError: there is none of that name and owner.
        """
        file = self.root / "runs" / run / "run.json"
        facts = _read_json(file) if RUN.fullmatch(run) else None
        if facts is None or facts["owner"] != owner:
            raise FaultError(f"There is no training run '{run[:80]}'.", 404)
        return facts

    def runs(self, owner: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the runs of an owner, the newest first."""
        runs = [(file.parent.name, _read_json(file)) for file in self.root.glob("runs/*/run.json")]
        of_owner = [(run, facts) for run, facts in runs if facts is not None and facts["owner"] == owner]
        return sorted(of_owner, key=lambda one: -one[1]["created"])

    def write_session(self, session: str, facts: Mapping[str, Any]) -> None:
        """Record a session and its samplers."""
        _write_json(self.root / "sessions" / f"{session}.json", facts)

    def sessions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all sessions."""
        for file in sorted(self.root.glob("sessions/*.json")):
            if (facts := _read_json(file)) is not None:
                yield file.stem, facts

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self,
        run: str,
        kind: str,
        name: str | None,
        write: Callable[[Path], Mapping[str, Any]],
        *,
        ttl: int | None,
        user_metadata: Mapping[str, str] | None,
        overwrite: bool = False,
    ) -> Checkpoint:
        """Save a state.

        Args:
            name: of the checkpoint; None: one of its own.
            write: writes files into a directory and returns what else is to be kept.
            ttl: seconds until it expires; None: never.

        Raises:
            FaultError: the name or the time is not allowed, or the name is taken.
        """
        name = f"auto-{secrets.token_hex(8)}" if name is None else name
        if not NAME.fullmatch(name):
            raise FaultError(f"The name '{name[:80]}' has other characters than letters, digits, '_', '-' and '.'.")
        check_ttl(ttl)
        folder = self.root / "runs" / run / kind
        folder.mkdir(exist_ok=True)
        place, now = folder / name, self.clock()
        if place.exists() and not overwrite:
            raise FaultError(f"There is a checkpoint {SCHEME}{run}/{kind}/{name} already; choose another name.")
        new = folder / f"{NEW}{secrets.token_hex(8)}"
        new.mkdir()
        try:
            meta = dict(write(new)) | {
                "saved": now,
                "expires": None if ttl is None else now + ttl,
                "user_metadata": None if user_metadata is None else dict(user_metadata),
            }
            (new / META).write_text(json.dumps(meta), encoding="utf-8")
            for file in new.iterdir():
                sync(file)
            sync(new)
            old = folder / f"{OLD}{name}~{secrets.token_hex(4)}"
            if place.exists():
                os.rename(place, old)
            os.rename(new, place)
            sync(folder)
        finally:
            _remove(new)
        _remove(old)
        return Checkpoint(run, kind, name, place, meta)

    def find(self, path: str, owner: str) -> Checkpoint:
        """Return the checkpoint of a path ``tinker://RUN/KIND/NAME``.

        Raises:
            FaultError: there is none that the owner can read, or it has expired.
        """
        run, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        missing = FaultError(f"There is no checkpoint '{path[:200]}'.", 404)
        if not (path.startswith(SCHEME) and RUN.fullmatch(run) and kind in KINDS and NAME.fullmatch(name)):
            raise missing
        place = self.root / "runs" / run / kind / name
        facts, meta = _read_json(self.root / "runs" / run / "run.json"), _read_json(place / META)
        if facts is None or meta is None or facts["owner"] != owner or self._expired(meta):
            raise missing
        return Checkpoint(run, kind, name, place, meta)

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, the newest first, without those saved for one session of sampling."""
        checkpoints = []
        for kind in KINDS:
            for file in self.root.glob(f"runs/{run}/{kind}/*/{META}"):
                meta = _read_json(file)
                shown = NAME.fullmatch(file.parent.name) and meta is not None and not meta.get("ephemeral")
                if meta is not None and shown and not self._expired(meta):
                    checkpoints.append(Checkpoint(run, kind, file.parent.name, file.parent, meta))
        return sorted(checkpoints, key=lambda one: -one.meta["saved"])

    def set_ttl(self, checkpoint: Checkpoint, ttl: int | None) -> None:
        """Let a checkpoint expire ``ttl`` seconds from now, or never.

        Raises:
            FaultError: the time is not allowed.
        """
        check_ttl(ttl)
        expires = None if ttl is None else self.clock() + ttl
        _write_json(checkpoint.place / META, dict(checkpoint.meta) | {"expires": expires})

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        aside = checkpoint.place.with_name(f"{NEW}{secrets.token_hex(8)}")  # a half of it would look whole
        os.rename(checkpoint.place, aside)
        _remove(aside)

    def expired(self) -> list[Checkpoint]:
        """Return the checkpoints whose time is over."""
        checkpoints = []
        for file in self.root.glob(f"runs/*/*/*/{META}"):
            meta = _read_json(file)
            if meta is not None and NAME.fullmatch(file.parent.name) and self._expired(meta):
                kind = file.parent.parent
                checkpoints.append(Checkpoint(kind.parent.name, kind.name, file.parent.name, file.parent, meta))
        return checkpoints

    def _expired(self, meta: Mapping[str, Any]) -> bool:
        return meta["expires"] is not None and meta["expires"] <= self.clock()


def check_ttl(ttl: int | None) -> None:
    """Raise FaultError if a checkpoint cannot expire after ``ttl`` seconds."""
    least, most = TTLS
    if ttl is not None and not least <= ttl <= most:
        raise FaultError(f"ttl_seconds is {ttl}; give {least} (an hour) to {most} (10 years), or None for never.")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    new = file.with_name(f"{NEW}{secrets.token_hex(8)}")
    new.write_text(json.dumps(value), encoding="utf-8")
    sync(new)
    os.replace(new, file)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
