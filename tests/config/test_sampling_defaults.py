from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.load import from_arguments
from jaxserve.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from tests.model_source.gguf_files import write_gguf

# As on the hub: with fields for transformers
QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "max_new_tokens": 2048,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.51.0",
}
OPTIONS = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


def write(folder: Path, **fields: Any) -> ModelSource:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return ModelSource(folder, "folder", "m")


def test_the_models_own_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = write(tmp_path, **QWEN)

    assert read_sampling_defaults("auto", None, source) == SamplingDefaults(OPTIONS)
    [line] = caplog.messages
    shown = "temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05"
    assert line.startswith(f"Default sampling parameters: {shown} from {tmp_path / 'generation_config.json'} (")


def test_neutral_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bare = tmp_path / "bare"
    bare.mkdir()

    assert read_sampling_defaults("vllm", None, write(tmp_path, **QWEN)) == SamplingDefaults()
    assert read_sampling_defaults("auto", None, ModelSource(bare, "orbax", "m")) == SamplingDefaults()
    assert read_sampling_defaults("auto", None, write(bare, eos_token_id=1)) == SamplingDefaults()
    assert not caplog.messages


def test_those_of_a_folder(tmp_path: Path) -> None:
    other = write(tmp_path / "other", **QWEN).path
    source = write(tmp_path / "model", temperature=0.1, min_p=0.1)

    assert read_sampling_defaults(str(other), None, source) == SamplingDefaults(OPTIONS, 2048)
    with pytest.raises(ConfigError, match=r"generation_config=/nowhere: there is no /nowhere/generation_config\.json"):
        read_sampling_defaults("/nowhere", None, source)


def test_an_override_changes_sets_and_takes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    override = {"temperature": 1, "top_k": None, "presence_penalty": 0.5, "max_new_tokens": 7}
    own = {name: value for name, value in override.items() if name in ("temperature", "presence_penalty")}

    found = read_sampling_defaults("auto", override, write(tmp_path, **QWEN))
    assert found == SamplingDefaults({"repetition_penalty": 1.05, "top_p": 0.8} | own, 7)
    assert isinstance(found.options["temperature"], float)
    assert found.fields == {"repetition_penalty": 1.05, "top_p": 0.8, "max_tokens": 7} | own
    shown = "temperature=1, presence_penalty=0.5, max_new_tokens=7"
    assert f"json; {shown} from override_generation_config (" in caplog.text
    assert read_sampling_defaults("vllm", override, write(tmp_path, **QWEN)) == SamplingDefaults(own, 7)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"do_sample": False}, "has no field do_sample; it has temperature, "),
        ({"temperture": 1.0}, "has no field temperture"),
        ({"temperature": -1}, r"temperature=-1: Expected `float` >= 0\.0"),
        ({"top_k": 1.5}, r"top_k=1\.5"),
        ({"top_p": "0.9"}, r"top_p='0\.9'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_a_wrong_override_is_refused_at_once(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"override_generation_config.*{message}"):
        ServerConfig(override_generation_config=field)
    with pytest.raises(ConfigError, match=f"override_generation_config.*{message}"):
        from_arguments([("override_generation_config", field)])


def test_a_wrong_value_of_a_file_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path, temperature=-1, top_p=True, top_k=None, min_p=0.1, repetition_penalty="1")

    assert read_sampling_defaults("auto", None, source) == SamplingDefaults({"min_p": 0.1})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for shown in ("temperature=-1 is ignored", "top_p=True is ignored", "repetition_penalty='1' is ignored"):
        assert shown in caplog.text


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")

    for choice in ("auto", str(tmp_path)):
        with pytest.raises(ConfigError, match="can't be read as JSON"):
            read_sampling_defaults(choice, None, ModelSource(tmp_path, "folder", "m"))


def test_a_gguf_file_has_them_in_its_metadata_or_beside_it(tmp_path: Path) -> None:
    values = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    source = ModelSource(write_gguf(tmp_path / "m.gguf", values=values), "gguf", "m")

    found = read_sampling_defaults("auto", None, source).options
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    write(tmp_path, temperature=0.9)
    assert read_sampling_defaults("auto", None, source).options == {"temperature": 0.9}


def test_the_limit_of_answers() -> None:
    assert SamplingDefaults(max_tokens=5).limited(None) == SamplingDefaults(max_tokens=5).limited(9) == 5
    assert SamplingDefaults(max_tokens=5).limited(0) == 0
    assert SamplingDefaults().limited(9) == 9
    assert SamplingDefaults().limited(None) is None
