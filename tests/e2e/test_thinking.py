"""A budget for reasoning in a server with a model that would reason for ever."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.server_process import serving
from tests.server.openai.test_completions import events
from tests.server.openai.test_tools import assembled
from tests.tiny_model import tiny_settings

pytestmark = pytest.mark.process

END = list(b"</think>")


def test_thoughts_end_after_their_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = tiny_settings(tmp_path_factory) | {"cuda_graph_bs": 4, "context_length": 64}
    model = settings.pop("model")
    settings |= {"reasoning_parser": "deepseek_r1", "default_thinking_budget": 9}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with (
        serving(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):

        def ask(**fields: Any) -> httpx.Response:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>I"}]
            body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 30}
            return client.post(
                "/v1/chat/completions", json=body | {"return_token_ids": True, "ignore_eos": True} | fields
            )

        def tokens(**fields: Any) -> list[int]:
            found: list[int] = ask(**fields).json()["choices"][0]["token_ids"]
            return found

        natural = tokens(thinking_token_budget=-1)
        assert END[0] not in natural
        for budget in (1, 12, None):
            answer = ask(thinking_token_budget=budget).json()
            count = budget or 9
            [choice] = answer["choices"]
            assert choice["token_ids"][: count + len(END)] == natural[:count] + END
            assert len(choice["token_ids"]) == 30
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == count + len(END)
            chunks = events(ask(thinking_token_budget=budget, stream=True))
            whole = {name: value for name, value in choice["message"].items() if value}
            assert assembled(chunks) == whole
            assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == choice[
                "token_ids"
            ]
        at_once = ask(thinking_token_budget=0, max_tokens=9).json()
        assert at_once["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        held = ask(structured_outputs={"choice": ["yes", "never"]}, ignore_eos=False).json()["choices"][0]
        assert held["message"]["content"] in ("yes", "never")
        assert held["message"]["reasoning_content"]
        assert held["finish_reason"] == "stop"
        sampled = ask(n=3, temperature=1, seed=1, logprobs=True, top_logprobs=2).json()["choices"]
        assert len({tuple(choice["token_ids"]) for choice in sampled}) == 3
        for choice in sampled:
            assert choice["token_ids"][9 : 9 + len(END)] == END
            assert len(choice["logprobs"]["content"]) == 30
        assert server.info()["stats"]["integrity_errors"] == []
