"""The time line of an agent's episode: its calls, and the time between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def time_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{episode, reward, seconds, lanes, parts}`` for the row of a rollout file with an episode's calls.

    A part is ``{kind, begin, end, lane, about}`` in seconds since the episode began. Kinds: ``waiting`` for the engine;
    ``prefill`` up to the first token; ``decode``; ``engine``, for both where only its process tells them apart; and
    ``tool`` while the agent waits for no call. Calls at the same time are in different lanes.
    """
    parts: list[dict[str, Any]] = []
    ends: list[float] = []  # of the last call in each lane
    seconds, calls = row["episode_s"], sorted(row["calls"], key=lambda call: call["arrived"])
    busy = 0.0

    def add(kind: str, begin: float, end: float, lane: int, about: str) -> None:
        if end > begin:
            parts.append({"kind": kind, "begin": round(begin, 6), "end": round(end, 6), "lane": lane, "about": about})

    for call in calls:
        arrived, begun, first, ended = (call[name] for name in ("arrived", "begun", "first", "ended"))
        add("tool", busy, arrived, 0, "")
        busy = max(busy, ended)
        lane = next((i for i, end in enumerate(ends) if end <= arrived), len(ends))
        ends[lane : lane + 1] = [ended]
        role = f" of {call['role']}" if call["role"] else ""
        about = f"call {call['number']}{role}: {call['read']} tokens read, {call['sampled']} sampled"
        add("waiting", arrived, begun, lane, about)
        add("engine" if first is None else "prefill", begun, ended if first is None else first, lane, about)
        if first is not None:
            add("decode", first, ended, lane, about)
    add("tool", busy, seconds, 0, "")
    reward = row.get("reward")
    return {
        "episode": row["episode"],
        "reward": None if reward is None else round(reward, 4),
        "seconds": seconds,
        "lanes": max(len(ends), 1),
        "parts": parts,
    }
