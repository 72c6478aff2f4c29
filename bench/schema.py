"""The one row schema of every benchmark, as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
VERSIONED = ("rolltree", "torch", "triton", "transformers")
RECORDS = (".outcomes.jsonl", ".curves.jsonl")
"""Endings of files in a folder of rows that hold something else."""


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    op: str
    case: str
    provider: str
    direction: str  # what was timed: "forward", "forward+backward", "step"
    metric: str  # "time_ms", "peak_memory_mib", "speedup", "share", "accuracy"
    value: float  # the median over repetitions
    p20: float
    p80: float
    ceiling: float | None  # the limit in the metric's own unit, None if unknown
    device: str
    versions: dict[str, str]
    commit: str
    time: str  # UTC, ISO 8601
    flop: float | None = None  # of the least work, None if not counted
    bytes: float | None = None  # of the least traffic, None if not counted


@dataclass(frozen=True)
class Context:
    """The fields that all rows of a run share."""

    device: str
    versions: dict[str, str]
    commit: str
    time: str

    @classmethod
    def of(cls, device: torch.device) -> Context:
        return cls(device_name(device), versions(device), commit(), datetime.now(UTC).isoformat(timespec="seconds"))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*: (.*)", cpuinfo.read_text())):
        model = match[1]
    return f"{model}, {torch.get_num_threads()} threads"


def folder_name(device: torch.device) -> str:
    """Return the name of the device's folder under ``bench/results``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def versions(device: torch.device) -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    if device.type == "cuda":
        installed |= {"cuda": str(torch.version.cuda), "driver": driver()}
    return installed


def driver() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        told = []
    return told[0] if told else "unknown"  # a line a GPU


def commit() -> str:
    """Return the short hash of the checkout, with ``-dirty`` if tracked files differ from it.

    For sources without a repository it is the environment variable ``ROLLTREE_COMMIT``, or "unknown".
    """
    command = [
        "git",
        f"--git-dir={REPOSITORY / '.git'}",
        f"--work-tree={REPOSITORY}",
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ROLLTREE_COMMIT") or "unknown"


def append(rows: Iterable[Row], path: Path) -> None:
    """Append ``rows`` to the JSON-lines file ``path``; each line is complete even if the run is killed."""
    for row in rows:
        append_line(asdict(row), path)


def append_line(values: Mapping[str, object], path: Path) -> None:
    """Append one JSON object as a line, which is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(values) + os.linesep)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """Return the rows of a JSON-lines file.

    Raises:
        ValueError: a line is not a row; the message names file and line.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values: Mapping[str, object] = json.loads(line)
            rows.append(Row(**values))  # type: ignore[arg-type]
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a benchmark row: {error}") from error
    return rows


def rows_at(path: Path) -> list[Row]:
    """Return the rows of a file, or of all ``*.jsonl`` in a folder.

    Raises:
        ValueError: there are none, or a line is not a row.
    """
    files = sorted(f for f in path.glob("*.jsonl") if not f.name.endswith(RECORDS)) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ValueError(f"'{path}' holds no benchmark rows; give a .jsonl file or a folder of them.")
    return [row for file in files for row in read(file)]
