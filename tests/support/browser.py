"""A headless Chromium that a test drives over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page of the browser.

    Attributes:
        errors: what its scripts raised.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number = read, write, b"", 0
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self.tell(f"{domain}.enable")

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Return the browser's answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._heard()
            if heard.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(heard["params"]["exceptionDetails"])[:500])
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return heard["result"]

    def tell(self, method: str, **params: Any) -> Any:
        """Return the page's answer to a command."""
        return self.ask(method, self._session, **params)

    def open(self, address: str) -> None:
        self.tell("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.tell("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def until(self, script: str, seconds: float = 60.0, meanwhile: Callable[[], object] = lambda: None) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, (
                script,
                self.errors,
                self.value("document.body.innerText.slice(0, 2000)"),
            )
            meanwhile()
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        data = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _heard(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own, which ends afterwards."""
    assert PROGRAM is not None
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--window-size=1300,1600",
            f"--user-data-dir={profile}",
        ]
        numbered = "import os, sys; [os.dup2(os.dup(int(fd)), to) for fd, to in zip(sys.argv[1:3], (53, 54))]; "
        numbered += "os.dup2(53, 3); os.dup2(54, 4); os.execv(sys.argv[3], sys.argv[3:])"
        words = [sys.executable, "-S", "-c", numbered, str(theirs_read), str(theirs_write), PROGRAM]
        flags += ["--remote-debugging-pipe", "--disable-dev-shm-usage"]
        process = subprocess.Popen(
            [*words, *flags], pass_fds=(theirs_read, theirs_write), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile},
        )  # fmt: skip
        os.close(theirs_read)
        os.close(theirs_write)
        try:
            yield Page(ours_read, ours_write)
        finally:
            process.kill()
            process.wait()
            os.close(ours_read)
            os.close(ours_write)
