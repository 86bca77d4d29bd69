"""Programs over two KV groups of different sizes: a window group computes what whole sequences do, with fewer pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.step.page_copies import PAGES_PER_COPY, row_specs
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import make_state
from jaxserve.step_plan import Chunk, SlotOpen, StepPlan
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import decode, mesh, opening, prefill

pytestmark = pytest.mark.slow  # compiles the programs of two deployments

WINDOW, PAGE, CHUNK = 20, 16, 24
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
}  # fmt: skip
PROMPT = [(37 * i * i + 11 * i) % 128 for i in range(80)]
CACHED = 48  # tokens of the prompt that a second request finds in the prefix cache


class Programs(dict[Any, Any]):
    """The programs of a deployment, each compiled when it is first called."""

    def __init__(self, builder: ProgramBuilder) -> None:
        super().__init__()
        self._builder = builder

    def __missing__(self, key: ProgramKey) -> Any:
        self[key] = self._builder.compile(key)
        return self[key]


@functools.cache
def _deployed(**options: Any) -> tuple[Deployment, Programs]:
    config = EngineConfig(
        dtype="float32", page_size=PAGE, max_running_requests=2, cuda_graph_bs=(2,), chunked_prefill_size=CHUNK,
        enable_hierarchical_cache=True, attention_backend="cpu", **options,
    )  # fmt: skip
    made = deploy(config, parse_model_config(GEMMA), DeviceFacts(KernelTarget("cpu"), 2**34))
    return made, Programs(made.builder(mesh()))


class Engine:
    """Runs plans of one request at a time. Pages are used once, so that a page that is freed stays unused."""

    def __init__(self, made: Deployment, programs: Programs) -> None:
        abstract = abstract_params(made.model, made.dtype)
        params = dummy_params(abstract, shardings(mesh(), abstract), 1)
        rows = [row_specs(made.state, group) for group in range(len(made.kv_specs))]
        self.host = [HostPool(specs, PAGES_PER_COPY) for specs in rows]
        state = make_state(made.state, shardings(mesh(), made.state))
        self.commands = LocalCommands(params, state, programs, self.host)
        self.executor = DeviceExecutor(self.commands, made.capacity)
        self.windows = [spec.window for spec in made.kv_specs]
        # Each group takes its pages in an order of its own.
        self.free = [iter(np.random.default_rng(i).permutation(n)) for i, n in enumerate(made.capacity.pages_by_group)]
        self.pages: list[dict[int, int]] = []

    def run(self, opened: SlotOpen, cached: list[dict[int, int]], count: int) -> Iterator[tuple[int, float]]:
        """Compute a request in chunks, then `count` tokens; yields each with its log probability."""
        self.pages = cached
        at = opened.num_cached_tokens
        while count:
            if at < len(PROMPT):
                tokens = PROMPT[at : at + CHUNK]
                last = at + len(tokens) == len(PROMPT)
                chunk = prefill(opened.slot, at, tokens, sample=last)
            else:
                last, chunk = True, decode(opened.slot, at)
            result = self._step([opened] if at == opened.num_cached_tokens else [], self._with_pages(chunk))
            at += chunk.length
            if last:
                [found] = result.logprobs[0]
                yield result.tokens[0][0], found.logprob
                count -= 1
            self._free_before(at)

    def _step(self, opens: list[SlotOpen], chunk: Chunk) -> Any:
        plan = StepPlan(opens=opens, chunks=[chunk], num_decodes=int(chunk.tokens is None), greedy=False)
        return self.executor.collect(self.executor.dispatch(plan))

    def _with_pages(self, chunk: Chunk) -> Chunk:
        columns = range(-(-chunk.start // PAGE), -(-(chunk.start + chunk.length) // PAGE))
        new = [{column: int(next(free)) for column in columns} for free in self.free]
        for pages, more in zip(self.pages, new):
            pages.update(more)
        return msgspec.structs.replace(chunk, new_pages=tuple(tuple(more.values()) for more in new))

    def _free_before(self, position: int) -> None:
        """Fill the pages that no query from `position` on sees with NaN, but those of the cached prefix's end."""
        for group, (window, pages) in enumerate(zip(self.windows, self.pages)):
            kept = range((CACHED - WINDOW + 1) // PAGE, CACHED // PAGE)
            hidden = [c for c in pages if window is not None and (c + 1) * PAGE <= position - window + 1]
            for column in hidden:
                if column not in kept:
                    self.fill(group, pages.pop(column), np.nan)

    def fill(self, group: int, page: int, value: float) -> None:
        """Fill a page of a group by its program."""
        rows = tuple(np.full(row.shape, value, row.dtype) for row in self.host[group].fetch([[0]]))
        self.host[group].store([[0]], tuple(map(jax.numpy.asarray, rows)))
        self.commands.load(group, np.array([[page] + [-1] * (PAGES_PER_COPY - 1)], np.int32), [[0]])


def _outputs(engine: Engine) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the output of a request, and of another one that shares `CACHED` tokens with it."""
    sampling: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "logprobs": 0}
    first = list(engine.run(opening(0, **sampling), [{} for _ in engine.windows], 12))
    shared = []
    for window, pages in zip(engine.windows, engine.pages):
        start = 0 if window is None else (CACHED - WINDOW + 1) // PAGE
        shared.append({column: pages[column] for column in range(start, CACHED // PAGE)})
    cached = tuple(tuple(pages.values()) for pages in shared)
    return first, list(engine.run(opening(1, cached_pages=cached, num_cached_tokens=CACHED, **sampling), shared, 8))


def test_a_window_group_computes_what_whole_sequences_do_without_the_pages_before_it() -> None:
    whole = _deployed(disable_hybrid_swa_memory=True)
    made = _deployed(swa_full_tokens_ratio=0.8)
    assert whole[0].capacity.pages_by_group == (16,)
    assert made[0].capacity.pages_by_group == (16, 12)
    expected, _ = _outputs(Engine(*whole))
    first, second = _outputs(Engine(*made))
    for found in (first, second):
        assert [token for token, _ in found] == [token for token, _ in expected[: len(found)]]
        np.testing.assert_allclose([one for _, one in found], [one for _, one in expected[: len(found)]], atol=1e-5)


def test_a_page_is_copied_in_its_own_group_alone() -> None:
    made, programs = _deployed(swa_full_tokens_ratio=0.8)
    engine = Engine(made, programs)
    before = jax.tree.map(np.asarray, engine.commands._state)
    engine.executor.warm_up([key for key in made.program_keys if not KINDS[key.kind].is_step])
    for ours, theirs in zip(engine.commands._state, before, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    engine.fill(0, 15, 5.0)
    engine.fill(1, 11, 7.0)
    copies: dict[str, Any] = {"saves": [(0, 0, 15, 1), (1, 0, 11, 2)], "loads": [(1, 0, 2, 3), (0, 0, 1, 4)]}
    engine.executor.dispatch(StepPlan(opens=[], chunks=[], num_decodes=0, greedy=True, **copies))
    state = jax.tree.structure(made.state).unflatten(engine.commands._state)
    for pool, num_pages, filled, value in ((state.kv[0], 16, [4, 15], 5.0), (state.kv[1], 12, [3, 11], 7.0)):
        keys = np.asarray(pool.keys)[0].reshape(2, pool.num_layers, num_pages, -1)
        assert np.argwhere((keys != 0).any(axis=(0, 1, 3))).ravel().tolist() == filled
        assert (keys[:, :, filled] == value).all()
