"""Tests `LLM` with the real engine and a tiny random model; greedy, so that texts can be compared."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve import LLM, SamplingParams, host
from jaxserve.api_types import FinishReason, TokenEvent
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    ForkedProcessError,
    InvalidRequestError,
    RequestFailedError,
)
from tests.tiny_model import EOS_ID, VOCAB_SIZE, byte_tokenizer, tiny_settings

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["abc", "hello, world", "x"]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(**tiny_settings(tmp_path_factory)) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared `LLM`; after each test it must be idle, with every page free."""
    yield shared
    while shared._engine.engine.has_work:
        shared._engine.engine.step()
    stats = shared._engine.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.integrity_errors) == (0, 0, ())
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages


def test_settings_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_num_seq is not a known setting; did you mean max_num_seqs"):
        LLM(max_num_seq=8)
    with pytest.raises(ConfigError, match="port is a setting of `jaxserve serve`"):
        LLM(port=8000)
    with pytest.raises(ConfigError, match="LoRA is not built yet"):
        LLM(enable_lora=True)


def test_outputs_are_in_the_prompts_order_and_the_same_as_when_run_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == PROMPTS * 2
    for output in together:
        (alone,) = llm.generate(output.prompt, GREEDY, use_tqdm=False)
        assert alone == output
        assert output.prompt_token_ids == list(output.prompt.encode())
        (completion,) = output.outputs
        assert completion.index == 0
        assert len(completion.token_ids) == 12
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.logprobs is None
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(output.prompt), 12)


def test_prompts_may_be_ids(llm: LLM) -> None:
    (text,) = llm.generate("abc", GREEDY, use_tqdm=False)
    (ids,) = llm.generate([97, 98, 99], GREEDY, use_tqdm=False)
    one, two = llm.generate([[97, 98, 99], [120]], GREEDY, use_tqdm=False)
    assert text.outputs == ids.outputs == one.outputs
    assert ids.prompt is None
    assert two.prompt_token_ids == [120]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    first, second = llm.generate(["abc", "abc"], [GREEDY, short], use_tqdm=False)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids[:3]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("abc", [GREEDY, short])


def test_n_samples_of_a_prompt(llm: LLM) -> None:
    params = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    (output,) = llm.generate("abc", SamplingParams(n=3, **params), use_tqdm=False)
    (single,) = llm.generate("abc", SamplingParams(**params), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.outputs[0] == single.outputs[0]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 36)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = next(char for char in text[2:] if char.isascii() and char not in text[:2])
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("abc", params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason is FinishReason.STOP
    assert cut.outputs[0].stop_reason == stop
    assert cut.usage.completion_tokens == len(cut.outputs[0].token_ids) < 12


def test_a_stop_id_ends_the_output(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY, use_tqdm=False)
    ids = whole.outputs[0].token_ids
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(ids[4],))
    (cut,) = llm.generate("abc", params, use_tqdm=False)
    assert cut.outputs[0].token_ids == ids[: ids.index(ids[4]) + 1]
    assert cut.outputs[0].stop_reason == ids[4]


def test_the_model_s_own_eos_ends_the_output_unless_ignored(llm: LLM) -> None:
    bias = {EOS_ID: 100.0}
    (ended,) = llm.generate("abc", SamplingParams(temperature=0.0, logit_bias=bias), use_tqdm=False)
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("", FinishReason.STOP)
    went_on = SamplingParams(max_tokens=4, temperature=0.0, logit_bias=bias, ignore_eos=True)
    (output,) = llm.generate("abc", went_on, use_tqdm=False)
    assert output.outputs[0].token_ids == [EOS_ID] * 4


def test_log_probabilities_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == output.outputs[0].token_ids
    assert all(entry.top_ids[0] == entry.token_id and len(entry.top_ids) == 2 for entry in logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == list(b"bc")


@pytest.mark.parametrize("n", [1, 3])
def test_cached_tokens_are_those_of_the_prompt_until_the_cache_is_flushed(llm: LLM, n: int) -> None:
    llm.flush_cache()
    prompt = "a prompt of more than two whole pages"
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, n=n)

    def cached(params: SamplingParams) -> int:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        return output.usage.cached_tokens

    assert cached(params) == 0
    whole = cached(params)
    assert len(prompt) - 16 <= whole < len(prompt)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    stop = next(char for char in output.outputs[0].text if char.isascii())
    assert cached(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, n=n, stop=(stop,))) == whole
    assert llm.flush_cache() > 0
    assert cached(params) == 0


def test_only_prompts_of_one_salt_share_a_cached_prefix(llm: LLM) -> None:
    prompt = list(range(3, 50))
    cached = {
        salt: [llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt=salt)[0].usage.cached_tokens for _ in range(2)]
        for salt in ("a tenant", "another")
    }
    assert all(first == 0 and second > 0 for first, second in cached.values()), cached


def test_a_priority_that_the_policy_ignores_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="this engine schedules by lpm"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0, 1])
    with pytest.raises(InvalidRequestError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0])


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt == "user: hi\nassistant: "
    assert output.outputs == llm.generate(output.prompt, GREEDY, use_tqdm=False)[0].outputs
    assert [both.outputs for both in llm.chat([CHAT, CHAT], GREEDY, use_tqdm=False)] == [output.outputs] * 2
    (open_end,) = llm.chat(CHAT, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert open_end.prompt == "user: hi\n"
    assert llm.encode_chat(CHAT) == output.prompt_token_ids
    tool = {"type": "function", "function": {"name": "weather"}}
    length = len(llm.encode_chat(CHAT, tools=[tool]))
    assert length > len(output.prompt_token_ids)
    with pytest.raises(InvalidRequestError, match=f"the prompt has {length} tokens"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, tools=[tool])


def test_a_stream_is_the_whole_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("abc", GREEDY))
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        llm.stream("abc", SamplingParams(n=2))


def test_closing_a_stream_ends_the_request(llm: LLM) -> None:
    stream = llm.stream("abc", GREEDY)
    next(stream)
    stream.close()
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "no tokens"),
        ([VOCAB_SIZE], rf"ids are in \[0, {VOCAB_SIZE - 1}\]"),
        ([-1], "holds the token id -1"),
        (["abc", [1, "b"]], "holds 'b', which is not a token id"),
        ([[1, True]], "holds True"),
        ("x" * 64, "has 64 tokens and leaves no room to answer: the context is 64 tokens"),
    ],
)
def test_a_prompt_that_can_not_be_served_is_refused_before_anything_runs(llm: LLM, prompt: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompt, GREEDY)
    assert not llm._engine.engine.has_work


def test_an_interrupt_takes_effect_after_the_step_and_ends_the_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, finished = llm._engine.engine.step, []

    def interrupted_step() -> list[TokenEvent]:
        signal.raise_signal(signal.SIGINT)
        events = step()
        finished.append(True)
        return events

    monkeypatch.setattr(llm._engine.engine, "step", interrupted_step)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert finished == [True]
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].usage.completion_tokens == 12


def test_a_request_that_fails_is_an_error_and_ends_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._engine.engine.step

    def failing_step() -> list[TokenEvent]:
        return [
            TokenEvent(event.request_id, [], finish_reason=FinishReason.ERROR, error="no pages left")
            for event in step()
        ]

    monkeypatch.setattr(llm._engine.engine, "step", failing_step)
    with pytest.raises(RequestFailedError, match="no pages left"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()


def test_threads_share_one_batch(llm: LLM) -> None:
    """Each thread gets the same output as alone, whether it generates, streams, or closes its stream early."""
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)

    def stream(_: int) -> list[int]:
        return [token for delta in llm.stream("abc", GREEDY) for token in delta.token_ids]

    def leave(_: int) -> list[int]:
        with contextlib.closing(llm.stream("abc", GREEDY)) as deltas:
            next(deltas)
        return expected.outputs[0].token_ids

    def generate(_: int) -> list[int]:
        return llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    with ThreadPoolExecutor(6) as pool:
        found = [list(pool.map(work, range(6))) for work in (stream, leave, generate)]
        mixed = [pool.submit(work, 0) for work in (stream, leave, generate) * 6]
    everything = [*itertools.chain(*found), *(one.result() for one in mixed)]
    assert everything == [expected.outputs[0].token_ids] * 36


def test_a_stream_that_pauses_loses_nothing(llm: LLM) -> None:
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)
    deltas = llm.stream("abc", GREEDY)
    first = next(deltas)
    (other,) = llm.generate("hello, world", GREEDY, use_tqdm=False)
    assert other.outputs[0].finish_reason is FinishReason.LENGTH
    tokens = first.token_ids + [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected.outputs[0].token_ids


def test_closing_ends_streams_of_other_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    llm = LLM(**tiny_settings(tmp_path_factory))
    deltas = llm.stream("abc", GREEDY)
    next(deltas)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.close).result()
    with pytest.raises(EngineDeadError, match="closed"):
        list(deltas)


def test_the_progress_bar_is_on_stderr_and_can_be_left_out(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err


def test_a_closed_llm_raises_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    llm = LLM(**tiny_settings(tmp_path_factory))
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("abc", GREEDY, use_tqdm=False)


def test_closing_returns_the_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An `LLM` that is closed leaves neither its device arrays nor what the allocator kept of its memory."""
    calls: list[str] = []
    llm = LLM(**tiny_settings(tmp_path_factory))
    state = weakref.ref(llm._engine.engine._engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "return_free_memory", lambda: calls.append("trim" if state() is None else "too early"))
        gc.disable()
        try:
            llm.close()
        finally:
            gc.enable()
    assert calls == ["trim"]


def in_a_fork(work: Callable[[], object]) -> str:
    """Return the error that `work` raises in a process forked from this one; the empty string if it raises none."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def child() -> None:
        try:
            work()
            writing.send("")
        except BaseException as error:
            writing.send(f"{type(error).__name__}: {error}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and jax warn of what is tested here
        process = context.Process(target=child)
        process.start()
    try:
        assert reading.poll(60), "the child hangs"
        return str(reading.recv())
    finally:
        process.kill()
        process.join()


@pytest.mark.process
def test_a_forked_process_is_refused_at_once_and_leaves_the_parent_alone(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)
    open_stream = llm.stream("abc", GREEDY)
    tokens = next(open_stream).token_ids
    uses: list[Callable[[], object]] = [
        lambda: llm.generate("abc", GREEDY),
        lambda: llm.generate([]),
        lambda: llm.chat([]),
        lambda: llm.chat(CHAT),
        lambda: llm.encode_chat(CHAT),
        lambda: list(llm.stream("abc", GREEDY)),
        lambda: next(open_stream),
        llm.flush_cache,
        llm.start_profile,
        llm.stop_profile,
        lambda: LLM(**tiny_settings(tmp_path_factory)),
    ]

    def try_all() -> None:
        for use in uses:
            with pytest.raises(ForkedProcessError, match=f"was forked from process {parent}"):
                use()
        with llm:
            pass
        llm.close()
        open_stream.close()

    parent = os.getpid()
    with llm._engine._exclusive():
        assert in_a_fork(try_all) == ""
    tokens += [token for delta in open_stream for token in delta.token_ids]
    assert tokens == expected.outputs[0].token_ids
    assert llm.generate("abc", GREEDY, use_tqdm=False) == [expected]


def test_prompts_in_vllms_forms(llm: LLM) -> None:
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)
    forms = [{"prompt": "abc"}, "abc", {"prompt_token_ids": [97, 98, 99]}, [97, 98, 99]]
    assert [output.outputs for output in llm.generate(forms, GREEDY, use_tqdm=False)] == [expected.outputs] * 4
    assert llm.generate({"prompt": "abc"}, GREEDY, use_tqdm=False) == [expected]
    deltas = llm.stream({"prompt_token_ids": [97, 98, 99]}, GREEDY)
    assert "".join(delta.text for delta in deltas) == expected.outputs[0].text


def test_arguments_of_other_types_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] is of type int: a prompt is a text, a list"):
        llm.generate(["abc", 5], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"sampling_params must be a SamplingParams, got a dict"):
        llm.generate("abc", {"max_tokens": 3})
    with pytest.raises(InvalidRequestError, match=r"a conversation is a list of messages .*, got str"):
        llm.chat("hi")


def test_prompts_without_params_and_another_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer("<b>", "</b>").save(str(other / "tokenizer.json"))
    (other / "tokenizer_config.json").write_text('{"chat_template": "<b>"}')
    override = {"temperature": 0.0, "max_new_tokens": 3}
    with LLM(**tiny_settings(tmp_path_factory), tokenizer_path=str(other), override_generation_config=override) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        outputs = [llm.generate("<b>", use_tqdm=False)[0], llm.chat(CHAT, use_tqdm=False)[0]]
        greedy = llm.generate([256], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)[0]
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    for output in outputs:
        assert output.prompt_token_ids == [256]
        assert output.outputs == greedy.outputs
