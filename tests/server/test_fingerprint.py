from __future__ import annotations

import re
from typing import Any

import pytest

import jaxserve
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.fingerprint import system_fingerprint
from tests.server.conftest import over_asgi

VERSION = re.escape(jaxserve.__version__)
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def of(mode: str, weights: str = "default", **engine: Any) -> str:
    found = system_fingerprint(ServerConfig(fingerprint_mode=mode, weight_version=weights), EngineConfig(**engine))
    assert found is not None
    return found


def test_full_tells_the_sizes_above_1() -> None:
    assert re.fullmatch(f"jaxserve-{VERSION}-[0-9a-f]{{8}}", of("full"))
    divided = of("full", tp_size=4, pp_size=2, dp_size=3, ep_size=2, dp_mode="replicas")
    assert re.fullmatch(f"jaxserve-{VERSION}-tp4-pp2-dp3-ep2-[0-9a-f]{{8}}", divided)


def test_the_hash_follows_the_engines_settings_and_the_weights() -> None:
    assert re.fullmatch(f"jaxserve-{VERSION}-[0-9a-f]{{8}}", of("hash", tp_size=4))
    assert of("hash") == of("hash", hf_token="secret", device_ids=(1, 2), log_level="debug")
    assert len({of("hash"), of("hash", weights="v2"), of("hash", dtype="float32"), of("hash", model="other")}) == 4


@pytest.mark.parametrize("settings", [{"fingerprint_mode": "custom"}, {"fingerprint_value": "mine"}])
def test_a_value_and_the_mode_that_takes_it_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fingerprint_mode custom needs a fingerprint_value"):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, None), ({"fingerprint_mode": "custom", "fingerprint_value": "mine"}, "mine")]
)
async def test_answers_and_all_their_chunks_have_it(settings: dict[str, Any], expected: str | None) -> None:
    async with over_asgi(**settings) as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a", "max_tokens": 2})):
            assert (await server.http.post(path, json=body)).json()["system_fingerprint"] == expected
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = (await server.http.post(path, json=body | options)).text.split("\n\n")
            chunks = [line for line in events if "id" in line]
            shown = "null" if expected is None else f'"{expected}"'
            assert len(chunks) > 2
            assert all(f'"system_fingerprint":{shown}' in chunk for chunk in chunks)
