from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from jaxserve.runtime.programs.program_set import Key, Program, ProgramSet, needed_first
from jaxserve.runtime.step.batch import ProgramKey

DECODES = [ProgramKey("decode", size, greedy) for size in (1, 2, 8) for greedy in (True, False)]
MIXED = [ProgramKey("mixed", size, False) for size in (64, 512)]
PROMPT = ProgramKey("prompt_logprobs", 64, False)
KEYS: list[Key] = ["update", *DECODES, *MIXED, PROMPT]


def program(key: Key) -> Program:
    return lambda: key


def loading(fetch: Callable[[Key], Program]) -> ProgramSet:
    first: list[Key] = ["update", DECODES[-1], MIXED[1], PROMPT]
    coming = [key for key in KEYS if isinstance(key, ProgramKey) and key not in first]
    return ProgramSet({key: program(key) for key in first}, coming, fetch)


def test_a_server_is_ready_for_every_step_and_for_its_first_request():
    more = [*KEYS, ProgramKey("mixed", 128, False)]
    assert sorted(map(str, needed_first(more))) == [
        *("decode-1-full", "decode-1-greedy", "decode-8-full", "mixed-512-full", "mixed-64-full"),
        *("prompt_logprobs-64-full", "update"),
    ]


@pytest.fixture
def goes_on() -> Iterator[threading.Semaphore]:
    """A load each; a thread that waited for ever would keep the process from ending."""
    semaphore = threading.Semaphore(0)
    yield semaphore
    semaphore.release(len(KEYS))


def test_a_step_waits_for_its_own_program_which_comes_next(goes_on: threading.Semaphore):
    order: list[Key] = []

    def fetch(key: Key) -> Program:
        order.append(key)
        goes_on.acquire()
        return program(key)

    programs = loading(fetch)
    assert len(programs) == len(KEYS)
    assert programs.num_coming == len(KEYS) - 4
    assert programs.fitting(PROMPT) == PROMPT
    late = DECODES[3]
    while not order:  # until the first is under way
        pass
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(programs.fitting, late)
        while programs._queue[0] != late:  # until the other thread has asked
            pass
        goes_on.release()
        assert not wait([step], timeout=0.05).done
        goes_on.release()
        assert step.result() == late
    assert order[:2] == [DECODES[0], late]
    goes_on.release(len(KEYS))
    assert set(programs) == set(KEYS)
    assert programs.num_coming == 0
    assert all(programs.fitting(key) == key for key in KEYS if isinstance(key, ProgramKey))


def test_one_that_never_comes_is_left_out(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jaxserve.runtime")

    def fetch(key: Key) -> Program:
        if key == MIXED[0]:
            raise EOFError("half of it")
        return program(key)

    programs = loading(fetch)
    with pytest.raises(KeyError):
        programs[MIXED[0]]
    assert set(programs) == {*KEYS} - {MIXED[0]}
    assert programs.fitting(MIXED[0]) == MIXED[1]
    assert programs.fitting(DECODES[0]) == DECODES[0]
    for thread in [one for one in threading.enumerate() if one.name == "load-programs"]:
        thread.join()
    assert f"programs: {len(KEYS) - 5} more are here" in caplog.text
    assert "mixed-64-full can't be loaded (EOFError('half of it')): a larger one runs its steps" in caplog.text


def test_nobody_loads_for_a_set_that_is_gone(goes_on: threading.Semaphore):
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def fetch(key: Key) -> Program:
        threads.put(threading.current_thread())
        goes_on.acquire()
        return program(key)

    programs = loading(fetch)
    thread = threads.get()
    del programs
    gc.collect()
    goes_on.release(len(KEYS))
    thread.join()
    assert threads.empty()
