"""Signals that end a run after its step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rolltree.engine.loop.runtime import SIGNALS, Stopping


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    """Handlers that count, in the place of those that would end this process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, _count)
    _counted.clear()
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


_counted: list[int] = []


def _count(number: int, frame: object) -> None:
    _counted.append(number)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_asks_and_is_told(number: int) -> None:
    notes: list[str] = []
    stopping = Stopping(notes.append)
    with stopping.on_signals():
        assert not stopping.requested
        send(number)
        assert stopping.requested
    assert len(notes) == 1
    assert notes[0].startswith(signal.Signals(number).name)
    assert _counted == []
    assert all(signal.getsignal(n) is _count for n in SIGNALS)


def test_a_second_interrupt_ends_it_at_once_and_a_second_hangup_does_not() -> None:
    with Stopping(lambda _: None).on_signals():
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert _counted == []
        send(signal.SIGTERM)
        assert _counted == [signal.SIGTERM]
        send(signal.SIGHUP)
        assert _counted == [signal.SIGTERM]
    send(signal.SIGHUP)
    assert _counted == [signal.SIGTERM, signal.SIGHUP]


def test_under_nohup_a_hangup_is_still_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping = Stopping(lambda _: None)
    with stopping.on_signals():
        send(signal.SIGHUP)
        assert not stopping.requested
        send(signal.SIGTERM)
        assert stopping.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
