"""The file that lists the episodes under way, and warnings of what an agent's calls ask for or lack."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..data.tree import TokenTree
from ..programs import AgentCalls
from .episode import Episode
from .records import EpisodeRecord

EVERY_S = 1.0
REASONS, TITLE = 20, 80
"""Failures that are told, the newest, and characters of a problem."""
log = logging.getLogger("rolltree.agents")


class Journal:
    """Tells of the episodes of a run.

    Args:
        program: names the agent.
        path: of the file; None: there is none.
    """

    def __init__(self, program: AgentCalls, path: Path | None) -> None:
        self._agent, self._path = program.agent or " ".join(program.command or ()), path
        self._written = 0.0
        self._failed: deque[str] = deque(maxlen=REASONS)
        self._warned = self._looked = False

    def advance(self, running: Iterable[Episode], waiting: int) -> None:
        """Write the file, if it is time: ``written_ns``, the number that are ``waiting`` for their turn, the
        ``episodes`` under way, and why the newest that have ``failed`` did."""
        now = time.monotonic()
        if self._path is None or now < self._written + EVERY_S or not self._path.parent.is_dir():
            return
        self._written = now
        episodes = [_told(episode, now) for episode in sorted(running, key=lambda episode: episode.number)]
        told = {"written_ns": time.time_ns(), "waiting": waiting, "episodes": episodes, "failed": list(self._failed)}
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps(told), encoding="utf-8")
        os.replace(partial, self._path)

    def landed(
        self,
        tree: TokenTree,
        episodes: Sequence[Episode],
        records: Sequence[EpisodeRecord],
        unmatched: Collection[str],
    ) -> None:
        """Take note of a group that is done; its tree gets the number of its ``greedy_calls``, if there are any.

        Args:
            unmatched: expressions of `AgentCalls.same` that no call has matched so far.
        """
        for episode, record in zip(episodes, records, strict=True):
            if record.failure is not None:
                self._failed.append(f"episode {episode.number} ({_problem(episode)}): {record.failure.why}")
        greedy, calls = (sum(n) for n in zip(*((e.greedy, len(e.calls)) for e in episodes), strict=True))
        if greedy:
            tree.meta["agent"]["greedy_calls"] = greedy
        if greedy == calls > 0 and len(episodes) > 1 and not self._warned:
            self._warned = True
            log.warning(
                "Every call of '%s' asks for temperature 0, so that the episodes of a group are alike and nothing is "
                'trained; set its temperature, or rollout.program_options.sampling = "run" to keep that of the run.',
                self._agent,
            )
        if calls and not self._looked:
            self._looked = True
            for pattern in unmatched:
                log.warning(
                    "No call of the first episodes of '%s' has what %r of rollout.program_options.same matches; mend "
                    "it, or leave it out.", self._agent, pattern,
                )  # fmt: skip

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _told(episode: Episode, now: float) -> dict[str, Any]:
    """Return what the file has of an episode."""
    with episode.lock:
        calls, waiting = list(episode.calls), list(episode.open)
    sampled = sum(call.tree.num_tokens - int(call.tree.leaf_prompt[0]) for call in calls)
    sampling = f"{len(waiting)} calls are answered" if len(waiting) > 1 else "a call is answered"
    return {
        "number": episode.number,
        "problem": _problem(episode),
        "seconds": now - episode.began,
        "calls": len(calls),
        "sampled": sampled + sum(len(call.sampled) for call in waiting),
        "now": sampling if waiting else "the agent works" if episode.has_called else "the agent starts",
    }


def _problem(episode: Episode) -> str:
    """Return the beginning of the last message of an episode's problem, or of its prompt's row."""
    messages = episode.task.get("messages")
    said = messages[-1].get("content") if messages else episode.task
    text = " ".join(str(said).split())
    return text if len(text) <= TITLE else f"{text[:TITLE]}..."
