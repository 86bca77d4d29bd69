from typing import Any

import msgspec
import pytest

from jaxserve.api_types import MAX_STOP_IDS, EngineInfo, EngineRequest, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.text.requests import check_ids, pooled_requests, sample_requests
from tests.text.small_tokenizers import byte_level

TOKENIZER = byte_level()
VOCAB_SIZE = TOKENIZER.vocab_size
(EOS,) = TOKENIZER.eos_ids
INFO = EngineInfo(
    max_model_len=100,
    vocab_size=VOCAB_SIZE,
    page_size=16,
    num_pages=10,
    max_running_requests=4,
    chunked_prefill_size=64,
    device="none",
    dtype="float32",
    attention_backend="reference",
    num_programs=0,
    startup_seconds={},
)
BY_PRIORITY = msgspec.structs.replace(INFO, schedule_policy="priority", uses_priorities=True)


def requests_for(**sampling: object) -> list[EngineRequest]:
    return sample_requests("r", [5, 6], SamplingParams(**sampling), TOKENIZER, INFO)  # type: ignore[arg-type]


def test_each_sample_is_a_request_of_one_group() -> None:
    requests = requests_for(n=3, seed=7)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sample for request in requests] == [0, 1, 2]
    assert {request.group_id for request in requests} == {"r"}
    assert all(request.prompt_ids == [5, 6] and request.sampling.seed == 7 for request in requests)


def test_stop_ids_join_the_models_and_the_requests_without_repeats() -> None:
    assert requests_for()[0].stop_ids == (EOS,)
    assert requests_for(stop_token_ids=(9, EOS, 9))[0].stop_ids == (EOS, 9)
    assert requests_for(stop_token_ids=(9,), ignore_eos=True)[0].stop_ids == (9,)
    assert requests_for(ignore_eos=True)[0].stop_ids == ()


def test_too_many_stop_ids_are_refused() -> None:
    many = tuple(token for token in range(MAX_STOP_IDS + 1) if token != EOS)[:MAX_STOP_IDS]
    assert len(requests_for(stop_token_ids=many[1:])[0].stop_ids) == MAX_STOP_IDS
    # Repeated ids count too, so that a schema can express the limit.
    for ids in (many, many[:1] * MAX_STOP_IDS):
        with pytest.raises(InvalidRequestError, match=f"make {MAX_STOP_IDS + 1}"):
            requests_for(stop_token_ids=ids, ignore_eos=True)


@pytest.mark.parametrize("sampling", [{"stop_token_ids": (VOCAB_SIZE,)}, {"logit_bias": {VOCAB_SIZE: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused_naming_the_field(sampling: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"holds the token id {VOCAB_SIZE}") as raised:
        requests_for(**sampling)
    assert raised.value.param == next(iter(sampling))


def test_negative_and_too_large_ids_are_refused() -> None:
    check_ids([0, VOCAB_SIZE - 1], VOCAB_SIZE, param="prompt")
    check_ids([], VOCAB_SIZE, param="prompt")
    with pytest.raises(InvalidRequestError, match="token id -1"):
        check_ids([3, -1], VOCAB_SIZE, param="prompt")


def test_ids_of_texts_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"text 1 holds the token id {VOCAB_SIZE}"):
        pooled_requests("p", [[1], [2, VOCAB_SIZE]], INFO)


def test_every_sample_has_the_priority_and_the_namespace() -> None:
    requests = sample_requests("r", [5], SamplingParams(n=2), TOKENIZER, BY_PRIORITY, priority=3, cache_salt="tenant")
    assert [(request.priority, request.namespace) for request in requests] == [(3, "tenant")] * 2


@pytest.mark.parametrize(
    ("info", "options", "param", "reason"),
    [
        (INFO, {"priority": 1}, "priority", "this engine schedules by fcfs"),
        (BY_PRIORITY, {"priority": 2**31}, "priority", "must be in"),
        (INFO, {"cache_salt": ""}, "cache_salt", "is empty"),
    ],
)
def test_values_without_an_effect_are_refused(info: EngineInfo, options: Any, param: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        sample_requests("r", [5], SamplingParams(), TOKENIZER, info, **options)
    assert raised.value.param == param
