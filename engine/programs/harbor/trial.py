"""One try at a task in its container: commands, then the tests, then the reward that they wrote.

Two directories of the container are the run's: ``/tests``, which nobody in the container can write to and which is
empty until the agent has ended, and ``/logs/verifier``, which is emptied then. Of the task's folder the container has
what its image was built of, and before the agent has ended nothing else. The solution is not used at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...sandbox.containers import Container, Output
from ...sandbox.owned import remove_folder
from .setup import Pool
from .task import Task

SHARED = {"tests": "/tests", "verifier": "/logs/verifier", "agent": "/logs/agent", "artifacts": "/logs/artifacts"}
"""Directories of a trial's folder by their places in the container."""
PLACE = "/episode"
"""Place of the files that an agent is given, where it is given some."""
SCRIPT = "(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1"
REWARDS = ("reward.json", "reward.txt")
LARGEST = 1 << 20
"""Bytes of the largest file with a reward."""
LOOK_S = 0.05


class Trial:
    """A try at a task; its methods but `close` are called by one thread after the other.

    Args:
        pool: has the engine and the places.
        files: texts of files that the container has in `PLACE`, by name.
    """

    def __init__(self, pool: Pool, task: Task, files: Mapping[str, str] | None = None) -> None:
        self.pool, self.task, self._files = pool, task, files
        self.container: Container | None = None
        self._lock = threading.Lock()
        self._started: Future[None] | None = None
        self._placed = self._busy = self._closed = False
        self._folder = Path()
        self._shell = "sh"
        pool.trials.add(self)

    def ahead(self) -> None:
        """Begin to start the container, without waiting for it."""
        with self._lock:
            if self._started is None and not self._closed:
                self._busy, self._started = True, self.pool.starts.submit(self._start)

    def open(self, over: Callable[[], bool] = lambda: False) -> None:
        """Wait until the container has started and is healthy, or ``over`` says that nobody waits any more.

        Raises:
            UserError: it cannot be started.
        """
        self.ahead()
        assert self._started is not None
        while not over():
            if wait([self._started], LOOK_S).done:
                return self._started.result()

    def run(self, command: str, seconds: float, most: int) -> Output:
        """Run a command of a shell as the agent's user; arguments as for `Container.run`.

        Raises:
            ContainerError: the container is gone.
        """
        return self.execute([self._shell, "-c", command], seconds, most=most)

    def execute(self, words: list[str], seconds: float, **options: Any) -> Output:
        """Run a command as the agent's user; options as for `Container.run`.

        Raises:
            ContainerError: the container is gone.
        """
        assert self.container is not None
        config = self.task.config
        return self.container.run(
            words, seconds, user=_user(config.agent.user), folder=config.environment.workdir, **options
        )

    def verify(self, over: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Run the tests and return the rewards that they wrote, the one that counts as ``reward``.

        Raises:
            UserError: they took too long or wrote no reward, or the container is gone.
        """
        assert self.container is not None
        config = self.task.config
        if self.pool.setup.keep_processes:
            self._bring_tests()
        else:
            self.container.restart(self._bring_tests)
            self._await_health()
        done = self.container.run(
            [self._shell, "-c", SCRIPT], config.verifier.timeout_sec, user=_user(config.verifier.user),
            folder=config.environment.workdir, variables=self.task.test_variables, over=over,
        )  # fmt: skip
        if done.code is None:
            raise UserError(f"{self.task} has tests that did not end within {config.verifier.timeout_sec:g} s.")
        return self._rewards()

    def close(self) -> None:
        """Remove the container, without waiting for that; its place is free then."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._started is not None and self._started.cancel():
                self._busy = False
            if not self._busy:
                self.pool.ends.submit(self._end)

    def _end(self) -> None:
        if self.container is not None:
            self.container.remove()
        if self._folder != Path():
            remove_folder(str(self._folder), self.pool.engine.words)
        if self._placed:
            self.pool.places.release()

    # -- the start, in a thread of the pool ----------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            while not self._placed and not self._closed and threading.main_thread().is_alive():
                self._placed = self.pool.places.acquire(timeout=1.0)
            if not self._closed:
                self._begin()
        finally:
            with self._lock:
                self._busy = False
                if self._closed:
                    self.pool.ends.submit(self._end)

    def _begin(self) -> None:
        image = self.pool.image(self.task)
        folder = self._folder = Path(tempfile.mkdtemp(dir=self.pool.engine.owned.folder))
        folder.chmod(0o711)
        mounts = []
        for name, place in SHARED.items():
            (folder / name).mkdir()
            (folder / name).chmod(0o755 if name == "tests" else 0o777)
            mounts += ["--volume", f"{folder / name}:{place}:{'ro,z' if name == 'tests' else 'z'}"]
        if self._files is not None:
            (folder / "episode").mkdir()
            for name, text in self._files.items():
                (folder / "episode" / name).write_text(text, encoding="utf-8")
            mounts += ["--volume", f"{folder / 'episode'}:{PLACE}:ro,z"]
        self.container = self.pool.engine.container(image, [*mounts, *self.pool.options(self.task)])
        if self.container.run(["bash", "-c", ":"], 30.0).code == 0:
            self._shell = "bash"
        self._await_health()

    def _await_health(self) -> None:
        """Wait until the task's healthcheck succeeds.

        Raises:
            UserError: it fails too often.
        """
        check = self.task.config.environment.healthcheck
        if check is None:
            return
        assert self.container is not None
        begin, failures = time.monotonic(), 0
        while self.container.run([self._shell, "-c", check.command], check.timeout_sec).code != 0:
            young = time.monotonic() - begin < check.start_period_sec
            failures += not young
            if failures >= check.retries:
                raise UserError(f"{self.task} has a healthcheck that failed {failures} times in its container.")
            time.sleep(check.start_interval_sec if young else check.interval_sec)

    # -- the tests -----------------------------------------------------------------------------------------------------

    def _bring_tests(self) -> None:
        """Empty the directory of rewards, and fill that of the tests."""
        for entry in os.scandir(self._folder / "verifier"):
            if entry.is_dir(follow_symlinks=False):
                remove_folder(entry.path, self.pool.engine.words)
            else:
                os.unlink(entry.path)
        tests = self._folder / "tests"
        shutil.copytree(self.task.folder / "tests", tests, symlinks=True, dirs_exist_ok=True)
        tests.chmod(0o755)
        script = tests / "test.sh"
        script.chmod(script.stat().st_mode | 0o555)

    def _rewards(self) -> dict[str, float]:
        for name in REWARDS:
            text = self._written(name)
            if text is None:
                continue
            try:
                value = json.loads(text) if name.endswith(".json") else float(text)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{self.task} has tests that wrote {text[:80]!r} to {name}, no reward.") from error
            return self._named(value if isinstance(value, dict) else {self.pool.setup.reward_key: value}, name)
        said = " ".join((self._written("test-stdout.txt") or "").split())[-300:]
        raise UserError(f"{self.task} has tests that wrote no reward to /logs/verifier ({said or 'nothing was said'}).")

    def _named(self, values: dict[str, Any], name: str) -> dict[str, float]:
        key = self.pool.setup.reward_key
        if key not in values:
            raise UserError(
                f"{self.task} has tests whose {name} has {', '.join(map(repr, values)) or 'nothing'} and no '{key}'; "
                "name the entry that counts by the option `reward_key`."
            )
        for entry, value in values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{self.task} has tests whose {name} gives {entry} = {value!r}, no finite number.")
        return {("reward" if entry == key else entry): float(value) for entry, value in values.items()}

    def _written(self, name: str) -> str | None:
        """Return the text of a regular file that the tests wrote, or None; a link is none, as it may lead anywhere."""
        try:
            file = os.open(self._folder / "verifier" / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            return opened.read(LARGEST).decode(errors="replace")


def _user(user: str | int | None) -> str | None:
    return None if user is None else str(user)
