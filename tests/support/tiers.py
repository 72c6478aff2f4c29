"""The tests that a command runs.

Every test is in one tier. Those marked for a campaign (:data:`CAMPAIGNS`) are left out unless the mark expression names
it; those marked ``check`` unless it does, or the command names files or folders. `make test` runs all others, and `make
check` the mark expression ``check``. ``check(but=n)`` leaves n cases of a test, evenly spaced, to `make test`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pytest

CAMPAIGNS = ("slow", "methods", "aot", "hopper", "verl", "vllm", "ray", "agents")


def select(config: pytest.Config, items: list[pytest.Item]) -> dict[pytest.Item, set[str]]:
    """Leave out the tests of other tiers; return the tier of each."""
    named = config.option.markexpr
    wanted = {mark for mark in (*CAMPAIGNS, "check") if mark in named}
    if named != "check":
        wanted.add("test")
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        wanted.add("check")
    tiers = {item: tier(item) for item in items}
    for mark, lower in (("slow", "check"), ("check", "test")):
        tiers |= {item: {lower} for item in spared(items, tiers, mark)}
    config.hook.pytest_deselected(items=[item for item in items if not tiers[item] <= wanted])
    items[:] = [item for item in items if tiers[item] <= wanted]
    return tiers


def thin(config: pytest.Config, items: list[pytest.Item], tiers: Mapping[pytest.Item, set[str]], most: int) -> None:
    """Leave out all but ``most`` cases of each test, evenly spaced; of a command that has the tests of `make check`
    beside those of `make test`, all of these stay."""
    stay = {"test"} if "check" in config.option.markexpr else set()
    thinned = [item for item in items if tiers[item] != stay]
    kept = {same[len(same) * i // most] for same in cases_of(thinned) for i in range(most)}
    left_out = set(thinned) - kept
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def tier(item: pytest.Item) -> set[str]:
    """Return the marks of the campaigns that a test belongs to; if there are none, ``check`` or ``test``."""
    campaigns = {mark for mark in CAMPAIGNS if item.get_closest_marker(mark)}
    return campaigns or {"check" if item.get_closest_marker("check") else "test"}


def spared(items: list[pytest.Item], tiers: dict[pytest.Item, set[str]], mark: str) -> Iterator[pytest.Item]:
    """Yield the cases that ``slow(but=n)`` leaves to `make check`, or ``check(but=n)`` to `make test`."""
    for same in cases_of([item for item in items if tiers[item] == {mark}]):
        n = min(same[0].get_closest_marker(mark).kwargs.get("but", 0), len(same))
        yield from (same[len(same) * i // n] for i in range(n))


def cases_of(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """Return the cases of each test together."""
    cases: dict[tuple[pytest.Item, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.parent, item.originalname), []).append(item)
    return cases.values()
