"""Tells in what a plot, as plain data, has changed, so that a page that shows it is sent its new points alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

Change = tuple[list[str | int], int | None, Any]
"""A place, as the keys and numbers that lead to it; how many elements of the list there stay, None where it is
replaced; and what comes after them, or instead."""


def changes(before: Any, now: Any, place: tuple[str | int, ...] = ()) -> Iterator[Change]:
    """Yield what makes ``before`` into ``now``; both are of dictionaries, lists, texts and numbers."""
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        for name in now:
            yield from changes(before[name], now[name], (*place, name))
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) == len(now) and any(isinstance(part, dict | list) for part in now):
            for number, (old, new) in enumerate(zip(before, now, strict=True)):
                yield from changes(old, new, (*place, number))
        else:
            lengths = range(1, min(len(before), len(now)) + 1)
            kept = bisect_left(lengths, True, key=lambda length: before[:length] != now[:length])
            yield [*place], kept, now[kept:]
    else:
        yield [*place], None, now
