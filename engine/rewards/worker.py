"""The verifier process, run by `keeper.py`; it imports neither torch nor the rest of rolltree.

It communicates with :class:`RewardPool` over a socket. First comes a *setup* message ``{verifier, tasks, options,
timeout_s, by_group, token}``, answered by ``["ready", note]`` or ``["broken", why]``; then lists of ``(number, texts of
responses, entry)``, each answered in order by ``[number, verdicts]``, one ``[value, reason, named, spans, unparsed,
skipped]`` for each text. If the texts are None, only the entry is checked, and ``reason`` is the reason why responses
to it could not be judged. A judge of groups gets the list of texts; any other verifier gets one. Answers are JSON:
nothing that user code returns is unpickled.

User code shares the process, and may write to any file descriptor. The socket has a high number, closes on ``exec``,
and each answer is framed by the token of its process and a checksum, so that the pool mistakes nothing else for one.
"""

from __future__ import annotations

import fcntl
import importlib
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

HEADER = struct.Struct("!16sII")
"""The header of each answer: the token, and length and checksum of the JSON that follows."""
LENGTH = struct.Struct("!Q")
"""The header of each message of the pool: the length of the pickle that follows."""


def main(fd: int) -> None:
    os.dup2(2, 1)  # a verifier's prints must not mix with the run's output
    sys.argv = sys.argv[:1]
    sys.set_int_max_str_digits(0)  # problems and answers hold long numbers; the time limit bounds their reading
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: none
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(fd, min(limit % 1025, 1024) - 16))
    os.close(fd)
    connection = socket.socket(fileno=high)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    setup = messages.get()
    send = _Sender(connection, setup["token"])
    package = ModuleType("rolltree_rewards")  # this folder without its __init__, which imports torch
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules[package.__name__] = package
    verifiers = importlib.import_module("rolltree_rewards.verifiers")
    load_file = importlib.import_module("rolltree_rewards.loading").load_file
    failure = load_file("rolltree_calling", Path(__file__).parents[1] / "parts" / "calling.py").failure
    try:
        verify, note = verifiers.load_verifier(setup["verifier"], setup["tasks"], setup["options"], setup["timeout_s"])
    except BaseException as error:
        send(["broken", failure(error)])
        return
    send(["ready", note])
    here = os.getpid()
    while True:
        for number, texts, entry in messages.get():
            verdicts: list[Verdict]
            if texts is None:
                verdicts = [(None, _check(verify, entry), {}, [], None, None)]
            elif setup["by_group"]:
                verdicts = _judge_group(verify, texts, entry, failure, verifiers.WORD)
            else:
                verdicts = [_judge(verify, text, entry, failure, verifiers.WORD) for text in texts]
            if os.getpid() != here:
                os._exit(0)  # the verifier forked, and the child returned too
            send([number, verdicts])


def _read(connection: socket.socket, messages: queue.SimpleQueue[Any]) -> None:
    with connection.makefile("rb") as stream:
        while len(length := stream.read(LENGTH.size)) == LENGTH.size:
            messages.put(pickle.loads(stream.read(LENGTH.unpack(length)[0])))
    os._exit(0)  # the pool was closed, or its process is gone


def _check(verify: Callable[..., Any], entry: dict[str, Any]) -> str | None:
    """Return the reason why responses to a problem could not be judged; None if there is none."""
    check = getattr(verify, "check", None)
    try:
        if callable(check):
            check(entry)
    except BaseException as error:  # also from a library that reads the reference
        return str(error) or type(error).__name__
    return None


Verdict = tuple[float | None, str | None, dict[str, float], list[tuple[int, int, float]], str | None, str | None]
"""Value, reason of a failure, named rewards, spans, and the words ``unparsed`` and ``skipped``."""


def _judge_group(
    judge: Callable[..., Any],
    texts: list[str],
    entry: dict[str, Any],
    failure: Callable[..., str],
    word: re.Pattern[str],
) -> list[Verdict]:
    """Return a verdict on each response of a group; if the judge fails, all have its reason."""
    try:
        values = list(judge(texts, entry))
        if len(values) != len(texts):
            raise ValueError(f"the judge returned {len(values)} values for {len(texts)} responses")
    except BaseException as error:  # sys.exit too
        return [(None, failure(error, judge), {}, [], None, None)] * len(texts)
    return [
        _judge(lambda *_, value=value: value, text, entry, failure, word)
        for text, value in zip(texts, values, strict=True)
    ]


def _judge(
    verify: Callable[..., Any], text: str, entry: dict[str, Any], failure: Callable[..., str], word: re.Pattern[str]
) -> Verdict:
    """Return the verdict on a response."""
    try:
        answer = verify(text, entry)
        fields = dict(answer) if isinstance(answer, dict) else {"reward": answer}
        unparsed, skipped = (fields.pop(name, None) for name in ("unparsed", "skipped"))
        for name, why in (("unparsed", unparsed), ("skipped", skipped)):
            if why is not None and not (isinstance(why, str) and word.fullmatch(why)):
                raise ValueError(f"the verifier's '{name}' must be a word in lower case, but it is {why!r}")
        spans = [(int(begin), int(end), float(v)) for begin, end, v in fields.pop("spans", ())]
        if wrong := [(begin, end) for begin, end, _ in spans if not 0 <= begin < end <= len(text)]:
            raise ValueError(f"the span {wrong[0]} is not within a text of {len(text)} characters")
        if "reward" not in fields:
            raise ValueError("the verifier's dict has no 'reward'")
        value = fields.pop("reward")
        if (value is not None) and skipped is not None:
            raise ValueError(f"the verifier skipped a response ('{skipped}') and gave it a reward of {value!r}")
        value = None if value is None else float(value)
        named = {str(name): float(v) for name, v in fields.items()}
    except BaseException as error:  # sys.exit too
        return None, failure(error, verify), {}, [], None, None
    for number in (*(() if value is None else (value,)), *named.values(), *(v for _, _, v in spans)):
        if not _fits(number):
            return None, f"the verifier returned {number:g}, which is not finite in fp32", {}, [], None, None
    return value, None, named, spans, unparsed, (skipped or "no_verdict") if value is None else None


def _fits(value: float) -> bool:
    """Return True if a value is finite in fp32, the precision that training keeps."""
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
