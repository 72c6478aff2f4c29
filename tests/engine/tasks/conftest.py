from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rolltree.engine.model.loading import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(toml: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(toml.parent / "model")
