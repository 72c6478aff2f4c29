"""The file of a run's directory that tells which problems were tried, and how well they are solved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROBLEMS = "problems.json"


def write_problems(directory: Path, step: int, table: Mapping[str, Any]) -> None:
    """Write the estimates of a curriculum after ``step``, completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    partial = directory / f".{PROBLEMS}.partial"
    partial.write_text(json.dumps({"step": step, **table}), encoding="utf-8")
    os.replace(partial, directory / PROBLEMS)
