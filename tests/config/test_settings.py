import msgspec
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.config.settings import as_flag, as_key, settings
from jaxserve.errors import ConfigError


def test_every_field_of_the_schema_is_a_setting_with_a_description() -> None:
    fields = [field.name for owner in (EngineConfig, ServerConfig) for field in msgspec.structs.fields(owner)]
    assert list(settings()) == fields
    assert all(setting.description for setting in settings().values())


def test_flag_and_key_are_inverse() -> None:
    assert [as_key(as_flag(name)) for name in settings()] == list(settings())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("page_size", "32", 32),
        ("context_length", "4096", 4096),
        ("chunked_prefill_size", "-1", -1),
        ("mem_fraction_static", "0.5", 0.5),
        ("mem_fraction_static", "1", 1.0),
        ("model", "null", "null"),
        ("api_key", "12345", "12345"),
        ("dtype", "float32", "float32"),
        ("cuda_graph_bs", ["1", "2,4"], (1, 2, 4)),
    ],
)
def test_the_text_of_a_flag_is_converted_to_the_field_s_type(name: str, text: str | list[str], value: object) -> None:
    parsed = settings()[name].parse(text, "--x")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("page_size", "many", "--x must be a whole number, got 'many'"),
        ("page_size", "1.5", "--x must be a whole number, got '1.5'"),
        ("context_length", "null", "--x must be a whole number, got 'null'"),
        ("watchdog_timeout", "nan", "--x must be a finite number, got nan"),
        ("dtype", "int8", "--x must be one of auto, bfloat16, float32, got 'int8'"),
        ("cuda_graph_bs", ["1", "two"], "--x must be a list of whole numbers, got 1,two"),
    ],
)
def test_an_invalid_text_is_an_error_that_says_what_is_valid(name: str, text: str | list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings()[name].parse(text, "--x")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", "16"),
        ("page_size", True),
        ("page_size", None),
        ("model", 7),
        ("disable_overlap_schedule", 1),
        ("cuda_graph_bs", 8),
        ("mem_fraction_static", float("inf")),
    ],
)
def test_yaml_values_must_have_the_exact_type(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="x must be"):
        settings()[name].convert(value, "x")


def test_none_means_chosen_at_start_up() -> None:
    assert settings()["context_length"].convert(None, "x") is None
