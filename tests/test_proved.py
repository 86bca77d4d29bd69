"""The table of proved cases is believed only where everything is as when they passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.proved import table as module
from tests.proved.plugin import _watch_compiles
from tests.proved.table import ROOT, Table, environment, sources

FILE, OF_A_KERNEL = "tests/test_proved.py", "tests/pallas_kernels/sampling/test_triton.py"
HERE = {"jax": "0.12.0"}
PASSED = {"test_a[1]": {"programs": ["aa", "bb"], "rows": [["nvidia-h200", "decode"]]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table with one file, as a run has written it."""
    path = tmp_path / "cases.json"
    table = Table(HERE, path)
    table.add(FILE, table.sources(FILE)[0], PASSED)
    table.write()
    return path


def test_what_passed_is_found_for_the_same_input(path: Path) -> None:
    assert Table(HERE, path).cases(FILE) == PASSED
    assert Table(HERE, path).programs(FILE) == PASSED
    assert Table({"jax": "0.12.1"}, path).cases(FILE) == {}
    assert Table(HERE, path).cases("tests/test_docs.py") == {}


@pytest.mark.parametrize(("now", "cases", "programs"), [(("x", "y"), {}, {}), (("x", None), {}, PASSED)])
def test_other_sources_are_not_proved_but_their_programs_may_be(
    path: Path, now: tuple[str, str | None], cases: Any, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = sources(FILE)[1]
    monkeypatch.setattr(module, "sources", lambda file: (now[0], now[1] or checks))
    table = Table(HERE, path)
    assert table.cases(FILE) == cases
    assert table.programs(FILE) == programs


@pytest.mark.parametrize("key", ["programs", "rows", "sources", "environment"])
def test_an_entry_that_was_changed_by_hand_counts_for_nothing(path: Path, key: str) -> None:
    read = json.loads(path.read_text())
    entry = read["files"][FILE]
    if key in entry:
        entry[key] = entry[key][::-1]
    else:
        entry["cases"]["test_a[1]"][key] = []
    path.write_text(json.dumps(read))
    assert Table(HERE, path).cases(FILE) == Table(HERE, path).programs(FILE) == {}


def test_nothing_is_added_if_sources_have_changed_meanwhile(tmp_path: Path) -> None:
    table = Table(HERE, tmp_path / "cases.json")
    table.add(FILE, "as they were", PASSED)
    assert table.cases(FILE) == {}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('"""Other words."""\n\ndef f(x):\n    # A reason.\n    return x + 1\n', True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(x):\n    'text'\n    return x + 1\n'text'\n", False),
    ],
)
def test_words_about_the_code_are_no_part_of_it(other: str, same: bool, tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text('def f(x):\n    """Return the next number."""\n    return x + 1\n')
    two.write_text(other)
    assert (module._content(one) == module._content(two)) is same


def test_a_case_depends_on_what_its_file_imports() -> None:
    found = {str(path.relative_to(ROOT)) for path in module._closure(ROOT / OF_A_KERNEL)}
    assert {OF_A_KERNEL, "pallas_kernels/sampling/triton/draw.py", "pallas_kernels/sampling/cpu.py"} <= found
    assert not [name for name in found if name.startswith(("jaxserve/", "pallas_kernels/quantized_matmul"))]
    assert "tests/proved/table.py" not in found
    tables = module._closure(ROOT / "tests/aot/test_triton.py")
    assert {ROOT / "jaxserve/runtime/devices/targets/nvidia-h200.yaml", ROOT / "tests/aot/kernels.py"} <= tables
    assert not [path for path in tables if "engine" in path.relative_to(ROOT).parts]


def test_only_what_makes_a_result_is_part_of_the_environment() -> None:
    found = environment({"jax": "1", "nvidia-nvvm": "2", "pytest": "3", "nvidia-cudnn-cu13": "4"})
    assert found.keys() == {"python", "machine", "XLA_FLAGS", "jax", "nvidia-nvvm"}


def test_a_case_ends_where_it_would_compile_its_last_known_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (jax.jit(function).lower(1.0) for function in (lambda x: x + 1, lambda x: x + 2))
    made: list[str] = []
    with monkeypatch.context() as patch:
        _watch_compiles(patch, made, None)
        one.compile()
        other.compile({"xla_dump_to": str(path.parent)})
    assert len(set(made)) == 2
    again: list[str] = []
    with monkeypatch.context() as patch:
        _watch_compiles(patch, again, sorted(made))
        one.compile()
        with pytest.raises(pytest.skip.Exception):
            other.compile()
    with_option: list[str] = []
    with monkeypatch.context() as patch:
        _watch_compiles(patch, with_option, sorted(made))
        one.compile({"xla_backend_optimization_level": 0})
        other.compile()
