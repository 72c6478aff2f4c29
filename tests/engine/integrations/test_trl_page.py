"""The code of docs/trl.md runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .trl_tiny import save_model

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"


def test_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "path" / "to" / "model")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    code = "\n".join(blocks).replace("max_steps=2", "max_steps=2, use_cpu=True, max_completion_length=8")
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert type(names["trainer"]).__name__ == "RolltreeGRPOTrainer"
