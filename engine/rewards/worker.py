"""One verifier process. Run as a script, so that it imports neither torch nor the rest of rolltree.

It talks to :class:`RewardPool` over the socket whose number is its only argument. First comes a *setup* message
``{verifier, tasks, timeout_s}``, answered by ``["ready"]`` or ``["broken", why]``; then lists of
``(response text, entry)``, each item answered in order by ``[value, reason]``. Answers are JSON: nothing that user code
returns is unpickled.

The process never outlives its parent for long: a thread that reads the socket ends it at once when the parent is gone,
and while a verifier runs, faulthandler's timer, which needs no interpreter lock, ends it a little after the time limit.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import math
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Verifier = Callable[[str, dict[str, Any]], Any]

GRACE_S = 5.0
"""The parent kills a hanging worker at the time limit; without a parent it ends itself this much later."""


def main(fd: int) -> None:
    os.dup2(2, 1)  # what a verifier prints must not mix with the parent's own output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(fd)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    setup = messages.get()
    try:
        verify = load_verifier(setup["verifier"], setup["tasks"])
    except Exception as error:
        _send(connection, ["broken", _describe(error)])
        return
    _send(connection, ["ready"])
    while True:
        for text, entry in messages.get():
            _send(connection, _judge(verify, text, entry, setup["timeout_s"]))


def _read(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            messages.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the pool was closed, or its process is gone


def _judge(verify: Verifier, text: str, entry: dict[str, Any], timeout_s: float) -> list[Any]:
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True)
    try:
        value = float(verify(text, entry))
    except Exception as error:
        return [None, _describe(error)]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return [value, None] if math.isfinite(value) else [None, f"the verifier returned {value}"]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _send(connection: Connection, message: list[Any]) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        os._exit(0)


# -- verifiers ---------------------------------------------------------------------------------------------------------


def load_verifier(name: str, tasks: list[tuple[str, dict[str, Any]]]) -> Verifier:
    """The function ``(response text, entry) -> value`` that ``name`` stands for."""
    if name == "task":
        return _task_verifier(tasks)
    if name == "math":
        return _math_verifier()
    if name == "exact":
        return _exact
    return _user_verifier(name)


def _task_verifier(tasks: list[tuple[str, dict[str, Any]]]) -> Verifier:
    import reasoning_gym

    datasets = [reasoning_gym.create_dataset(task, **options) for task, options in tasks]

    def verify(text: str, entry: dict[str, Any]) -> float:
        return datasets[entry["task_index"]].score_answer(extract_answer(text), entry)

    return verify


def _math_verifier() -> Verifier:
    import math_verify

    def verify(text: str, entry: dict[str, Any]) -> float:
        gold = parse(str(entry["answer"]))
        if not gold:
            raise ValueError(f"math-verify cannot read the reference answer {entry['answer']!r}")
        return float(math_verify.verify(gold, parse(text), timeout_seconds=None))  # gold first: the order matters

    def parse(text: str) -> list[Any]:
        """A marked answer alone (GSM8K's references end in `#### 72`), else whatever math-verify finds."""
        answer = extract_answer(text)
        # No time limit here: the pool has a harder one.
        return math_verify.parse(text if answer is None else f"\\boxed{{{answer}}}", parsing_timeout=None)

    return verify


def _exact(text: str, entry: dict[str, Any]) -> float:
    answer = extract_answer(text)
    return float((text.strip() if answer is None else answer) == str(entry["answer"]).strip())


def _user_verifier(name: str) -> Verifier:
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    verify = getattr(module, function, None)
    if not callable(verify):
        raise AttributeError(f"{path} has no function {function}")
    return verify


# -- the answer in a response ------------------------------------------------------------------------------------------


TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LINE = re.compile(r"(?:Answer:|####)\s*(.*?)(?=</answer>|\n|$)")


def extract_answer(text: str) -> str | None:
    r"""The answer a response marks as final; None if it marks none.

    The last of these marks counts: ``<answer>...</answer>``, ``\boxed{...}`` (braces balanced), and the line that
    follows ``Answer:`` or ``####``. An ``<answer>`` or ``\boxed{`` that is never closed marks nothing.
    """
    found = [(match.start(), match[1]) for pattern in (TAGGED, LINE) for match in pattern.finditer(text)]
    for match in re.finditer(r"\\boxed\{", text):
        if (end := _closing_brace(text, match.end())) >= 0:
            found.append((match.start(), text[match.end() : end]))
    return max(found)[1].strip() if found else None


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes one opened before ``start``; -1 if none does."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return -1


if __name__ == "__main__":
    main(int(sys.argv[1]))
