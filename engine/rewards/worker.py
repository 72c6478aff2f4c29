"""One verifier process, which `keeper.py` runs, so that it imports neither torch nor the rest of rolltree.

It talks to :class:`RewardPool` over a socket. First comes a *setup* message ``{verifier, tasks, token}``, answered by
``["ready"]`` or ``["broken", why]``; then lists of ``(number, response text, entry)``, each item answered in order by
``[number, value, reason, named, spans]``. Answers are JSON: nothing that user code returns is unpickled.

User code shares the process, and may write to any file descriptor. The socket has a high number, closes on ``exec``,
and each answer is framed by the token of its process and a checksum, so that the pool takes nothing else for one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pickle
import queue
import re
import resource
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Verifier = Callable[[str, dict[str, Any]], Any]

HEADER = struct.Struct("!16sII")
"""Before each answer: the token, and length and checksum of the JSON that follows."""
LENGTH = struct.Struct("!Q")
"""Before each message of the pool: the length of the pickle that follows."""


def main(fd: int) -> None:
    os.dup2(2, 1)  # what a verifier prints must not mix with the parent's own output
    sys.argv = sys.argv[:1]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: none
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(fd, min(limit % 1025, 1024) - 16))
    os.close(fd)
    connection = socket.socket(fileno=high)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    setup = messages.get()
    send = _Sender(connection, setup["token"])
    failure = _load_file("rolltree_calling", Path(__file__).parents[1] / "methods" / "calling.py").failure
    try:
        verify = load_verifier(setup["verifier"], setup["tasks"])
    except BaseException as error:
        send(["broken", failure(error)])
        return
    send(["ready"])
    here = os.getpid()
    while True:
        for number, text, entry in messages.get():
            verdict = _judge(verify, text, entry, failure)
            if os.getpid() != here:
                os._exit(0)  # the verifier forked, and both came back
            send([number, *verdict])


def _read(connection: socket.socket, messages: queue.SimpleQueue[Any]) -> None:
    with connection.makefile("rb") as stream:
        while len(length := stream.read(LENGTH.size)) == LENGTH.size:
            messages.put(pickle.loads(stream.read(LENGTH.unpack(length)[0])))
    os._exit(0)  # the pool was closed, or its process is gone


def _judge(
    verify: Verifier, text: str, entry: dict[str, Any], failure: Callable[..., str]
) -> tuple[float | None, str | None, dict[str, float], list[tuple[int, int, float]]]:
    """Value, or why there is none, further rewards by name, and those of parts of the text."""
    try:
        found = verify(text, entry)
        given = dict(found) if isinstance(found, dict) else {}
        spans = [(int(begin), int(end), float(v)) for begin, end, v in given.pop("spans", ())]
        if wrong := [(begin, end) for begin, end, _ in spans if not 0 <= begin < end <= len(text)]:
            raise ValueError(f"the span {wrong[0]} is not of a text of {len(text)} characters")
        named = {str(name): float(v) for name, v in given.items()}
        if isinstance(found, dict) and "reward" not in named:
            raise ValueError("the verifier's dict names no 'reward'")
        value = named.pop("reward") if isinstance(found, dict) else float(found)
    except BaseException as error:  # sys.exit too
        return None, failure(error, verify), {}, []
    for number in (value, *named.values(), *(v for _, _, v in spans)):
        if not _fits(number):
            return None, f"the verifier returned {number:g}, which is not finite in fp32", {}, []
    return value, None, named, spans


def _fits(value: float) -> bool:
    """Whether it is finite in what training keeps of it."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return False
    return bool(rounded - rounded == 0)


class _Sender:
    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self._connection, self._token = connection, token

    def __call__(self, message: list[Any]) -> None:
        text = json.dumps(message).encode()
        try:
            self._connection.sendall(HEADER.pack(self._token, len(text), zlib.crc32(text)) + text)
        except OSError:
            os._exit(0)


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# -- verifiers ---------------------------------------------------------------------------------------------------------


def load_verifier(name: str, tasks: list[tuple[str, dict[str, Any]]]) -> Verifier:
    """The function ``(response text, entry) -> value`` that ``name`` stands for.

    The value is a number, or a dict of numbers by name, ``reward`` among them, and maybe ``spans``: a list of
    ``(begin, end, value)``, rewards of characters of the text.
    """
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
    sys.path.insert(0, str(path.parent.resolve()))
    module = _load_file(path.stem, path)
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
