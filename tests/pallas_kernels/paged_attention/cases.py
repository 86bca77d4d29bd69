"""The table of cases that every backend passes, and the arrays of a case.

A case is a ragged batch, decodes first. Its pool holds NaN wherever the contract says that nothing is read: unused
pages, pages of other layers, tails of pages, and tokens before the windows of all of a row's queries. Page ids before
these windows are stale: pages of other rows, or unused ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionOptions, Rows


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` are (length with the new tokens, new tokens), the first `num_decodes` of them decodes.

    The program has `pad_rows` more rows and `pad_tokens` more tokens than the batch. The first `shared_pages` pages of
    all rows are the same, as with the prefix cache. `kv_dtype` is the pool's dtype if it differs from the queries'.
    With `reuses`, the pool has the new tokens already. With `value_dim`, the pool has latent rows.
    With `chunks_only`, the first `num_decodes` rows are left out.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    num_layers: int = 2
    layer: int = 1
    pad_rows: int = 2
    pad_tokens: int = 3
    shared_pages: int = 0
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    decode_only: bool = False
    max_queries: int | None = None
    reuses: bool = False
    value_dim: int | None = None
    chunks_only: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of `paged_attention`, and each row's whole keys and values `[length, kv_heads, head_dim]`.

    The `values` of latent rows are the first numbers of the `keys`.

    For a pool of fp8, `rows` has the scaled values.
    """

    q: np.ndarray
    k: np.ndarray | None
    v: np.ndarray | None
    keys: np.ndarray
    values: np.ndarray
    page_table: np.ndarray
    query_starts: np.ndarray
    kv_lens: np.ndarray
    num_decodes: int
    num_seqs: int
    sinks: np.ndarray | None
    scales: np.ndarray | None
    rows: list[tuple[np.ndarray, np.ndarray]]


def stored(case: Case, x: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Convert keys and values `[2, tokens, kv_heads, head_dim]` to the form in which the case's layer is stored."""
    dtype = jnp.dtype(case.kv_dtype or case.dtype)
    if scales is None:
        return x.astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return np.clip(x.astype(np.float32) / scales[:, case.layer, None, :, None], -limit, limit).astype(dtype)


def first_seen(case: Case, length: int, new: int) -> int:
    """Return the first position that a query of a row sees; 0 for pages that rows with other windows share."""
    return 0 if case.window is None or case.shared_pages else max(0, length - new - case.window + 1)


def make_batch(case: Case, *, max_pages: int | None = None, num_pages: int | None = None) -> Batch:
    """Return random arrays of a case. `max_pages` and `num_pages` fix shapes, so that cases share one program."""
    rng = np.random.default_rng(case.seed)
    dtype = jnp.dtype(case.dtype)
    size = case.page_size

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    used = [-(-length // size) for length, _ in case.rows]
    max_pages = max_pages or max(used, default=1) + 1
    shared = case.shared_pages
    firsts = [first_seen(case, length, new) for length, new in case.rows]
    stale = [first // size for first in firsts]
    own = sum(used) - sum(stale) - shared * max(len(case.rows) - 1, 0)
    num_pages = num_pages or own + 2
    # Page 0, which a kernel may substitute for pages that it doesn't read, is used last.
    free = [0, *(rng.permutation(num_pages - 1) + 1).tolist()]
    common = [free.pop() for _ in range(shared)]
    prefix = normal(2, shared * size, case.kv_heads, case.head_dim)

    # Entries beyond a row's pages are pages of other rows, or unused ones.
    page_table = rng.integers(0, num_pages, (len(case.rows) + case.pad_rows, max_pages), dtype=np.int32)
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    scales = None
    if case.kv_dtype is not None:
        # Small enough that some numbers are clipped: normal ones go up to 4, those of fp8 to 448 or 57344.
        least = 2.0 / float(jnp.finfo(kv_dtype).max)
        scales = rng.uniform(least, 4 * least, (2, case.num_layers, case.kv_heads)).astype(np.float32)
    value_dim = case.value_dim or case.head_dim
    pools = np.full((2, case.kv_heads, case.num_layers * num_pages, size, case.head_dim), np.nan, kv_dtype)
    tokens = sum(new for _, new in case.rows)
    total = len(case.rows) + case.pad_rows if case.decode_only else tokens + case.pad_tokens
    # A different NaN than the pool's, so that writing it to the pool would be noticed.
    new_kv = np.full((2, total, case.kv_heads, case.head_dim), -np.nan, dtype)
    q = np.full((total, case.heads, case.head_dim), np.nan, dtype)
    q[:tokens] = normal(tokens, case.heads, case.head_dim)
    starts, rows = [0], []
    for row, (length, new) in enumerate(case.rows):
        pages = page_table[row, : stale[row]].tolist() + common
        pages += [free.pop() for _ in range(used[row] - len(pages))]
        page_table[row, : len(pages)] = pages
        both = np.concatenate([prefix, normal(2, length - shared * size, case.kv_heads, case.head_dim)], axis=1)
        if case.value_dim is not None:
            both[1] = both[0]
        held = stored(case, both, scales)
        old = length - new
        for position in range(firsts[row], length if case.reuses else old):
            entry = case.layer * num_pages + pages[position // size]
            pools[:, :, entry, position % size] = held[:, position]
        new_kv[:, starts[-1] : starts[-1] + new] = both[:, old:]
        starts.append(starts[-1] + new)
        meant = held if scales is None else held.astype(np.float32) * scales[:, case.layer, None, :, None]
        rows.append((meant[0], meant[1] if case.value_dim is None else meant[0, ..., :value_dim]))
    return Batch(
        q=q,
        k=None if case.reuses else new_kv[0],
        v=None if case.reuses or case.value_dim is not None else new_kv[1],
        keys=pools[0],
        values=pools[1] if case.value_dim is None else pools[0, ..., :value_dim],
        page_table=page_table,
        query_starts=np.array(starts + [starts[-1]] * case.pad_rows, np.int32),
        kv_lens=np.array([length for length, _ in case.rows] + [0] * case.pad_rows, np.int32),
        num_decodes=case.num_decodes,
        num_seqs=len(case.rows),
        sinks=rng.standard_normal(case.heads, dtype=np.float32) if case.sinks else None,
        scales=scales,
        rows=rows,
    )


def rows_of(case: Case, batch: Batch) -> Rows:
    """Return the rows of a batch."""
    counts = np.int32(batch.num_decodes), np.int32(batch.num_seqs)
    where = batch.page_table, batch.query_starts, batch.kv_lens, *counts
    promises = {"decode_only": case.decode_only, "max_queries": case.max_queries, "chunks_only": case.chunks_only}
    return Rows(*where, **promises)


def options_of(case: Case, batch: Batch) -> AttentionOptions:
    """Return how the queries of a case attend."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return AttentionOptions(scale, case.window, case.soft_cap, batch.sinks)


_DECODE = ((1, 1), (16, 1), (17, 1), (128, 1), (129, 1), (300, 1))
_PREFILL = ((1, 1), (16, 16), (130, 130), (140, 12), (64, 64), (300, 70))
_FEW_QUERIES = ((5, 5), (1, 1), (130, 3), (129, 1), (300, 5), (17, 2), (64, 1), (66, 4))
_MIXED = ((1, 1), (32, 1), (150, 1), (16, 16), (5, 5), (170, 70), (33, 1))


def _mixed(name: str, **options: Any) -> Case:
    return Case(name, _MIXED, 3, **options)


def _decode(name: str, **options: Any) -> Case:
    return Case(name, _DECODE, len(_DECODE), decode_only=True, **options)


def _few_queries(name: str, rows: tuple[tuple[int, int], ...] = _FEW_QUERIES, **options: Any) -> Case:
    return Case(name, rows, 0, max_queries=max((new for _, new in rows), default=4), **options)


def _prefill(name: str, **options: Any) -> Case:
    return Case(name, _PREFILL, 0, **options)


def _shared(
    name: str, num_decodes: int, shared_pages: int, *, prefill: tuple[int, int] | None = None, **o: Any
) -> Case:
    """Return decodes that begin with the same pages; the last one has a single token after them."""
    start = shared_pages * o.get("page_size", 16)
    rows = tuple((start + 1 + 9 * i, 1) for i in reversed(range(num_decodes)))
    more = () if prefill is None else (prefill,)
    return Case(name, rows + more, num_decodes, shared_pages=shared_pages, decode_only=prefill is None, **o)


# Rows of a tiny latent attention, and those of DeepSeek-V2, V3 and Kimi-K2
LATENT = {"heads": 4, "kv_heads": 1, "head_dim": 48, "value_dim": 32, "scale": 0.15}
DEEPSEEK = {
    "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64, "dtype": "bfloat16", "scale": 0.05,
}  # fmt: skip
FP8_BF16 = {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}

CASES = [
    _mixed("mixed"),
    _decode("decode"),
    _prefill("prefill"),
    Case("decodes-in-a-mixed-program", _DECODE, len(_DECODE), pad_tokens=10),
    Case("many-decodes", tuple((1 + 7 * i, 1) for i in range(20)), 20, decode_only=True, pad_rows=20),
    Case("many-decodes-and-a-prefill", (*((1 + 7 * i, 1) for i in range(18)), (40, 33)), 18, pad_rows=16),
    Case("a-long-decode-among-short-ones", ((700, 1), *((1 + i, 1) for i in range(9))), 10, sinks=True),
    Case("a-long-decode-in-a-window-over-fp8", ((9, 1), (600, 1)), 2, window=500, kv_dtype="float8_e4m3fn", sinks=True),
    Case("one-decode", ((37, 1),), 1, decode_only=True, pad_rows=0),
    Case("one-token-no-padding", ((1, 1),), 0, pad_rows=0, pad_tokens=0),
    Case("whole-pages-no-padding", ((32, 1), (64, 32), (48, 48)), 1, pad_rows=0, pad_tokens=0),
    Case("nothing-live", (), 0, pad_rows=3, pad_tokens=8),
    Case("nothing-live-decode", (), 0, pad_rows=3, decode_only=True),
    Case("shared-pages", ((40, 1), (33, 1), (50, 18), (32 + 5, 5)), 2, shared_pages=2),
    _shared("decodes-that-share", 20, 18),
    _shared("decodes-that-share-less-than-a-block", 3, 1, pad_rows=15),
    _shared("decodes-that-share-in-bf16", 5, 33, dtype="bfloat16", heads=9, kv_heads=3),
    _shared("decodes-that-share-everything", 17, 18, soft_cap=5.0, sinks=True, scale=0.3, heads=2, kv_heads=2),
    _shared("decodes-that-share-page-128", 6, 3, page_size=128, head_dim=128, heads=8, kv_heads=1),
    _shared("decodes-that-share-fp8", 4, 17, kv_dtype="float8_e4m3fn"),
    _shared("decodes-that-share-in-a-window", 4, 17, window=40),
    _shared("decodes-that-share-and-a-prefill", 4, 17, prefill=(17 * 16 + 40, 30)),
    _mixed("heads-2-of-2-dim-80-first-layer", heads=2, kv_heads=2, head_dim=80, layer=0),
    _mixed("heads-9-of-3-dim-96-page-32", heads=9, kv_heads=3, head_dim=96, page_size=32),
    _mixed("heads-14-of-2-dim-128-page-64", heads=14, kv_heads=2, head_dim=128, page_size=64),
    _mixed("heads-8-of-1-dim-256-page-128", heads=8, kv_heads=1, head_dim=256, page_size=128, num_layers=3, layer=2),
    _mixed(
        "heads-4-of-2-dim-256-bf16-window-cap", dtype="bfloat16", head_dim=256, page_size=32, window=40, soft_cap=5.0
    ),
    _mixed("heads-8-of-1-dim-512-page-32", heads=8, kv_heads=1, head_dim=512, page_size=32),
    _mixed("heads-4-of-2-dim-512-bf16-window-cap", dtype="bfloat16", head_dim=512, window=40, soft_cap=5.0, sinks=True),
    _mixed("heads-6-of-2-dim-192-cap", heads=6, head_dim=192, soft_cap=2.0),
    _decode("decode-heads-8-of-1-dim-256-window-cap", heads=8, kv_heads=1, head_dim=256, window=40, soft_cap=5.0),
    _decode("decode-heads-3-of-3-dim-80-page-32", heads=3, kv_heads=3, head_dim=80, page_size=32),
    _decode("decode-heads-10-of-2-dim-96-page-64", heads=10, kv_heads=2, head_dim=96, page_size=64),
    _decode("decode-heads-32-of-2-dim-128-page-128", heads=32, kv_heads=2, head_dim=128, page_size=128),
    _decode("decode-heads-16-of-1-dim-256-page-256", heads=16, kv_heads=1, head_dim=256, page_size=256),
    _decode("decode-heads-8-of-1-dim-512-window-cap", heads=8, kv_heads=1, head_dim=512, window=40, soft_cap=5.0),
    *(_decode(f"decode-window-{window}", window=window) for window in (1, 16, 100, 1000)),
    *(_prefill(f"prefill-window-{window}", window=window) for window in (1, 16, 100, 1000)),
    _mixed("window-page-64", window=33, page_size=64),
    _mixed("scale", scale=0.5),
    _mixed("soft-cap", soft_cap=2.0),
    _mixed("sinks", sinks=True),
    _decode("decode-everything", scale=0.3, soft_cap=5.0, sinks=True, window=40),
    _mixed("everything", scale=0.3, soft_cap=5.0, sinks=True, window=40),
    _mixed("reuses", reuses=True),
    _decode("decode-reuses-everything", reuses=True, head_dim=80, soft_cap=5.0, sinks=True, window=40),
    _mixed("reuses-fp8-bf16-window", **FP8_BF16, reuses=True, page_size=64, window=40),
    _mixed("bf16", dtype="bfloat16"),
    _decode("decode-bf16", dtype="bfloat16", head_dim=128, page_size=64),
    _prefill("prefill-bf16-window", dtype="bfloat16", window=50),
    _mixed("fp8", kv_dtype="float8_e4m3fn"),
    _mixed("fp8-bf16-everything", dtype="bfloat16", kv_dtype="float8_e4m3fn", soft_cap=5.0, sinks=True, window=40),
    _decode("decode-fp8-cap-sinks-first-layer", kv_dtype="float8_e4m3fn", soft_cap=5.0, sinks=True, layer=0),
    _prefill("prefill-fp8-window-cap", kv_dtype="float8_e4m3fn", window=50, soft_cap=5.0),
    _shared("decodes-that-share-fp8-cap", 4, 17, kv_dtype="float8_e4m3fn", soft_cap=5.0, sinks=True),
    Case("a-window-far-behind", ((1200, 1), (40, 1), (1100, 1), (1300, 40), (20, 20)), 3, window=100),
    _decode("decode-fp8", kv_dtype="float8_e4m3fn", heads=8, head_dim=128, page_size=64),
    _decode("decode-fp8-dim-256-page-128", kv_dtype="float8_e4m3fn", heads=16, kv_heads=1, head_dim=256, page_size=128),
    _mixed("fp8-dim-256-bf16-window-cap", **FP8_BF16, head_dim=256, window=40, soft_cap=5.0),
    _mixed("fp8-dim-512-bf16-window-cap", **FP8_BF16, heads=8, head_dim=512, window=40, soft_cap=5.0),
    _decode("decode-fp8-dim-512-bf16", **FP8_BF16, heads=16, kv_heads=1, head_dim=512),
    _decode("decode-fp8-dim-192-bf16-window-cap", **FP8_BF16, heads=6, head_dim=192, window=100, soft_cap=5.0),
    _mixed("fp8-dim-96-page-64", kv_dtype="float8_e4m3fn", heads=10, head_dim=96, page_size=64),
    _mixed("fp8-e5m2-bf16", dtype="bfloat16", kv_dtype="float8_e5m2"),
    _decode("decode-fp8-e5m2", kv_dtype="float8_e5m2", head_dim=128),
    _few_queries("few-queries"),
    _few_queries("few-queries-nothing-live", (), pad_rows=3, pad_tokens=8),
    _few_queries("few-queries-no-padding", ((200, 8), (8, 8)), pad_rows=0, pad_tokens=0),
    _few_queries("few-queries-in-bf16", dtype="bfloat16", heads=8, head_dim=128, page_size=64),
    _few_queries("few-queries-everything", scale=0.3, soft_cap=5.0, sinks=True, window=40, heads=9, kv_heads=3),
    _few_queries("few-queries-window-1", window=1, heads=2),
    _few_queries("few-queries-reuses-dim-80-cap", reuses=True, head_dim=80, soft_cap=5.0, sinks=True),
    _few_queries("few-queries-of-a-long-row", ((1029, 8), (3, 2), (700, 17), (1500, 1)), heads=8, sinks=True),
    _few_queries("few-queries-far-in-a-window", ((1300, 6), (40, 1), (1030, 7)), window=600, heads=4, kv_heads=1),
    _few_queries("few-queries-fp8-bf16-window", **FP8_BF16, heads=16, head_dim=128, window=100, sinks=True),
    _few_queries("few-queries-fp8-dim-256-page-128", **FP8_BF16, heads=16, kv_heads=1, head_dim=256, page_size=128),
    Case("few-queries-after-decodes", ((40, 1), (33, 1), (50, 4), (9, 9)), 2, max_queries=9),
    _prefill("prefill-fp8-dim-80", kv_dtype="float8_e4m3fn", heads=6, kv_heads=3, head_dim=80, page_size=32),
    Case("chunks-only", ((70, 1), (150, 20), (33, 33), (170, 70)), 2, chunks_only=True),
    Case(
        "chunks-only-dim-192", ((70, 5), (130, 130), (64, 64)), 1, chunks_only=True, heads=3, kv_heads=3, head_dim=192
    ),
    Case("chunks-only-without-any", ((70, 1), (150, 20)), 2, chunks_only=True),
    Case("chunks-only-latent", ((70, 1), (150, 20), (33, 33), (170, 70)), 2, chunks_only=True, **LATENT),
    _mixed("latent", **LATENT),
    _decode("decode-latent", **LATENT),
    _prefill("prefill-latent", **LATENT),
    _few_queries("few-queries-latent", **LATENT),
    Case("nothing-live-latent", (), 0, pad_rows=3, pad_tokens=8, **LATENT),
    _shared("decodes-that-share-latent", 20, 18, **LATENT),
    _mixed("latent-bf16-page-64", **{**LATENT, "dtype": "bfloat16", "page_size": 64, "heads": 5}),
    _decode("decode-latent-of-deepseek-v3", **DEEPSEEK, heads=128),
    _decode("decode-latent-of-deepseek-v3-fp8", **{**DEEPSEEK, **FP8_BF16}, heads=16),
    _mixed("latent-of-deepseek-v3", **DEEPSEEK, heads=16, num_layers=1, layer=0),
    _prefill("prefill-latent-of-deepseek-v3-fp8", **{**DEEPSEEK, **FP8_BF16}, heads=8),
    _few_queries("few-queries-latent-of-deepseek-v3", **DEEPSEEK, heads=20),
    _mixed("latent-fp8-reuses", **LATENT, kv_dtype="float8_e4m3fn", reuses=True),
    Case("a-long-decode-of-latent-rows", ((700, 1), *((1 + i, 1) for i in range(9))), 10, **{**LATENT, "heads": 40}),
]

# What only `make test-full` adds to these are combinations of what they have. Interpreters take seconds for a case.
CORNERS_OF_INTERPRETED = {
    "a-long-decode-among-short-ones",
    "heads-9-of-3-dim-96-page-32",
    "heads-4-of-2-dim-256-bf16-window-cap",
    "fp8-bf16-everything",
    "reuses-fp8-bf16-window",
    "few-queries-everything",
    "few-queries-of-a-long-row",
    "chunks-only-dim-192",
    "latent-of-deepseek-v3",
    "few-queries-latent",
}
CORNERS = CORNERS_OF_INTERPRETED | {
    "chunks-only",
    "chunks-only-without-any",
    "everything",
    "reuses",
    "decode-reuses-everything",
    "mixed",
    "decode",
    "prefill",
    "nothing-live",
    "nothing-live-decode",
    "one-token-no-padding",
    "shared-pages",
    "many-decodes",
    "many-decodes-and-a-prefill",
    "decodes-that-share-everything",
    "decodes-that-share-in-bf16",
    "decodes-that-share-page-128",
    "decode-heads-8-of-1-dim-512-window-cap",
    "decode-window-16",
    "prefill-window-16",
    "window-page-64",
    "decode-everything",
    "a-window-far-behind",
    "prefill-bf16-window",
    "few-queries",
    "few-queries-nothing-live",
    "few-queries-in-bf16",
    "few-queries-far-in-a-window",
    "few-queries-after-decodes",
    "latent",
    "decode-latent",
    "prefill-latent",
    "nothing-live-latent",
    "decodes-that-share-latent",
    "decode-latent-of-deepseek-v3",
    "few-queries-latent-of-deepseek-v3",
    "a-long-decode-of-latent-rows",
}
