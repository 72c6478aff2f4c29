"""Serves the page on a run to this machine's browsers and renews it while the run goes on; it only reads files.

    GET /           the page; after the end of the run the report itself
    GET /plotly.js  the library of its plots, which it loads beside, so that the rest is there before
    GET /news       what has changed since a version of the page; 204 for nothing, 410 after the end

The page shows trees of the newest steps, and, of agents, the episodes under way. What a page of a version shows is kept
for some versions, so that it is sent its new points and trees alone, whatever has happened to the run's files.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from ...errors import UserError
from ...record.directory import EPISODES
from ...record.problems import PROBLEMS
from .changes import changes
from .figures import Figure
from .page import drawn, parts, plots_of, render, token_texts
from .run_data import Metrics, RunData, read_run
from .trees import MAX_TOKENS, TokenTexts, columns_of, step_trees
from .writing import plotly_js, template

NEWEST_STEPS = 5
"""Steps whose trees the page has."""
VERSIONS = 8
"""Versions of the page whose plots and trees are kept; a page of another one is sent all of them."""
EVERY_MS = 1000
"""Milliseconds between two questions of a page for what is new."""
SHOWN, PLOTTED = ("config.toml", "metrics.jsonl", PROBLEMS, "rollouts", EPISODES, "report.html"), 3
"""Files whose times are the version of the page, and how many of them, the first ones, its plots depend on."""
EXPORTED, NO_REPORT_NS = "export/config.json", 20 * 10**9
"""File of the exported model, and nanoseconds after it in which the run writes its report, if it does."""
HOSTS = ("127.0.0.1", "localhost")


def watch(run_dir: Path, port: int) -> None:
    """Serve the page until the process is interrupted.

    Args:
        port: 0: any that is free.

    Raises:
        UserError: ``run_dir`` is not the directory of a run, or the port is taken.
    """
    watched = Watched(run_dir)
    watched.page()  # imports what takes long

    class Handler(_Handler):
        run = watched

    try:
        server = ThreadingHTTPServer((HOSTS[0], port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port} cannot be served ({error.strerror}); choose another, or leave it out."
        ) from error
    server.daemon_threads = True
    with server, suppress(KeyboardInterrupt):
        print(f"http://{HOSTS[0]}:{server.server_address[1]}/ shows '{run_dir}'; Ctrl-C ends it.", flush=True)
        server.serve_forever()
    print("No longer served.", file=sys.stderr)


class Shown(NamedTuple):
    """The plots by their ids, and the trees by their files with the times of these, of a version of the page."""

    plots: dict[str, Figure]
    trees: dict[str, tuple[int, list[dict[str, Any]]]]


class Watched:
    """A run whose files are read again when they change; its methods may be called from any thread.

    Raises:
        UserError: ``run_dir`` is not the directory of a run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._metrics = run_dir, Metrics()
        read_run(run_dir, self._metrics)
        self._lock = threading.Lock()
        self._shown: dict[str, Shown] = {}  # by the version
        self._texts: TokenTexts | None = None
        self._last_page = "", ""  # the version of the page that was made last, and the page

    def page(self) -> str:
        """Return the page; of a run that has ended, the report."""
        with self._lock:
            version = self._version()
            if version != self._last_page[0]:
                self._last_page = version, self._page(version)
            return self._last_page[1]

    def _page(self, version: str) -> str:
        run = read_run(self.run_dir, self._metrics)
        if self._has_ended(run):
            report = self.run_dir / "report.html"
            return report.read_text(encoding="utf-8") if self._is_reported() else render(run)
        shown = self._shows(run, version)
        return self._rendered(run, parts(run, _explorer(shown)) | drawn(run, shown.plots), version)

    def _rendered(self, run: RunData, variables: dict[str, Any], version: str) -> str:
        live = _live(run, self._journal()) | {"version": version, "every_ms": EVERY_MS}
        return template("report.html.j2").render(**variables, live=live)

    def news(self, version: str) -> dict[str, Any] | None:
        """Return what a page of ``version`` lacks; None if nothing, and an empty dict if the run has ended."""
        with self._lock:
            now = self._version()
            if now == version:
                return None
            run = read_run(self.run_dir, self._metrics)
            if self._has_ended(run):
                return {}
            before, shown = self._shown.get(version, Shown({}, {})), self._shows(run, now)
            explorer = _explorer(shown)
            added = [trees for name, (at, trees) in shown.trees.items() if before.trees.get(name, (0, []))[0] != at]
            nothing = dict.fromkeys(("data", "layout"))
            return {
                "version": now,
                "html": self._rendered(run, parts(run, explorer) | {"trees_json": "[]"} | drawn(run, {}), now),
                "plots": {
                    name: [*changes(before.plots.get(name, nothing), plot)] for name, plot in shown.plots.items()
                },
                "trees": list(chain.from_iterable(added)),
                "steps": sorted({tree["step"] for tree in explorer["trees"]}),
                "columns": explorer["columns"],
            }

    def _has_ended(self, run: RunData) -> bool:
        """Return whether the run has written its report, or exported its model after its last step and writes none."""
        steps = run.config.get("trainer", {}).get("steps", math.inf)
        return self._is_reported() or (bool(run.rows) and run.rows[-1]["step"] >= steps and self._is_exported())

    def _is_reported(self) -> bool:
        """Return whether the report has been written after the last metrics."""
        report, metrics = _changed(self.run_dir / "report.html"), _changed(self.run_dir / "metrics.jsonl")
        return report > 0 and report >= metrics

    def _is_exported(self) -> bool:
        exported = _changed(self.run_dir / EXPORTED)
        return 0 < exported < time.time_ns() - NO_REPORT_NS

    def _version(self) -> str:
        return "-".join(map(str, (*(_changed(self.run_dir / name) for name in SHOWN), int(self._is_exported()))))

    def _shows(self, run: RunData, version: str) -> Shown:
        """Return what a page of the version shows; what the last version has, of the same files, is not made again."""
        if version not in self._shown:
            last, newest = next(reversed(self._shown.items()), ("", Shown({}, {})))
            same = last.split("-")[:PLOTTED] == version.split("-")[:PLOTTED]
            self._shown[version] = Shown(newest.plots if same else plots_of(run), self._trees(run, newest.trees))
            for old in [*self._shown][:-VERSIONS]:
                del self._shown[old]
        return self._shown[version]

    def _trees(
        self, run: RunData, read: Mapping[str, tuple[int, list[dict[str, Any]]]]
    ) -> dict[str, tuple[int, list[dict[str, Any]]]]:
        """Return the trees of the newest steps."""
        trees = {}
        if self._texts is None and run.rollout_files:
            self._texts = token_texts(run)
        for file in run.rollout_files[-NEWEST_STEPS:]:
            changed, before = _changed(file), read.get(file.name)
            if before is None or before[0] != changed:
                try:
                    before = changed, step_trees(file, self._texts, MAX_TOKENS // NEWEST_STEPS)
                except (OSError, ValueError, KeyError) as error:
                    run.missing.append(f"rollouts/{file.name} cannot be read ({' '.join(str(error).split())[:120]}).")
                    continue
            trees[file.name] = before
        return trees

    def _journal(self) -> Mapping[str, Any]:
        """Return what the run tells of its episodes under way; nothing where there is none."""
        try:
            return json.loads((self.run_dir / EPISODES).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}


def _explorer(shown: Shown) -> dict[str, Any]:
    """Return the trees that a page shows, as `explorer_data` does."""
    trees = [tree for _, of_file in shown.trees.values() for tree in of_file]
    note = f"Trees of the newest {len(shown.trees)} steps; the report has others too." if trees else ""
    return {"trees": trees, "columns": columns_of(trees), "note": note}


def _live(run: RunData, journal: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run that goes on: its state, failures, and episodes under way."""
    metrics = run.run_dir / "metrics.jsonl"
    last = int(run.rows[-1]["step"]) if run.rows else None
    step = (
        "No step has been recorded yet" if last is None else f"Step {last} was recorded at {_clock(_changed(metrics))}"
    )
    names = dict.fromkeys(name for row in run.rows for name in row if "/failed" in name)
    failures = [
        {"name": name, "last": f"{run.rows[-1].get(name, 0):g}", "total": f"{run.total(name):g}"} for name in names
    ]
    episodes = journal.get("episodes", [])
    note = f"{len(episodes)} episodes, {journal.get('waiting', 0)} that wait for their turn; "
    return {
        "status": f"{step}. The page is renewed while the run goes on.",
        "failures": [row for row in failures if row["total"] != "0"],
        "reasons": journal.get("failed", []),
        "episodes": episodes,
        "episodes_note": note + f"written at {_clock(journal.get('written_ns', 0))}.",
    }


def _clock(nanoseconds: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(nanoseconds / 1e9))


def _changed(path: Path) -> int:
    """Return when a file was changed, in nanoseconds; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class _Handler(BaseHTTPRequestHandler):
    run: Watched

    def do_GET(self) -> None:
        try:
            self._route()
        except Exception as error:  # the page tells it and asks again
            self._answer(500, "text/plain", f"{type(error).__name__}: {error}")

    def _route(self) -> None:
        address = urlsplit(self.path)
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:  # a page of another site, by its own name
            self._answer(403, "text/plain", f"This server is {HOSTS[0]}.")
        elif address.path == "/":
            self._answer(200, "text/html", self.run.page())
        elif address.path == "/plotly.js":
            self._answer(200, "text/javascript", plotly_js(), cached="max-age=86400")
        elif address.path == "/news":
            if (news := self.run.news(parse_qs(address.query)["version"][0])) is None:
                self._answer(204, "text/plain", "")
            elif not news:
                self._answer(410, "text/plain", "The run has ended.")
            else:
                self._answer(200, "application/json", json.dumps(news, allow_nan=False))
        else:
            self._answer(404, "text/plain", "There are /, /plotly.js and /news.")

    def _answer(self, status: int, kind: str, text: str, cached: str = "no-store") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", cached)
        with suppress(ConnectionError):  # the page has been closed
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing: a page asks each second."""
