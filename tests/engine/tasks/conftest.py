from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rolltree.engine.model.loading import load_tokenizer

from ...support.tiny import write_run


@pytest.fixture(scope="package")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="package")
def tokenizer(toml: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(toml.parent / "model")
