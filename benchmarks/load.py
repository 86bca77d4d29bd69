"""Measures how long loading a model's weights takes and how many bytes it reads: from the source, and from the folder
that `jaxserve convert` writes.

A load covers the imports of the format, and opening, checking and reading the checkpoint. Processes of the two forms
take turns, and each loads several times; the first load isn't counted, because it fills the page cache. Figures are
medians of wall time and of processor time, which other processes disturb less. Bytes are counted in a separate process.
A part of "1 of N" is the load of one process of N, each with one device of a tensor-parallel mesh.

    python benchmarks/load.py --json benchmarks/results/cpu/load.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from jaxserve.cli.common.table import format_records

BUILTIN = "smollm2-135m-instruct"
SHARDS = (8, 6, 4, 3, 2)
LOADS = 5
FORMS = ("source", "orbax")
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 1536, "intermediate_size": 4096,
    "num_hidden_layers": 6, "num_attention_heads": 24, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0,
}  # fmt: skip
"""0.29 billion parameters, written as safetensors."""


def load(model: str, dtype: str, part: str, count: bool) -> dict[str, Any]:
    """Load the whole model or one shard in this process; return the times or, with `count`, the bytes read."""
    import jax

    import jaxserve.worker
    from jaxserve.config.schema import EngineConfig
    from jaxserve.model_source import read_config, resolve
    from jaxserve.models.dtypes import dtype_of
    from jaxserve.models.layout import LaidOutModel
    from jaxserve.models.registry import abstract_params, parse_model_config
    from jaxserve.runtime.devices.mesh import make_mesh, shardings
    from jaxserve.weights import build_params, open_weights

    source = resolve(model)
    config = parse_model_config(read_config(source))
    tensor = 1 if part == "whole" else next(count for count in SHARDS if config.splits_into(count))
    abstract = abstract_params(LaidOutModel(config, shards=tensor), dtype_of(EngineConfig(dtype=dtype).dtype))  # type: ignore[arg-type]
    where = shardings(make_mesh(jax.devices(), tensor=tensor), abstract)

    def once() -> int:
        reader = open_weights(source, abstract)
        if part != "whole":
            return _one_shard(abstract, where, reader)
        return sum(array.nbytes for array in jax.tree.leaves(build_params(abstract, where, reader)))

    if count:
        with _counting() as read:
            loaded = once()
        return {"shards": tensor, "loaded_bytes": loaded, "read_bytes": read[0]}
    start, cpu_start = time.perf_counter(), time.process_time()
    if source.kind == "orbax":
        import jaxserve.weights.orbax  # noqa: F401
    imports, cpu_imports = time.perf_counter() - start, time.process_time() - cpu_start
    once()
    seconds, cpu_seconds = [], []
    for _ in range(LOADS):
        gc.collect()  # free the arrays of the previous load before this one starts
        start, cpu_start = time.perf_counter(), time.process_time()
        once()
        seconds.append(time.perf_counter() - start + imports)
        cpu_seconds.append(time.process_time() - cpu_start + cpu_imports)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """Yield a counter of the bytes read from safetensors, GGUF and Orbax files."""
    import numpy as np

    from jaxserve.weights import orbax
    from jaxserve.weights.gguf import GGUFFile
    from jaxserve.weights.hf import SafetensorsFolder

    read = [0]
    with contextlib.ExitStack() as stack:
        for kind in (GGUFFile, SafetensorsFolder):

            def counted(self: Any, name: str, window: Any, out: np.ndarray, original: Any = kind.read) -> None:
                read[0] += _stored_bytes(self.infos[name].stored_type, out.size)
                original(self, name, window, out)

            stack.enter_context(mock.patch.object(kind, "read", counted))

        def fill(file: int, at: int, out: np.ndarray, original: Any = orbax._read_bytes) -> None:
            read[0] += out.nbytes
            original(file, at, out)

        stack.enter_context(mock.patch.object(orbax, "_read_bytes", fill))
        yield read


def _one_shard(abstract: Any, where: Any, reader: Any) -> int:
    """Run `build` as a process that has only the first of the mesh's devices; return the loaded bytes."""
    import jax

    from jaxserve.weights import build_params

    first = jax.devices()[0]

    class FirstDeviceSharding(jax.sharding.NamedSharding):
        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Any:
            return {first: self.devices_indices_map(shape)[first]}

    shards = jax.tree.map(lambda sharding: FirstDeviceSharding(sharding.mesh, sharding.spec), where)
    kept: list[jax.Array] = []

    def keep(shape: Any, sharding: Any, arrays: list[jax.Array], dtype: Any) -> jax.Array:
        kept.extend(arrays)
        return arrays[0]

    with mock.patch("jax.make_array_from_single_device_arrays", keep):
        build_params(abstract, shards, reader)
    return sum(array.nbytes for array in kept)


def _stored_bytes(stored_type: str, elements: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[stored_type]]
    return elements * size // block


def write_model(folder: Path, dtype: str) -> None:
    """Write a model with random weights in Hugging Face's format."""
    import jax
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxserve.models.layout import LaidOutModel
    from jaxserve.models.registry import abstract_params, parse_model_config

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    config = parse_model_config(MODEL)
    tensors = {}
    specs = jax.tree.leaves(abstract_params(LaidOutModel(config), kind))
    for name, placement in ((part.name, part) for spec in specs for part in spec.parts):
        rows, columns = placement.shape[0], int(np.prod(placement.shape[1:]))
        if name.endswith((".weight",)) and len(placement.shape) > 2 and "o_proj" not in name:
            rows, columns = int(np.prod(placement.shape[:-1])), placement.shape[-1]
        shape = (rows,) if len(placement.shape) == 1 else (rows, columns)
        tensors[name] = np.resize(block, shape).astype(kind)
    save_file(tensors, folder / "model.safetensors")


def measure(name: str, source: str, dtype: str, target: Path, rounds: int) -> list[dict[str, Any]]:
    """Convert the model and load both forms in turn; return a row for each part."""
    command = [sys.executable, "-m", "jaxserve", "convert", source, "--dtype", dtype, "--output", str(target)]
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    converted = time.perf_counter() - start
    models = {"source": source, "orbax": str(target)}
    rows = []
    for part in ("whole", "one shard"):
        runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
        for i in range(rounds + 1):
            for form in FORMS if i % 2 else FORMS[::-1]:
                runs[form].append(_in_a_process(models[form], dtype, part, count=i == 0))
        row: dict[str, Any] = {"model": name, "part": f"1 of {runs['source'][0]['shards']}", "convert_s": converted}
        for form in FORMS:
            counts, *timed = runs[form]
            seconds, cpu = ([one for run in timed for one in run[name]] for name in ("seconds", "cpu_seconds"))
            row |= {
                f"{form}_s": statistics.median(seconds),
                f"{form}_cpu_s": statistics.median(cpu),
                f"{form}_read_mb": counts["read_bytes"] / 1e6,
                f"{form}_runs": seconds,
            }
        loaded = {runs[form][0]["loaded_bytes"] for form in FORMS}
        assert len(loaded) == 1, loaded
        row |= {"loaded_mb": loaded.pop() / 1e6, "faster": row["source_s"] / row["orbax_s"]}
        rows.append(row)
    return rows


def _in_a_process(model: str, dtype: str, part: str, *, count: bool) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={1 if part == 'whole' else SHARDS[0]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.load", "--load", model, "--dtype", dtype, "--part", part]
    command += ["--count"] if count else []
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed processes of each form")
    parser.add_argument("--model", help=f"a model to load as bfloat16, instead of {BUILTIN} and two generated models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.dtype, args.part, args.count)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = {args.model: args.model} if args.model else {f"{BUILTIN} (GGUF, Q4_1)": BUILTIN}
        if not args.model:
            for stored in ("bfloat16", "float32"):
                write_model(Path(folder) / stored, stored)
                made[f"0.29B (safetensors, {stored})"] = str(Path(folder) / stored)
        for i, (name, source) in enumerate(made.items()):
            rows += measure(name, source, "bfloat16", Path(folder) / f"converted-{i}", args.rounds)
    names = ["model", "part", "loaded_mb", "source_read_mb", "orbax_read_mb", "source_s", "orbax_s", "faster",
             "source_cpu_s", "orbax_cpu_s"]  # fmt: skip
    print(format_records(rows, names, decimals=2))
    if args.json:
        args.json.write_text(json.dumps({"rounds": args.rounds, "dtype": "bfloat16", "loads": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
