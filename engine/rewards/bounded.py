"""Bounds what a response can do to the verifier that reads it: an error or endless work is its own, and no failure.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUDGET = 0.8
"""Share of a verdict's time limit that reading a response may take."""
OWN = 0.1
"""Share of that time for which it must have had a processor; else the machine is slow, and not the response."""
AGAIN_S = 0.05
"""Seconds after which the time limit interrupts again, where a library has caught its first exception."""
MEMORY = 1 << 30
"""Bytes that reading a response may take beyond what the process has; a long list is made by one call, which no time
limit interrupts."""
ALONE = __name__.startswith("rolltree_rewards.") and sys.platform == "linux"
"""This is a process of verifiers, whose memory can be limited without harm to others."""


class TooSlowError(BaseException):
    """Reading a response has used up its time; no Exception, which libraries catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlowError within the block after ``seconds``.

    It has no effect outside of the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin = time.process_time()

    def interrupt(number: int, frame: Any) -> None:
        if time.process_time() - begin >= OWN * seconds:
            raise TooSlowError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let allocations within the block fail that take more than `MEMORY` bytes together, in a verifier's process."""
    if not ALONE:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [mapped + MEMORY, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def of_response(read: Callable[[], Any], seconds: float) -> tuple[Any, str | None]:
    """Return what ``read`` returns and None, or None and the word for the reason why a response could not be read."""
    try:
        with time_limit(seconds), memory_limit():
            return read(), None
    except TooSlowError:
        return None, "too_slow"
    except Exception:
        return None, "unreadable"


class Bounded:
    """A built-in verifier whose responses neither fail it nor keep it: such a response is unparsed, with the reward 0.

    Args:
        verify: judges a text.
        reads: raises where it is the problem's entry that cannot be judged, which is a failure.
        timeout_s: the time limit of a verdict, in seconds.
    """

    def __init__(
        self,
        verify: Callable[[str, dict[str, Any]], Any],
        reads: Callable[[dict[str, Any]], object],
        timeout_s: float,
    ) -> None:
        self._verify, self._reads, self._seconds = verify, reads, BUDGET * timeout_s
        self.check = getattr(verify, "check", None)

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        verdict, why = of_response(lambda: self._verify(text, entry), self._seconds)
        if why is None:
            return verdict
        self._reads(entry)
        return {"reward": 0.0, "unparsed": why}
