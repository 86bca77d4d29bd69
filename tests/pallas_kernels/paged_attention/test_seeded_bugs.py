"""The suite finds the bugs that kernels are prone to: each is seeded in a copy of a kernel's source.

A seed names the file, the text and its replacement; the modules of the backend are imported again with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.cpu import cpu_features, tile_registers
from pallas_kernels.paged_attention import BackendName
from pallas_kernels.paged_attention import __name__ as PACKAGE
from tests.pallas_kernels.paged_attention import test_paged_attention as suite
from tests.pallas_kernels.paged_attention.cases import LATENT as LATENT_ROWS
from tests.pallas_kernels.paged_attention.cases import Case, make_batch
from tests.selection import grid, is_interpreted

pytestmark = pytest.mark.slow

BATCH = Case("batch", ((150, 1), (40, 1), (70, 33), (20, 20)), 2)
WINDOW = dataclasses.replace(BATCH, window=20)
# An odd number of tokens, from an odd position on: for CPUs that multiply pairs of bfloat16
PAIRS = Case("pairs", ((151, 1), (41, 1), (71, 33), (21, 21)), 2, dtype="bfloat16", window=20)
TILES = Case("tiles", ((151, 1), (70, 33)), 1, dtype="bfloat16")
FEW = Case("few", ((150, 5), (40, 1), (70, 3)), 0, max_queries=5)
# The last queries are in another split than the first ones.
STRADDLES = Case("straddles", ((258, 4),), 0, max_queries=4)
LONG = Case("long", ((1200, 1),), 1, decode_only=True)
LATENT = dataclasses.replace(BATCH, rows=((700, 1), *BATCH.rows), num_decodes=3, kv_heads=1, head_dim=48, value_dim=32)
CHUNKS = dataclasses.replace(BATCH, chunks_only=True)
FP8 = dataclasses.replace(BATCH, kv_dtype="float8_e4m3fn")
# More heads than a tile has, in two layers, with rows that are split
SHARED_ROWS = Case("latent", ((600, 1), (40, 1), (70, 33)), 2, **{**LATENT_ROWS, "heads": 40}, kv_dtype="float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Seed:
    """Replaces `old` by `new` in `module`; then `case` must fail."""

    bug: str
    backend: BackendName
    module: str
    old: str
    new: str
    case: Case = BATCH

    def __str__(self) -> str:
        return f"{self.backend}-{self.bug}"


SEEDS = [
    Seed("off-by-one-page", "triton", "triton.tiles", "lax.div(position, size)", "lax.div(position + 1, size)"),
    Seed("place-of-another-layer", "triton", "triton.tiles", " + pool.layer[0] * attention.num_pages", ""),
    Seed("one-token-too-many", "triton", "triton.decode", "< queries.past)", "<= queries.past)"),
    Seed("a-draft-sees-the-next", "triton", "triton.decode", "(length + number)", "(length + number + 1)", FEW),
    Seed(
        "a-split-unseen-by-a-draft",
        "triton",
        "triton.decode",
        "jnp.where(state.total > 0, state.total, 1.0)",
        "state.total",
        STRADDLES,
    ),
    Seed(
        "packed-though-split-otherwise",
        "triton",
        "triton.decode",
        "[table_rows, first, each]",
        "[table_rows]",
        dataclasses.replace(FEW, window=20),
    ),
    Seed("packed-with-another-row", "triton", "triton.decode", "[table_rows, first, each]", "[first, each]", FEW),
    Seed(
        "tokens-beyond-the-end-read",
        "triton",
        "triton.decode",
        "jnp.clip(position, low, queries.length - 1)",
        "position",
    ),
    Seed("a-split-left-out", "triton", "triton.decode", "lax.fori_loop(0, used,", "lax.fori_loop(1, used,"),
    Seed("combined-too-early", "triton", "triton.decode", "== used - 1", "== used - 2"),
    Seed("an-item-left-out", "triton", "triton.work_list", "pl.cdiv(items, programs)", "lax.div(items, programs)"),
    Seed("not-causal", "triton", "triton.prefill", "position[None, :] <= query", "position[None, :] <= 1 + query"),
    Seed("tokens-no-query-sees-read", "triton", "triton.prefill", "end - 1)", "end)"),
    Seed(
        "masks-begin-a-tile-late",
        "triton",
        "triton.prefill",
        "else first_query + 1, block)",
        "else first_query + block, block)",
    ),
    Seed(
        "window-one-too-wide",
        "triton",
        "triton.prefill",
        "seen &= position[None, :] > query_positions",
        "seen &= position[None, :] >= query_positions",
        WINDOW,
    ),
    Seed("padding-written", "triton", "triton.write", "live = slot >= 0", "live = there"),
    Seed("scale-of-values-left-out", "triton", "triton.prefill", "kv_scale(pool, 1, kv_head)", "1.0", FP8),
    Seed(
        "other-numbers-left-out",
        "triton",
        "triton.tiles",
        "return *self.values, HeadSpan(self.value_dim, self.head_dim - self.value_dim)",
        "return self.values",
        SHARED_ROWS,
    ),
    Seed(
        "rows-of-each-tile-of-heads",
        "triton",
        "triton.tiles",
        "head = 0 if pool.values is None else",
        "head = 0 if pool is None else",
        SHARED_ROWS,
    ),
    Seed(
        "scale-of-no-head", "triton", "triton.tiles", "which, kv_head = 0, jnp", "which, kv_head = 1, jnp", SHARED_ROWS
    ),
    Seed(
        "a-tile-of-heads-left-out",
        "triton",
        "triton.decode",
        "work, attention.kv_heads, blocks.programs, compute)",
        "work, 1, blocks.programs, compute)",
        SHARED_ROWS,
    ),
    Seed(
        "heads-of-the-first-tile",
        "triton",
        "triton.prefill",
        "head = kv_head * group +",
        "head = 0 * group +",
        SHARED_ROWS,
    ),
    Seed(
        "an-arrival-of-all-tiles",
        "triton",
        "triton.decode",
        "(row, kv_head), jnp.int32(1)",
        "(row, 0 * kv_head), jnp.int32(1)",
        SHARED_ROWS,
    ),
    Seed("off-by-one-page", "cpu", "cpu.tiles", "position // facts.page_size)", "(position + 1) // facts.page_size)"),
    Seed("place-of-another-layer", "cpu", "cpu.tiles", " + shared.first_entry", ""),
    Seed("one-token-too-many", "cpu", "cpu.decode", "return length - own", "return length + 1 - own"),
    Seed(
        "a-draft-sees-the-next",
        "cpu",
        "cpu.decode",
        "(first + r) // facts.group",
        "(first + r + 1) // facts.group",
        FEW,
    ),
    Seed("a-neighbour-beyond-the-end", "cpu", "cpu.blocks", "mask = position < end", "mask = position <= end", PAIRS),
    Seed("weights-left-out", "cpu", "cpu.advance", "BLOCK // 2, columns)", "BLOCK // 4, columns)", TILES),
    Seed("a-chunk-left-out", "cpu", "cpu.decode", "stride), facts), start=1)", "stride), facts), start=2)", LONG),
    Seed(
        "a-chunk-not-rescaled",
        "cpu",
        "cpu.blocks",
        "f.load(VECTOR, state, at) * keep",
        "f.load(VECTOR, state, at)",
        LONG,
    ),
    Seed("window-begins-late", "cpu", "cpu.decode", "count - (facts.window - 1)", "count - (facts.window - 2)", WINDOW),
    Seed(
        "not-causal",
        "cpu",
        "cpu.blocks",
        "position <= splat(f, query_position)",
        "position <= splat(f, query_position + 1)",
    ),
    Seed("window-one-too-wide", "cpu", "cpu.blocks", "(position > splat", "(position >= splat", WINDOW),
    Seed(
        "a-neighbour-before-the-window",
        "cpu",
        "cpu.blocks",
        "(position >= scratch.sees_from)",
        "(position + 1 >= scratch.sees_from)",
        PAIRS,
    ),
    Seed(
        "old-sums-not-rescaled",
        "cpu",
        "cpu.advance",
        "f.load(VECTOR, place) * keeps[i // len(columns)]",
        "f.load(VECTOR, place)",
    ),
    Seed("rows-left-out-are-written", "cpu", "cpu.backend", "start=shared.num_decodes if", "start=0 if", CHUNKS),
    Seed(
        "a-query-sees-the-next-token", "cpu", "cpu.latent", "(begin + r) // group", "(begin + r) // group + 1", LATENT
    ),
    Seed("a-panel-left-out", "cpu", "cpu.latent", "PANEL - 1)) >= at", "0)) >= at", LATENT),
    Seed("a-chunk-of-latent-rows-left-out", "cpu", "cpu.latent", "facts), start=1)", "facts), start=2)", LATENT),
    Seed("a-latent-row-too-many", "cpu", "cpu.latent", "// facts.group + 1", "// facts.group + 2", LATENT),
    Seed("a-token-left-out", "cpu", "cpu.panels", "range(i * count // parts", "range(i * count // parts + i", LATENT),
    Seed(
        "old-sums-of-latent-rows-not-rescaled",
        "cpu",
        "cpu.panels",
        "f.load(VECTOR, place) * kept[i // together]",
        "f.load(VECTOR, place)",
        LATENT,
    ),
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """These tests and the others don't see each other's compiled programs."""
    suite._compiled.cache_clear()
    yield
    suite._compiled.cache_clear()


def _plant(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the backend's modules again, one of them with the seed in it; the present ones are restored later."""
    importlib.import_module(f"{PACKAGE}.{seed.backend}.backend")
    for name in list(sys.modules):
        if name.startswith(f"{PACKAGE}.{seed.backend}"):
            monkeypatch.delitem(sys.modules, name)
    name = f"{PACKAGE}.{seed.module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(seed.old) == 1, f"{seed.module} has the seed's text {source.count(seed.old)} times"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source.replace(seed.old, seed.new), spec.origin, "exec"), module.__dict__)
    if seed.backend == "cpu":  # a process keeps what it has compiled under a name
        facts = importlib.import_module(f"{PACKAGE}.cpu.tiles").CpuAttention
        name, suffix = facts.name.fget, seed.bug.replace("-", "_")
        monkeypatch.setattr(facts, "name", property(lambda self: f"{name(self)}_{suffix}"))


QUICK = ("triton-off-by-one-page", "cpu-not-causal", "cpu-window-one-too-wide")


@pytest.mark.parametrize(
    "seed", grid(SEEDS, lambda seed: str(seed) in QUICK, lambda seed: is_interpreted(seed.backend)), ids=str
)
def test_a_seeded_bug_is_found(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed.case is PAIRS and "avx512bf16" not in cpu_features():
        pytest.skip("this CPU multiplies bfloat16 as float32, one token at a time")
    if seed.case is TILES and not cpu_features() >= tile_registers.FEATURES:
        pytest.skip("this CPU has no tile registers")
    _plant(seed, monkeypatch)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|Arrays are not equal"):
        suite._check(seed.case, make_batch(seed.case), seed.backend)


@pytest.mark.parametrize("case", grid([BATCH, WINDOW, FP8, LONG, SHARED_ROWS], lambda case: case is BATCH), ids=str)
@pytest.mark.parametrize("backend", grid(sorted({seed.backend for seed in SEEDS}), bool, is_interpreted))
def test_without_a_seed_the_cases_pass(backend: BackendName, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    suite._skip_refused(case, backend)
    _plant(Seed("none", backend, f"{backend}.backend", "def refusal(", "def refusal("), monkeypatch)
    suite._check(case, make_batch(case), backend)
