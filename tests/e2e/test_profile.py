"""A profile of the real server, taken while it answers: nothing is lost, and it holds our names."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.bench.engine.step_times import read_step_times
from jaxserve.observability.timeline import HOST_PHASES
from tests.e2e.server_process import serving

pytestmark = pytest.mark.process


@pytest.mark.grid
def test_a_profile_while_requests_run(tmp_path: Path) -> None:
    with serving("--profile-dir", str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        answers: list[Any] = []
        begun = threading.Event()

        def ask() -> None:
            body = {
                "prompt": "Once", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = []
                for line in stream.iter_lines():
                    lines.append(line)
                    begun.set()
            answers.append(lines)

        asking = threading.Thread(target=ask)
        asking.start()
        begun.wait(60)
        folder = client.post("/start_profile", json={"output_dir": "mine", "num_steps": 8}).json()["output_dir"]
        assert Path(folder).is_relative_to(tmp_path / "mine")
        asking.join()
        stopped = client.post("/stop_profile")
        assert stopped.status_code == 200 or folder in stopped.json()["error"]["message"], "written already"
        assert "data: [DONE]" in answers[0]
        usage = next(line for line in reversed(answers[0]) if line.startswith("data: {"))
        assert '"completion_tokens":150' in usage, usage
        times = read_step_times(Path(folder))
        assert times.num_steps == pytest.approx(8, abs=1)
        assert all(times.host_ms[phase] > 0 for phase in HOST_PHASES)
        decode = next(one for one in times.programs if one.name == "decode_2_greedy")
        assert {f"layer_{i}/{part}" for i in range(30) for part in ("attention", "mlp")} <= set(decode.scopes_ms)
        assert {"embed", "head", "sample"} <= set(decode.scopes_ms)
        assert server.info()["stats"]["integrity_errors"] == []
        assert server.terminate() == 0
