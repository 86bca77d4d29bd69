from jaxserve.config.explain import as_rows, as_text
from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.settings import settings

LOADED = load_config(
    [
        GivenSetting("max_num_seqs", "8", "flag", "--max-num-seqs"),
        GivenSetting("api_key", "secret", "flag", "--api-key"),
        GivenSetting("hf_token", "hf_secret", "flag", "--hf-token"),
        GivenSetting("cuda_graph_bs", ["1", "2"], "flag", "--cuda-graph-bs"),
        GivenSetting("enable_metrics", True, "flag", "--enable-metrics"),
    ]
)


def test_there_is_a_row_for_every_setting() -> None:
    assert [row["key"] for row in as_rows(LOADED)] == list(settings())


def test_a_row_has_value_origin_and_description() -> None:
    (row,) = [row for row in as_rows(LOADED) if row["key"] == "max_running_requests"]
    assert row == {
        "key": "max_running_requests",
        "value": 8,
        "source": "flag",
        "place": "--max-num-seqs",
        "alias": "max_num_seqs",
        "part": "engine",
        "description": settings()["max_running_requests"].description,
    }


def test_the_text_has_the_same_values_and_ends_with_the_notes() -> None:
    lines = list(as_text(LOADED))
    assert "max_running_requests = 8  [flag --max-num-seqs, alias max_num_seqs]" in lines
    assert "cuda_graph_bs = [1, 2]  [flag --cuda-graph-bs]" in lines
    assert "page_size = 16  [default]" in lines
    assert "context_length = not set  [default]" in lines
    assert lines[-1].startswith("--enable-metrics: ")


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in str(as_rows(LOADED)) + "\n".join(as_text(LOADED))
