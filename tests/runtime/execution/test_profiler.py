from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.observability.timeline import Timeline
from jaxserve.runtime.execution.profiler import JaxProfiler, scopes_of


def _program() -> jax.stages.Compiled:
    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"), jax.named_scope("mlp"):
            return jnp.sin(x @ x)

    def decode_2(x: jax.Array) -> jax.Array:
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = layer(x)
        with jax.named_scope("sample"):
            return jax.lax.fori_loop(0, 3, lambda _, x: jnp.cumsum(x), x.sum(axis=0))

    return jax.jit(decode_2).lower(jnp.ones((8, 8))).compile()


def test_scopes_are_only_our_own() -> None:
    name, scopes = scopes_of(_program().as_text())
    assert name == "jit_decode_2"
    assert {"layer_0/mlp", "layer_1/mlp", "sample"} == set(scopes.values())


def test_a_profile_has_the_spans_of_the_engine_and_the_scopes_of_programs(tmp_path: Path) -> None:
    timeline, program = Timeline(), _program()
    profiler = JaxProfiler(timeline, [{"decode-2": program}])
    folder = profiler.start(tmp_path, "mine", with_stack=False)
    with timeline.span("plan"):
        jax.block_until_ready(program(jnp.ones((8, 8))))
    profiler.stop()
    with timeline.span("after"):
        pass
    assert {path.suffix for path in folder.iterdir()} == {".gz", ".pb"}
    [trace] = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "plan" in names
    assert "after" not in names
    scopes = json.loads(gzip.decompress((folder / "scopes.json.gz").read_bytes()))
    operations = [event["args"] for event in events if "hlo_op" in event.get("args", {})]
    seen = {scopes[each["hlo_module"]].get(each["hlo_op"]) for each in operations if each["hlo_module"] in scopes}
    assert {"layer_0/mlp", "layer_1/mlp"} <= seen
