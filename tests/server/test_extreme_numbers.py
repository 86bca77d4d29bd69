"""Every numeric field of a request at its extremes: a 400 that names the field and the value, or the engine gets it.

What the engine does with each is in `tests/runtime/step/test_sampling.py`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from jaxserve.api_types import SamplingParams
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.server.responses_api.protocol import ResponsesRequest
from jaxserve.server.sglang.generate_protocol import GenerateRequest, GenerateSampling
from tests.extremes import extremes
from tests.server.conftest import ServerUnderTest

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
# Other names of fields of `SamplingParams`, and what is given with a field that needs it
NAMES = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
BESIDE = {"top_logprobs": {"logprobs": True}, "top_logprobs_num": {"return_logprob": True}}


@pytest.mark.parametrize(
    ("path", "struct", "body", "within"),
    [
        ("/v1/completions", CompletionRequest, COMPLETION, ""),
        ("/v1/chat/completions", ChatRequest, CHAT, ""),
        ("/v1/messages", MessagesRequest, CHAT, ""),
        ("/v1/responses", ResponsesRequest, {"input": "a", "max_output_tokens": 1}, ""),
        ("/generate", GenerateRequest, {"text": "a", "sampling_params": {"max_new_tokens": 1}}, ""),
        ("/generate", GenerateSampling, {"text": "a"}, "sampling_params"),
    ],
    ids=["completions", "chat", "messages", "responses", "generate", "sampling_params"],
)
async def test_a_number_is_refused_by_name_or_reaches_the_engine(
    server: ServerUnderTest, path: str, struct: type, body: dict[str, Any], within: str
) -> None:
    accepted = set()
    for name, value in extremes(struct):
        beside = BESIDE.get(name, {}) if path != "/v1/responses" else {}
        given = beside | {name: value} | ({"n": value} if name == "best_of" else {})
        own = {within: {"max_new_tokens": 1} | given} if within else given
        server.engine.submitted.clear()
        response = await server.http.post(path, json=body | own)
        if response.status_code == 400:
            error = response.json()["error"]
            number = next(iter(value.values())) if isinstance(value, dict) else value
            shown = json.dumps(number), msgspec.json.encode(float(number)).decode()
            # A length that does not fit is the prompt's error, which says how long the whole would be
            if "context length" not in error["message"]:
                assert name in error.get("param", error["message"]), (name, value, error)
                assert any(one in error["message"] for one in shown), (name, value, error)
            continue
        assert response.status_code == 200, (name, value, response.text)
        accepted.add(name)
        sampling = server.engine.submitted[0].sampling
        ours = NAMES.get(name, name)
        if ours in SamplingParams.__struct_fields__ and ours not in ("logprobs", "logit_bias"):
            if path in ("/v1/messages", "/v1/responses") and ours == "max_tokens":  # the context may be shorter
                value = min(value, sampling.max_tokens)
            assert getattr(sampling, ours) == value
            assert math.copysign(1, getattr(sampling, ours)) == math.copysign(1, value)
    assert accepted == {name for name, _ in extremes(struct)}
