"""The closed set of programs: state aliased, kept on disk and loaded again, under a key of all that shapes them."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import jaxserve
import pallas_kernels
from jaxserve.models.registry import family
from jaxserve.runtime.programs import builder as program_module
from jaxserve.runtime.programs.builder import (
    READ_KEY,
    UPDATE_KEY,
    WRITE_KEY,
    CompileCounter,
    Key,
    ProgramBuilder,
    build_programs,
    dtype_of,
    program_keys,
)
from jaxserve.runtime.step.batch import ProgramKey, build, step_shape
from jaxserve.runtime.step.slot_update import pack_open
from jaxserve.runtime.step.state import DeviceState
from jaxserve.step_plan import Capacity, StepPlan
from tests.runtime.tiny import F32, builder, mesh, model, opening, params, prefill, specs, zero_state

# A pool far larger than a step's working memory, so that a copy of it shows.
CAPACITY = Capacity(
    num_slots=4,
    num_pages=4096,
    page_size=16,
    max_model_len=64,
    decode_buckets=(4,),
    token_buckets=(16,),
    prompt_logprob_tokens=8,
)
STEPS = program_keys(CAPACITY)
KEYS: list[Key] = [UPDATE_KEY, READ_KEY, WRITE_KEY, *STEPS]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def programs(kept: Path) -> dict[Key, Any]:
    built, compiled = build_programs(builder(CAPACITY), KEYS, kept)
    assert compiled == len(KEYS)
    return built


def _first_step(programs: dict[Key, Any]) -> tuple[DeviceState, DeviceState, Any]:
    """Open a slot and prefill it: the state before the step, after it, and the output."""
    state = zero_state(CAPACITY)
    for vector in pack_open(opening(1, [5, 6, 7], temperature=0.8, logprobs=3, seed=4)):
        state = programs[UPDATE_KEY](state, vector[None])
    plan = StepPlan(opens=[], chunks=[prefill(1, 0, [5, 6, 7], (9,))], closes=[], num_decodes=0, greedy=False)
    key = next(key for key in STEPS if key.kind == "mixed")
    after, output = programs[key](params(), state, build(plan, step_shape(key, CAPACITY), CAPACITY))
    return state, after, output


def test_the_set_is_what_the_sizes_say() -> None:
    capacity = msgspec.structs.replace(CAPACITY, decode_buckets=(2, 4), token_buckets=(8, 16))
    assert [str(key) for key in program_keys(capacity)] == [
        "decode-2-greedy",
        "decode-2-full",
        "decode-4-greedy",
        "decode-4-full",
        "mixed-8-full",
        "mixed-16-full",
        "prompt_logprobs-8-full",
    ]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_state_is_aliased_not_copied(programs: dict[Key, Any], key: Key) -> None:
    memory = programs[key].memory_analysis()
    state = specs(CAPACITY)
    total = sum(spec.nbytes for spec in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= total
    assert memory.temp_size_in_bytes < state.kv.keys.nbytes / 4


@pytest.mark.parametrize("key", STEPS, ids=str)
def test_profiles_can_tell_the_parts_of_a_step_apart(programs: dict[Key, Any], key: ProgramKey) -> None:
    text = programs[key].as_text()
    name = str(key).replace("-", "_")
    assert text.startswith(f"HloModule jit_{name},")
    scopes = set(re.findall(rf'op_name="jit\({name}\)/(?:.*/)?(layer_\d+)/jit\(_layer\)/(\w+)/', text))
    assert {("layer_0", "attention"), ("layer_0", "mlp"), ("layer_1", "attention"), ("layer_1", "mlp")} <= scopes
    for phase in ("read_input", "embed", "final_norm", "head", "sample", "write_state"):
        assert re.search(rf'op_name="jit\({name}\)/(?:.*/)?{phase}/', text), phase


def test_the_pool_stays_where_it_is(programs: dict[Key, Any]) -> None:
    state = zero_state(CAPACITY)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    after = programs[UPDATE_KEY](state, next(pack_open(opening()))[None])
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == where
    _, after, _ = _first_step(programs)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)}) == len(where)


def test_a_step_leaves_what_the_next_one_needs(programs: dict[Key, Any]) -> None:
    _, state, output = _first_step(programs)
    assert np.asarray(output.num_tokens)[0].tolist() == [1, 0, 0, 0]
    token = int(output.tokens[0, 0, 0])
    assert np.asarray(state.seq_lens)[0].tolist() == [0, 3, 0, 0]
    assert np.asarray(state.last_tokens)[0].tolist() == [0, token, 0, 0]
    assert int(state.page_tables[0, 1, 0]) == 9
    assert np.argwhere(np.asarray(state.counts)[0]).tolist() == [[1, token]]
    written = np.argwhere(np.abs(np.asarray(state.kv.keys)[0]).sum(axis=(0, 3)) > 0).tolist()
    assert written == [[layer * CAPACITY.num_pages + 9, i] for layer in range(2) for i in range(3)]


def test_kept_programs_are_loaded_and_do_the_same(programs: dict[Key, Any], kept: Path) -> None:
    counter = CompileCounter()
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, kept)
    assert (compiled, counter.count) == (0, 0)
    assert list(loaded) == list(programs)
    for ours, theirs in zip(jax.tree.leaves(_first_step(loaded)[1:]), jax.tree.leaves(_first_step(programs)[1:])):
        np.testing.assert_array_equal(ours, theirs)
    [folder] = kept.iterdir()
    assert {path.name for path in folder.iterdir()} == {f"{key}.xla" for key in KEYS} | {"lock"}


@pytest.mark.parametrize("damage", ["empty", "half", "garbage"])
def test_a_damaged_program_is_compiled_again(
    programs: dict[Key, Any], kept: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(kept, tmp_path / "kept")
    [path] = (tmp_path / "kept").glob(f"*/{UPDATE_KEY}.xla")
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "garbage": bytes(range(256)) * 40}[damage])
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")
    assert compiled == 1
    assert "can't be loaded" in caplog.text
    assert int(_first_step(loaded)[1].seq_lens[0, 1]) == 3
    assert build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")[1] == 0


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> ProgramKey:
    """A program that is not needed first."""
    wanted = ProgramKey("decode", 4, True)
    monkeypatch.setattr(program_module, "needed_first", lambda keys: [key for key in keys if key != wanted])
    return wanted


def test_programs_that_a_server_can_be_without_at_first_come_behind(
    programs: dict[Key, Any], kept: Path, wanted: ProgramKey
) -> None:
    counter = CompileCounter()
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, kept, behind=True)
    assert loaded.fitting(wanted) == wanted  # waits for it
    assert int(_first_step(loaded)[1].seq_lens[0, 1]) == 3
    assert set(loaded) == set(KEYS)  # waits for all
    assert (loaded.fitting(wanted), loaded.num_coming, compiled, counter.count) == (wanted, 0, 0, 0)


def test_a_damaged_program_that_comes_behind_is_left_out_and_made_by_the_next_start(
    programs: dict[Key, Any], kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: ProgramKey
) -> None:
    shutil.copytree(kept, tmp_path / "kept")
    [path] = (tmp_path / "kept").glob(f"*/{wanted}.xla")
    path.write_bytes(b"garbage")
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, tmp_path / "kept", behind=True)
    assert (set(loaded), compiled) == ({*KEYS} - {wanted}, 0)
    assert loaded.fitting(wanted) == ProgramKey("decode", 4, False)
    assert f"kept program {wanted} can't be loaded" in caplog.text
    assert build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")[1] == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built, compiled = build_programs(builder(CAPACITY), [UPDATE_KEY], None)
    assert (list(built), compiled) == ([UPDATE_KEY], 1)
    assert not list(tmp_path.iterdir())


def test_the_fingerprint_follows_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(capacity: Capacity = CAPACITY, **context: Any) -> str:
        made = builder(capacity)
        made.context = dataclasses.replace(made.context, **context)
        return made.fingerprint()

    same = of()
    assert same == of()
    abstract = family(model()).abstract(model(), np.dtype(jnp.bfloat16))
    bfloat16 = ProgramBuilder(builder().context, CAPACITY, mesh(), abstract, specs(CAPACITY)).fingerprint()
    others = [
        of(msgspec.structs.replace(CAPACITY, num_pages=4095)),
        of(msgspec.structs.replace(CAPACITY, decode_buckets=(2, 4))),
        of(sample_rows=None),
        of(model=dataclasses.replace(model(), norm_eps=1e-6)),
        of(model=dataclasses.replace(model(), windows=(8, None))),
        bfloat16,
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    others.append(of())
    monkeypatch.undo()
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    others.append(of())
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("name", "shapes_programs"),
    [
        ("jaxserve/layers/rope.py", True),
        ("jaxserve/models/llama.py", True),
        ("jaxserve/runtime/step/sampling.py", True),
        ("jaxserve/api_types.py", True),
        ("jaxserve/params.py", True),
        ("pallas_kernels/paged_attention/reference.py", True),
        ("jaxserve/server/app.py", False),
        ("jaxserve/engine/scheduling/scheduler.py", False),
    ],
)
def test_the_fingerprint_follows_our_sources(
    name: str, shapes_programs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = builder().fingerprint()
    for package in (jaxserve, pallas_kernels):
        root = Path(str(package.__file__)).parent
        shutil.copytree(root, tmp_path / root.name, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(tmp_path / root.name / "__init__.py"))
    assert builder().fingerprint() == before
    with (tmp_path / name).open("a") as file:
        file.write("\n# changed\n")
    assert (builder().fingerprint() != before) == shapes_programs


def test_compiles_are_counted() -> None:
    counter = CompileCounter()
    function = jax.jit(lambda x: x * 3 + 1)
    function(np.float32(1))
    first = counter.count
    function(np.float32(2))
    assert first >= 1
    assert counter.count == first


def test_dtypes() -> None:
    assert dtype_of("float32") == F32
    assert dtype_of("auto") == dtype_of("bfloat16") == jnp.bfloat16
