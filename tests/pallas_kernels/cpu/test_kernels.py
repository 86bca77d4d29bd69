from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import call, cpu_features, kernels_in, register
from pallas_kernels.cpu.compile import Code
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32, I32, I64

pytestmark = pytest.mark.slow

Body = Callable[[Function, Value], Value]


def add_one(f: Function, x: Value) -> Value:
    return x + 1.0


def clipped_cube(f: Function, x: Value) -> Value:
    return f.select(x > 2.0, f.constant(F32, 8), x * x * x)


def harmonic(f: Function, x: Value) -> Value:
    """1 + 1/2 + … + 1/x."""

    def term(i: Value, total: Value) -> Value:
        return total + f.constant(F32, 1) / f.convert("sitofp", i + 1, F32)

    return f.loop(f.convert("fptosi", x, I64), term, f.constant(F32, 0))[0]


def collatz(f: Function, x: Value) -> Value:
    """The number of Collatz steps from x to 1."""

    def step(n: Value, count: Value) -> list[Value]:
        return [f.select((n % 2).equals(0), n // 2, n * 3 + 1), count + 1]

    first = f.convert("fptosi", x, I32)
    _, count = f.loop_while(lambda n, _: n > 1, step, first, f.constant(I32, 0))
    return f.convert("sitofp", count, F32)


def sign_by_branch(f: Function, x: Value) -> Value:
    place = f.stack(4)
    f.store(f.constant(F32, 0), place)
    f.when(x > 0.0, lambda: f.store(f.constant(F32, 1), place), lambda: f.store(f.constant(F32, -1), place))
    return f.load(F32, place)


def lanes_reversed(f: Function, x: Value) -> Value:
    """The third of four neighbours x, x + 1, …."""
    four = f.broadcast(x, 4) + f.constant(F32.times(4), [0, 1, 2, 3])
    reversed_ = f.shuffle(four, four, [3, 2, 1, 0])
    place = f.stack(16)
    f.store(f.fma(reversed_, f.constant(F32.times(4), 1), f.constant(F32.times(4), 0)), place)
    return f.load(F32, place, 4)


BODIES: dict[str, tuple[Body, Callable[[float], float]]] = {
    "add_one": (add_one, lambda x: x + 1),
    "clipped_cube": (clipped_cube, lambda x: min(x, 2) ** 3),
    "harmonic": (harmonic, lambda x: sum(1 / i for i in range(1, int(x) + 1))),
    "collatz": (collatz, lambda x: {1: 0, 2: 1, 3: 7, 4: 2, 5: 5, 6: 8, 7: 16}.get(int(x), 0)),
    "sign_by_branch": (sign_by_branch, lambda x: 1.0 if x > 0 else -1.0),
    "lanes_reversed": (lanes_reversed, lambda x: x + 2),
}


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Applies a function to every number; each number is an item of its own."""

    body: str

    @property
    def name(self) -> str:
        return f"test_{self.body}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        def compute(call: Call) -> None:
            def work(f: Function, item: Value, x: Value, out: Value) -> None:
                f.store(BODIES[self.body][0](f, f.load(F32, x, item * 4)), out, item * 4)

            call.parallel_for(call.arguments[0].dim(0), [call.arguments[0].data, call.results[0].data], work)

        handler(module, self.name, 1, 1, compute)


def run(name: str, x: jax.Array) -> jax.Array:
    return call(Elementwise(name), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("name", BODIES)
def test_generated_code_computes_what_was_written(name: str) -> None:
    x = np.arange(-1, 8, dtype=np.float32)
    np.testing.assert_allclose(run(name, jnp.asarray(x)), [BODIES[name][1](float(one)) for one in x], rtol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 2, 10_000])
def test_every_item_is_computed_once(length: int) -> None:
    x = jnp.arange(float(length))
    for _ in range(20):
        np.testing.assert_array_equal(jax.jit(lambda x: run("add_one", run("add_one", x)))(x), np.arange(length) + 2)


def test_several_calls_run_at_once() -> None:
    """More calls than threads, each of which asks for helpers."""
    x = jnp.arange(1000.0)
    many = jax.jit(lambda x: sum(run("add_one", x + i) for i in range(32)))
    np.testing.assert_allclose(many(x), 32 * np.arange(1000) + 32 + 31 * 16)


def test_a_program_from_disk_finds_its_kernels_in_a_new_process(tmp_path: Path) -> None:
    from jax.experimental import serialize_executable

    compiled = jax.jit(lambda x: run("add_one", x)).lower(jnp.zeros(3)).compile()
    text = compiled.as_text()
    assert text is not None
    assert [kernel for kernel, _ in kernels_in(text)] == [Elementwise("add_one")]
    assert kernels_in("") == []
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    (tmp_path / "program").write_bytes(pickle.dumps((kernels_in(text), payload, in_tree, out_tree)))
    code = (
        "import pickle, sys, jax.numpy as jnp\n"
        "from tests.pallas_kernels.cpu import test_kernels\n"
        "test_kernels.Elementwise.write = None\n"
        "from jax.experimental import serialize_executable\n"
        "from pallas_kernels.cpu import cpu_features, register\n"
        "kernels, *program = pickle.loads(open(sys.argv[1], 'rb').read())\n"
        "[register(kernel, code) for kernel, code in kernels]\n"
        "assert cpu_features.cache_info().currsize == 1, 'Linux was not asked for the tile registers'\n"
        "print(serialize_executable.deserialize_and_load(*program)(jnp.arange(3.0)).tolist())\n"
    )
    given = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "program")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert given.stdout == "[1.0, 2.0, 3.0]\n"


def test_code_for_other_features_is_compiled_again() -> None:
    @dataclasses.dataclass(frozen=True)
    class Again(Elementwise):
        name = "test_again"

    register(Again("add_one"), Code(frozenset({"another feature"}), b"no object file"))
    [(_, code)] = kernels_in('"test_again"')
    assert code.features == cpu_features()


def test_a_module_calls_its_own_functions_by_name() -> None:
    module = Module()
    twice = module.function("twice", [F32], F32)
    twice.ret(twice.arguments[0] * 2.0)
    caller = module.function("caller", [F32], F32, public=True)
    caller.ret(caller.call("twice", F32, caller.arguments[0]))
    assert "declare" not in str(module)
    assert "define internal float @twice" in str(module)
