"""A server with the parts of the Hugging Face hub's interface that reading data sets needs, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pytest


@dataclass
class Hub:
    """Sets by OWNER/NAME: the files of each, by their paths. What the server is asked is in ``asked``."""

    sets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Sets whose files are refused; their names are shown, as the hub does."""
    failing: bool = False
    """The server answers everything with status 503."""
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, name: str) -> str:
        """Return a commit that follows from the files."""
        found = hashlib.sha1()
        for path, content in sorted(self.sets[name].items()):
            found.update(path.encode() + b"\0" + content)
        return found.hexdigest()

    def answer(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        if self.failing:
            return 503, {}, b"{}"
        parts = path.strip("/").split("/")
        if parts[0] == "api" and parts[1] == "datasets":
            name, rest = "/".join(parts[2:4]), parts[4:]
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            name, rest = "/".join(parts[1:3]), parts[3:]
        else:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if name not in self.sets:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
        commit = self.commit(name)
        if len(rest) > 1 and rest[1] not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Repo-Commit": commit}, b"{}"
        if not rest or rest[0] == "revision":
            return self._json(self._described(name, commit))
        if rest[0] == "tree":
            return self._json(self._tree(name, "/".join(rest[2:]), query.get("recursive") != ["False"]))
        if rest[0] == "paths-info":
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
            return self._json([each for each in self._tree(name, "", True) if each["path"] in wanted])
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
        content = self.sets[name].get("/".join(rest[2:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"{}"
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content

    def _described(self, name: str, commit: str) -> dict[str, Any]:
        files = [{"rfilename": path, "size": len(content)} for path, content in self.sets[name].items()]
        described = {"id": name, "sha": commit, "private": False, "gated": name in self.gated, "disabled": False}
        return described | {"tags": [], "downloads": 0, "likes": 0, "siblings": files}

    def _tree(self, name: str, below: str, recursive: bool) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for path, content in self.sets[name].items():
            above = [str(each) for each in PurePosixPath(path).parents if str(each) != "."]
            for folder in above:
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            oid = hashlib.sha1(content).hexdigest()
            found[path] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
        inside = [each for path, each in found.items() if not below or path.startswith(f"{below}/")]
        depth = below.count("/") + 1 if below else 0
        return [each for each in inside if recursive or each["path"].count("/") == depth]

    @staticmethod
    def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub at ``hub.url``."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            hub.asked.append(f"{self.command} {unquote(url.path)}")
            status, headers, content = hub.answer(unquote(url.path), parse_qs(url.query), body)
            if (part := self.headers.get("Range")) and status == 200:
                first, _, last = part.removeprefix("bytes=").partition("-")
                end = min(int(last) if last else len(content) - 1, len(content) - 1)
                headers |= {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
                status, content = 206, content[int(first) : end + 1]
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _reply  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def clients_of(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's clients in this process ask a server and keep what they fetch in ``cache``; the variables
    HF_ENDPOINT and HF_HOME, which are read when they are imported, do this for a process."""
    hub = huggingface_hub.constants
    monkeypatch.setattr(hub, "ENDPOINT", url)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    huggingface_hub.HfFileSystem.clear_instance_cache()
