from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from jaxserve.runtime.programs.program_set import Program, ProgramSet, by_requests, needed_first
from jaxserve.runtime.step.program import ProgramKey
from tests.runtime.tiny import CAPACITY

DECODES = [ProgramKey("decode", size, greedy) for size in (1, 2, 8) for greedy in (True, False)]
MIXED = [ProgramKey("mixed", size, False) for size in (64, 512)]
PROMPT = ProgramKey("prompt_logprobs", 64, False)
UPDATE = ProgramKey("update")
KEYS = [UPDATE, *DECODES, *MIXED, PROMPT]


def program(key: ProgramKey) -> Program:
    return lambda: key


def loading(fetch: Callable[[ProgramKey], Program]) -> ProgramSet:
    first = [UPDATE, DECODES[-1], MIXED[1], PROMPT]
    pending = by_requests([key for key in KEYS if key not in first], CAPACITY)
    return ProgramSet({key: program(key) for key in first}, pending, fetch)


def test_programs_needed_first_run_every_step_and_a_first_request():
    more = [*KEYS, ProgramKey("mixed", 128, False)]
    assert sorted(map(str, needed_first(more))) == [
        *("decode-1-full", "decode-1-greedy", "decode-8-full", "mixed-512-full", "mixed-64-full"),
        *("prompt_logprobs-64-full", "update"),
    ]


@pytest.fixture
def goes_on() -> Iterator[threading.Semaphore]:
    """Lets one program load per release; at the end releases all, as a waiting thread would keep the process alive."""
    semaphore = threading.Semaphore(0)
    yield semaphore
    semaphore.release(len(KEYS))


def test_a_step_waits_for_its_own_program_which_is_loaded_next(goes_on: threading.Semaphore):
    order: list[ProgramKey] = []

    def fetch(key: ProgramKey) -> Program:
        order.append(key)
        goes_on.acquire()
        return program(key)

    programs = loading(fetch)
    assert len(programs) == len(KEYS)
    assert programs.num_pending == len(KEYS) - 4
    assert programs.substitute(PROMPT) == PROMPT
    late = DECODES[3]
    while not order:  # until the first is under way
        pass
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(programs.substitute, late)
        while programs._queue[0] != late:  # until the other thread has asked
            pass
        goes_on.release()
        assert not wait([step], timeout=0.05).done
        goes_on.release()
        assert step.result() == late
    assert order[:2] == [DECODES[0], late]
    goes_on.release(len(KEYS))
    assert set(programs) == set(KEYS)
    assert programs.num_pending == 0
    assert all(programs.substitute(key) == key for key in KEYS)


def test_a_program_that_fails_to_load_is_dropped(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jaxserve.runtime")

    def fetch(key: ProgramKey) -> Program:
        if key == MIXED[0]:
            raise EOFError("half of it")
        return program(key)

    programs = loading(fetch)
    with pytest.raises(KeyError):
        programs[MIXED[0]]
    assert set(programs) == {*KEYS} - {MIXED[0]}
    assert programs.substitute(MIXED[0]) == MIXED[1]
    assert programs.substitute(DECODES[0]) == DECODES[0]
    for thread in [one for one in threading.enumerate() if one.name == "load-programs"]:
        thread.join()
    assert f"programs: {len(KEYS) - 5} more loaded" in caplog.text
    assert "mixed-64-full can't be loaded (EOFError('half of it')): a larger one runs its steps" in caplog.text


def test_loading_stops_once_the_set_is_garbage(goes_on: threading.Semaphore):
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def fetch(key: ProgramKey) -> Program:
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
