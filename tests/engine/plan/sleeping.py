"""A rollout engine whose steps sleep for a given time, as a worker of `Fleet`; it is no model of `rolltree.engine`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.fleet.host import Facts, Health, Result


def lengths(seed: int, n: int) -> list[int]:
    """Log-normal lengths with median 24, at most 100."""
    drawn = np.random.default_rng(seed % 2**63).lognormal(np.log(24), 0.8, n)
    found: list[int] = np.clip(np.ceil(drawn), 1, 100).astype(int).tolist()
    return found


class SleepingHost:
    """Each step sleeps, and each running response gets a token; a job begins when ``rows`` has room for all of it."""

    def __init__(self, step_s: float, load_s: float, rows: int) -> None:
        self.step_s, self.load_s, self.rows, self.version = step_s, load_s, rows, 0
        self.changed = threading.Condition()
        self.waiting: list[dict[int, Any]] = []
        self.queue: list[tuple[int, list[int], int]] = []  # number, lengths of the responses, version
        self.running: dict[int, tuple[list[int], int]] = {}  # tokens that each response lacks, and the version
        self.results: dict[int, Future[Result]] = {}
        self.fetched: list[tuple[Future[int], int]] = []
        threading.Thread(target=self.keep_stepping, daemon=True).start()

    def facts(self) -> Facts:
        return Facts(None, [0], 1)

    def health(self) -> Health:
        return Health(self.version, 0.0, None, True, Counter())

    def run(self, jobs: dict[int, Any], held_out: bool) -> None:
        with self.changed:
            self.results |= {number: Future() for number in jobs}
            self.waiting.append(jobs)
            self.changed.notify()

    def result(self, number: int) -> Future[Result]:
        return self.results[number]

    def load(self, buckets: list[Any], version: int, keep_keys: bool) -> Future[int]:
        loaded: Future[int] = Future()

        def fetch() -> None:
            time.sleep(self.load_s)
            with self.changed:
                self.fetched.append((loaded, version))
                self.changed.notify()

        threading.Thread(target=fetch, daemon=True).start()
        return loaded

    def forget_prefixes(self) -> None: ...

    def keep_stepping(self) -> None:
        begin = time.monotonic()
        while True:
            with self.changed:
                self.take()
                while not self.running:
                    self.changed.wait()
                    begin = time.monotonic()
                    self.take()
            begin += self.step_s  # a late step is caught up with
            time.sleep(max(0.0, begin - time.monotonic()))
            with self.changed:
                self.step()

    def take(self) -> None:
        for loaded, version in self.fetched:
            self.version = version
            loaded.set_result(version)
        self.fetched.clear()
        waiting, self.waiting = self.waiting, []
        for jobs in waiting:
            if any(job.version > self.version for job in jobs.values()):
                self.waiting.append(jobs)
            else:
                self.queue += [(number, lengths(job.seed, job.params.n), self.version) for number, job in jobs.items()]
        while self.queue and len(self.queue[0][1]) + self.active() <= self.rows:
            number, lacking, version = self.queue.pop(0)
            self.running[number] = lacking, version

    def active(self) -> int:
        return sum(left > 0 for lacking, _ in self.running.values() for left in lacking)

    def step(self) -> None:
        for number, (lacking, version) in list(self.running.items()):
            lacking[:] = [left - 1 for left in lacking]
            if max(lacking) <= 0:
                del self.running[number]
                tree = TokenTree.from_sequences([1], [[2 + i] for i in range(len(lacking))], policy_version=version)
                self.results.pop(number).set_result(Result(tree, [""] * len(lacking), Counter()))
