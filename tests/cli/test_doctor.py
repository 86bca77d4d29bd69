"""The doctor with a scripted server, on a clock that only `sleep` advances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from jaxserve.api_types import EngineStats, StageTimes
from jaxserve.cli import doctor
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.observability.metrics import Metrics
from tests.server.admin.test_metrics import INFO

BUSY = EngineStats(num_running=8, num_waiting=50, token_usage=0.95, num_pages=40)


class Scripted:
    """A server whose engine goes through `states`; a text is the reason why it died, None means no answer."""

    def __init__(self, *states: EngineStats | str | None, key: str | None = None) -> None:
        self._states = list(states)
        self._key = key
        self._last = EngineStats()
        self.now = 0.0

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://server", transport=httpx.MockTransport(self._answer))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def watch(self, seconds: float, interval: float = 1.0) -> Any:
        with self.client() as client:
            return doctor.watch(client, seconds, interval, clock=lambda: self.now, sleep=self.sleep)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        state = self._states[0]
        match request.url.path:
            case "/health":
                if state is None:
                    raise httpx.ConnectError("refused")
                if isinstance(state, str):
                    return httpx.Response(503, json={"status": "unhealthy", "reason": state})
                return httpx.Response(200, json={"status": "ok"})
            case "/metrics":
                if isinstance(state, EngineStats):
                    self._last = state
                if len(self._states) > 1:
                    self._states.pop(0)
                return httpx.Response(200, content=Metrics("tiny", lambda: (INFO, self._last)).render())
            case "/server_info":
                if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
                    return httpx.Response(401, json={"error": {}})
                return httpx.Response(200, json={"engine_config": {"schedule_conservativeness": 1.3}})
        return httpx.Response(404)


def stages(change: Callable[[int], dict[str, Any]]) -> Iterator[EngineStats]:
    for index in range(100):
        yield msgspec.structs.replace(BUSY, **change(index))


def test_it_samples_at_the_interval_until_the_time_is_over() -> None:
    server = Scripted(*stages(lambda index: {"generation_tokens": 100 * index}))
    samples, settings, notes = server.watch(5.0, 2.0)
    assert [sample.seconds for sample in samples] == [0.0, 2.0, 4.0, 5.0]
    assert [sample.generation_tokens for sample in samples] == [0, 100, 200, 300]
    assert settings.schedule_conservativeness == 1.3
    assert settings.schedule_policy == "lpm"
    assert notes == []
    text = doctor.report(samples, settings, notes)
    assert "gen throughput (token/s): 60.00" in text
    assert "#running-req 8 / 8 / 8 (of 32)" in text
    assert "HEALTHY: 4 of 4 samples had work" in text


def test_advice_is_shown_with_its_figure() -> None:
    server = Scripted(*stages(lambda index: {"num_retractions": index, "num_waiting": 0}))
    text = doctor.report(*server.watch(10.0))
    flat = " ".join(text.split())
    assert "FREQUENT RETRACTIONS: 10 requests were retracted in 10 s (60.0 a minute)" in flat
    assert "--schedule-conservativeness is 1.3 already" in flat
    assert "THE CLIENT IS THE BOTTLENECK: the queue was empty in 11 of 11 samples with work" in flat
    assert "HEALTHY" not in flat


def test_an_uneven_split_into_stages_is_told() -> None:
    server = Scripted(*stages(lambda index: {"stages": (StageTimes(index), StageTimes(0.5 * index, 0.5 * index))}))
    flat = " ".join(doctor.report(*server.watch(10.0)).split())
    assert "UNEVEN STAGES: of stages 0 to 1, stage 0 computed 1.33 times as long" in flat
    assert "busy 100%/50% of the time" in flat


def test_an_idle_server_is_not_judged() -> None:
    text = doctor.report(*Scripted(EngineStats()).watch(5.0))
    assert "There was work in 0 of 6 samples" in text


def test_watching_ends_when_the_engine_dies() -> None:
    samples, settings, notes = Scripted(BUSY, BUSY, "engine process ended with code -9 (SIGKILL)").watch(60.0)
    assert len(samples) == 3
    text = doctor.report(samples, settings, notes)
    assert "NOT SERVING: engine process ended with code -9 (SIGKILL)" in text


def test_an_unreachable_server() -> None:
    samples, settings, notes = Scripted(BUSY, BUSY, None).watch(60.0)
    assert len(samples) == 3
    assert samples[-1].running == 8, "the last there was"
    assert "NOT SERVING: no answer: refused" in doctor.report(samples, settings, notes)
    with pytest.raises(JaxserveError, match="http://server does not serve: no answer: refused"):
        Scripted(None).watch(60.0)


def test_a_server_with_a_key_hides_its_settings() -> None:
    samples, settings, notes = Scripted(BUSY, key="secret").watch(2.0)
    assert settings.schedule_conservativeness is None
    assert settings.schedule_policy == "lpm", "that is in the metrics"
    assert "--api-key" in doctor.report(samples, settings, notes)


def test_ctrl_c_reports_the_samples_so_far() -> None:
    class Interrupted(Scripted):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now > 3.0:
                raise KeyboardInterrupt

    samples, settings, notes = Interrupted(BUSY).watch(60.0)
    assert len(samples) == 4
    assert "Stopped before" in doctor.report(samples, settings, notes)


@pytest.mark.parametrize(
    ("written", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:1/", "http://host:1"),
        ("http://host:1/v1", "http://host:1"),
        ("https://host/base/metrics", "https://host/base"),
    ],
)
def test_the_address_may_be_written_in_several_ways(written: str, base: str) -> None:
    assert doctor._base_url(written) == base


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--seconds", "0.5"], ["--interval", "-1", "--seconds", "2"]])
def test_invalid_times_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        doctor.main(["http://localhost:1", *flags])
