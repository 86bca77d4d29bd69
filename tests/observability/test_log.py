from __future__ import annotations

import logging
import re

import pytest

from jaxserve.api_types import StageTimes
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
