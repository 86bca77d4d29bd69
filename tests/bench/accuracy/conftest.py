from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.bench.load.target_server import load_named_tokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.tiny_model import byte_tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder of a tokenizer whose ids are bytes, as `BigramServer` has it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_tokenizer("<s>", "</s>").save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_named_tokenizer(str(tokenizer_folder))
