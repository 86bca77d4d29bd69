from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.weights import open_source
from tests.weights.conftest import GOLDEN


def test_a_folder_is_read_as_safetensors_and_nothing_else() -> None:
    source = ModelSource(GOLDEN / "llama2", "folder", "llama2")
    for load_format in ("auto", "safetensors"):
        assert "model.norm.weight" in open_source(source, load_format).infos
    with pytest.raises(ConfigError, match=r"load_format=gguf was asked for, but .* holds safetensors"):
        open_source(source, "gguf")
