from __future__ import annotations

import json
import logging
import re
import weakref
from pathlib import Path

import pytest

from jaxserve.api_types import StageTimes
from jaxserve.errors import ConfigError
from jaxserve.observability import log
from jaxserve.observability.acceptance import Acceptance


def test_lines_have_time_and_level_and_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info")
    log.setup("info")
    logging.getLogger("jaxserve.engine").info("hello")
    logging.getLogger("jaxserve.engine").debug("too fine")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO hello\n", capsys.readouterr().err)


def test_the_lines_of_the_catalogue() -> None:
    assert (
        log.decode_line(
            running=233,
            tokens=370959,
            usage=(0.82,),
            throughput=4594.01,
            queued=417,
            fine=True,
            bucket=256,
            padding=0.0898,
        )
        == "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, gen throughput (token/s): 4594.01, "
        "#queue-req: 417, cuda graph: True, bucket: 256, padding: 8.98%"
    )
    speculating = log.decode_line(
        running=2, tokens=100, usage=(0.5,), throughput=10.0, queued=0, fine=True, bucket=2, padding=0.0,
        acceptance=Acceptance(10, 24, 15),
    )  # fmt: skip
    assert "token usage: 0.50, accept len: 2.50, accept rate: 0.62, gen throughput" in speculating
    staged = log.decode_line(
        running=2, tokens=100, usage=(0.5,), throughput=10.0, queued=0, fine=True, bucket=2, padding=0.0,
        stages=[StageTimes(9.5, 0.5), StageTimes(7.0, 3.0), StageTimes()],
    )  # fmt: skip
    assert staged.endswith("bucket: 2, padding: 0.00%, stages busy: 95%/70%/0%")
    stateful = log.decode_line(
        running=2, tokens=100, usage=(0.5,), throughput=10.0, queued=0, fine=True, bucket=2, padding=0.0,
        states=(3, 0.25),
    )  # fmt: skip
    assert "token usage: 0.50, mamba num: 3, mamba usage: 0.25, gen throughput" in stateful
    assert (
        log.prefill_line(new_seq=2, new_token=300, cached_token=16, usage=(0.5,), running=3, queued=4, hit_rate=0.25)
        == "Prefill batch. #new-seq: 2, #new-token: 300, #cached-token: 16, token usage: 0.50, #running-req: 3, "
        "#queue-req: 4, cache hit rate: 25.00%"
    )


@pytest.fixture
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the handlers of pytest, which Python would close."""
    monkeypatch.setattr(logging, "_handlers", weakref.WeakValueDictionary())
    monkeypatch.setattr(logging, "_handlerList", [])


@pytest.mark.usefixtures("own_handlers")
def test_a_file_says_where_lines_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    existing = logging.getLogger("jaxserve.engine")
    log.setup("info")
    written, config = tmp_path / "written", tmp_path / "log.json"
    config.write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"short": {"format": "%(name)s: %(message)s"}},
                "handlers": {"file": {"class": "logging.FileHandler", "filename": str(written), "formatter": "short"}},
                "loggers": {"jaxserve": {"handlers": ["file"]}, "jaxserve.access": {"level": "ERROR"}},
            }
        )
    )
    for level in ("warning", "info"):
        log.setup(level, "engine 1", str(config))
        for name in ("jaxserve.engine", "jaxserve.access"):
            logging.getLogger(name).info("at %s", level)
        assert not existing.disabled
    assert written.read_text() == "jaxserve.engine: at info\n"
    assert capsys.readouterr().err == ""
    logging.getLogger("jaxserve.access").setLevel(logging.NOTSET)
    for handler in logging.getLogger("jaxserve").handlers:
        handler.close()


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "mapping"),
        ("{}", "version"),
        ('{"version": 1, "handlers": {"a": {"class": "logging.NoHandler"}}}', "NoHandler"),
        ('{"version": 1, "loggers": {"jaxserve": {"level": "LOUD"}}}', "LOUD"),
        ('{"version": 1, "handlers": 5}', "int"),
    ],
)
def test_a_wrong_file_is_named(text: str | None, why: str, tmp_path: Path) -> None:
    config = tmp_path / "log.json"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ConfigError, match=rf"--log-config-file {config} can't be used: .*{why}"):
        log.setup("info", config_file=str(config))


@pytest.mark.usefixtures("own_handlers")
def test_a_file_that_names_no_logger_of_ours_leaves_lines_to_the_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    existing = logging.getLogger("jaxserve.engine")
    log.setup("info")
    config = tmp_path / "log.json"
    config.write_text('{"version": 1, "loggers": {"other": {"level": "INFO"}}}')
    log.setup("info", config_file=str(config))
    existing.info("to the root")
    assert "to the root" in caplog.text
    assert capsys.readouterr().err == ""
