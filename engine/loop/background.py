"""A thread that samples while its caller trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Background:
    """Repeats ``work`` in a thread of its own until it is closed; rests while it is paused.

    Args:
        changed: guards what both threads change; notified when this one begins to rest.
        work: one round.
        within: makes the context in which the thread works.

    Attributes:
        started: the thread runs; before, its caller does the work itself.
        error: what ended the thread, if it failed and `raise_error` has not been called since.
    """

    def __init__(
        self,
        changed: threading.Condition,
        work: Callable[[], object],
        within: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._changed, self._work, self._within = changed, work, within
        self._thread: threading.Thread | None = None
        self._pauses, self._resting, self._closing = 0, False, False
        self.error: BaseException | None = None

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, if it is not started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rolltree-sampling", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after its present round."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def pause(self) -> None:
        """Wait until the thread rests; each pause needs a `go_on`."""
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            while self.started and not self._resting and self.error is None:
                self._changed.wait()

    def go_on(self) -> None:
        """End a pause."""
        with self._changed:
            self._pauses -= 1
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise what has ended the thread, if it failed; `start` starts another one then. The caller holds
        ``changed``."""
        if self.error is not None:
            error, self.error = self.error, None
            self._thread, self._resting = None, False
            raise error

    def _run(self) -> None:
        failure = None
        try:
            with self._within():
                while self._may_go_on():
                    self._work()
        except BaseException as error:
            failure = error
        finally:
            with self._changed:
                self.error, self._resting = failure, True
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        """Wait until no pause is requested; return False when the thread is to end."""
        with self._changed:
            while self._pauses and not self._closing:
                self._resting = True
                self._changed.notify_all()
                self._changed.wait()
            self._resting = False
            return not self._closing
