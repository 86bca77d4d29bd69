"""The closed set of programs: compiled ahead of time, kept on disk, dispatched by key. Nothing else is ever called.

A compiled program is kept under a hash of all it depends on, so that the next start loads it instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from tqdm import tqdm

import jaxserve
import pallas_kernels
from jaxserve import host
from jaxserve.config.threads import xla_threads
from jaxserve.params import dotted
from jaxserve.quant import packed_weights
from jaxserve.runtime.devices.mesh import shape_structs
from jaxserve.runtime.programs.file_lock import alone
from jaxserve.runtime.programs.own_files import own_folder, read_own, write_own
from jaxserve.runtime.programs.program_set import Key, Program, ProgramSet, needed_first
from jaxserve.runtime.step.batch import ProgramKey, packing, step_shape
from jaxserve.runtime.step.page_copies import make_read_pages, make_write_pages, row_specs
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.slot_update import UPDATE
from jaxserve.runtime.step.state import ArraySpec, DeviceState
from jaxserve.runtime.step.step import StepContext, StepOutput, make_step, make_update
from jaxserve.step_plan import Capacity
from pallas_kernels.cpu import cpu_features, cpu_name, kernels_in, refusal, register

logger = logging.getLogger("jaxserve.runtime")

UPDATE_KEY = "update"
READ_KEY, WRITE_KEY = "read_pages", "write_pages"


def program_keys(capacity: Capacity) -> list[ProgramKey]:
    """Every step program of a deployment. Mixed steps always have the sampler: it is skipped where no row wants it."""
    keys = [ProgramKey("decode", size, greedy) for size in capacity.decode_buckets for greedy in (True, False)]
    keys += [ProgramKey("mixed", size, False) for size in capacity.token_buckets]
    keys.append(ProgramKey("prompt_logprobs", capacity.prompt_logprob_tokens, False))
    return keys


class ProgramBuilder:
    """Lowers, compiles, stores and loads the programs of one deployment. Needs shapes only, no arrays."""

    def __init__(
        self,
        context: StepContext,
        capacity: Capacity,
        mesh: Mesh,
        param_specs: Any,
        state_specs: DeviceState,
        num_processes: int = 1,
    ) -> None:
        self.context = context
        self.capacity = capacity
        self.mesh = mesh
        self.param_specs = param_specs
        self.state_specs = state_specs
        self.num_processes = num_processes

    def lower(self, key: Key) -> jax.stages.Lowered:
        """Trace one program; the state is donated."""
        # Kernels ask the mesh in force for the device they are lowered for, which need not be attached.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self._lower(key)

    def _lower(self, key: Key) -> jax.stages.Lowered:
        state = shape_structs(self.mesh, self.state_specs)
        if isinstance(key, str):
            function, *arguments = self._without_weights(key)
            return jax.jit(function, donate_argnums=0).lower(state, *arguments)
        shape = step_shape(key, self.capacity)
        gathered = self.num_processes > 1 and self.capacity.num_ranks > 1
        function = make_step(self.context, shape, self.mesh, self.param_specs, self.state_specs, gathered=gathered)
        params = shape_structs(self.mesh, self.param_specs)
        return jax.jit(function, donate_argnums=1).lower(params, state, self._packed(packing(shape).size))

    def _without_weights(self, key: str) -> tuple[Any, ...]:
        """The function of such a program, and what it takes after the state."""
        if key == UPDATE_KEY:
            return make_update(self.mesh, self.state_specs), self._packed(UPDATE.size)
        rows = row_specs(self.state_specs)
        pages = self._packed(rows[0].shape[1])
        if key == READ_KEY:
            return make_read_pages(self.mesh, self.state_specs), pages
        assert key == WRITE_KEY, key
        return make_write_pages(self.mesh, self.state_specs), pages, shape_structs(self.mesh, rows)

    def compile(self, key: Key) -> jax.stages.Compiled:
        """Lower and compile one program."""
        return self.lower(key).compile(_compiler_options(self.mesh, self.num_processes))

    def store(self, compiled: jax.stages.Compiled, path: Path) -> None:
        """Write an executable, and which kernels of ours it calls: those are compiled by who loads it."""
        payload, _, _ = serialize_executable.serialize(compiled)
        text = compiled.as_text() if self.mesh.devices.flat[0].platform == "cpu" else None
        write_own(path, pickle.dumps((kernels_in(text or ""), payload)))

    def load(self, key: Key, path: Path) -> jax.stages.Compiled:
        """Read an executable that `store` wrote for the same deployment. It is code: raises `ForeignFileError` where
        another user may have put it there."""
        in_tree, out_tree = self._trees(key)
        devices = list(self.mesh.devices.flat)
        kernels, payload = pickle.loads(read_own(path))
        for kernel in kernels:
            register(kernel)
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )

    def facts(self) -> dict[str, Any]:
        """All that a compiled program depends on, by name, as JSON has it."""
        device = self.mesh.devices.flat[0]
        return {
            "model": _plain(self.context.model),
            "attention": _plain(self.context.backend),
            "sample_rows": self.context.sample_rows,
            "cpu_kernels": refusal() is None,
            "sizes": _plain(self.capacity),
            "mesh": dict(self.mesh.shape),
            "processes": self.num_processes,
            "process": jax.process_index() if self.num_processes > 1 else 0,
            "dtype": jax.tree.leaves(self.param_specs)[0].dtype.name,
            "kv_cache_dtype": self.state_specs.kv.keys.dtype.name,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "device": f"{device.platform} {device.device_kind}",
            "compiler": getattr(device.client, "platform_version", ""),
            "cpu": f"{_cpu()}, {xla_threads(os.environ)} threads" if device.platform == "cpu" else "",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "python": platform.python_version(),
            "sources": _source_hash(),
            "packed": {dotted(path): weight.bits for path, weight in packed_weights(self.param_specs).items()},
        }

    def fingerprint(self) -> str:
        """A hash of the facts."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:24]

    def _packed(self, size: int) -> Any:
        spec = ArraySpec((self.capacity.num_ranks, size), np.dtype(np.int32), ("ranks", None))
        return shape_structs(self.mesh, spec)

    def _trees(self, key: Key) -> tuple[Any, Any]:
        if isinstance(key, str):
            _, *others = self._without_weights(key)
            given = self.state_specs
            out = (given, row_specs(given)) if key == READ_KEY else given
            return jax.tree.structure(((given, *others), {})), jax.tree.structure(out)
        logprobs = None if key.greedy else Logprobs(0, 0, 0)  # type: ignore[arg-type]
        prompt = Logprobs(0, 0, 0) if key.kind == "prompt_logprobs" else None  # type: ignore[arg-type]
        output = StepOutput(0, 0, logprobs, prompt)  # type: ignore[arg-type]
        arguments: Any = ((self.param_specs, self.state_specs, 0), {})
        return jax.tree.structure(arguments), jax.tree.structure((self.state_specs, output))


def program_path(folder: Path, key: Key) -> Path:
    """Where a program is kept in a folder."""
    return folder / f"{key}.xla"


def build_programs(
    builder: ProgramBuilder,
    keys: Sequence[Key],
    cache_dir: Path | None,
    *,
    behind: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[ProgramSet, int]:
    """Programs by key, and how many had to be compiled. Compiled in parallel under a progress bar on stderr, and where
    they are kept, by one process of those that need them. Where all are kept and `behind` is true, those that others
    can stand in for are loaded after this has returned. What `check` raises before a program is compiled ends it."""
    folder = None if cache_dir is None else own_folder(cache_dir / builder.fingerprint())
    paths = {key: program_path(folder, key) for key in keys} if folder is not None else {}
    if not _missing(keys, paths):
        return _load(builder, keys, paths, behind)
    with alone(folder):
        if _missing(keys, paths):
            made, compiled = _build(builder, keys, paths, check)
            return ProgramSet(made), compiled
    return _load(builder, keys, paths, behind)


def _load(
    builder: ProgramBuilder, keys: Sequence[Key], paths: Mapping[Key, Path], behind: bool
) -> tuple[ProgramSet, int]:
    first = needed_first(keys) if behind else keys
    made, compiled = _build(builder, first, paths)
    coming = [key for key in keys if isinstance(key, ProgramKey) and key not in made]
    if not coming:
        return ProgramSet(made), compiled

    def load(key: Key) -> Program:
        try:
            return builder.load(key, paths[key])
        except Exception:
            paths[key].unlink(missing_ok=True)  # the next start compiles it
            raise

    return ProgramSet(made, coming, load), compiled


def _missing(keys: Sequence[Key], paths: Mapping[Key, Path]) -> list[Key]:
    return [key for key in keys if key not in paths or not paths[key].exists()]


def _build(
    builder: ProgramBuilder, keys: Sequence[Key], paths: Mapping[Key, Path], check: Callable[[], None] = lambda: None
) -> tuple[dict[Key, Program], int]:
    missing = _missing(keys, paths)

    def make(key: Key) -> tuple[Key, jax.stages.Compiled, bool]:
        if key not in missing:
            try:
                return key, builder.load(key, paths[key]), False
            except Exception as error:  # a damaged pickle may raise anything
                logger.warning("kept program %s can't be loaded (%r): compiling it again", paths[key], error)
        check()
        compiled = builder.compile(key)
        if key in paths:
            builder.store(compiled, paths[key])
        return key, compiled, True

    order = by_cost(keys)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(_progress(pool.map(make, order), len(order), bool(missing)))
    return {key: program for key, program, _ in made}, sum(compiled for _, _, compiled in made)


def by_cost(keys: Sequence[Key]) -> list[Key]:
    """Those that take longest to compile first: no long one should be left for the end."""
    return sorted(keys, key=_cost, reverse=True)


def _cost(key: Key) -> tuple[bool, int]:
    return (False, 0) if isinstance(key, str) else (key.kind != "decode", key.size)


def _progress(items: Iterator[Any], total: int, compiling: bool) -> Iterator[Any]:
    with tqdm(items, total=total, desc="Compiling programs", unit="program", disable=not compiling) as bar:
        for made in bar:
            bar.set_postfix_str(str(made[0]))
            yield made


def _compiler_options(mesh: Mesh, num_processes: int) -> dict[str, int | bool] | None:
    """On a CPU numbers are rounded to bfloat16 wherever the program says so: what XLA leaves out where it fuses depends
    on how many rows there are. XLA prefers 256-bit vectors; of 512, where it has them, mixed steps are a tenth faster.
    On a GPU, processes would wait for each other's part of the autotuning, though one may have the program on disk."""
    if mesh.devices.flat[0].platform != "cpu" and num_processes > 1:
        return {"xla_gpu_shard_autotuning": False} if mesh.devices.flat[0].platform == "gpu" else None
    if mesh.devices.flat[0].platform == "cpu":
        width = {"xla_cpu_prefer_vector_width": 512} if "avx512f" in _cpu_features() else {}
        return {"xla_allow_excess_precision": False, **width}
    return None


def _cpu_features() -> str:
    """What XLA may have compiled for: an executable for another CPU would crash."""
    if info := host.cpu_info():
        return info
    if refusal() is not None:
        return platform.processor()
    return f"model name: {cpu_name()}\nflags: {' '.join(sorted(cpu_features()))}"


def _cpu() -> str:
    """The CPU's name, and a hash of its features."""
    features = _cpu_features()
    name = next((line.partition(":")[2].strip() for line in features.splitlines() if line.startswith("model name")), "")
    return f"{name} {hashlib.sha256(features.encode()).hexdigest()[:12]}".strip()


def _plain(value: Any) -> Any:
    """A frozen struct or dataclass as JSON has it; what JSON has nothing for, as it is printed."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _source_hash() -> str:
    """Our own sources that shape a program, and the tables that tune its kernels."""
    ours, kernels = (Path(str(package.__file__)).parent for package in (jaxserve, pallas_kernels))
    paths = [ours / name for name in ("api_types.py", "params.py", "step_plan.py")]
    for room in (ours / "layers", ours / "models", ours / "runtime", kernels):
        paths += sorted(path for path in room.rglob("*") if path.suffix in (".py", ".json"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class CompileCounter:
    """Counts the compiles jax makes from its creation on. After "ready" there must be none."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a `--dtype`; `auto` is bfloat16."""
    return np.dtype(jnp.bfloat16 if name in ("auto", "bfloat16") else np.float32)


def kv_dtype_of(name: str, dtype: np.dtype) -> np.dtype:
    """The numpy dtype of a `--kv-cache-dtype`; `auto` is `dtype`, that of activations."""
    return dtype if name == "auto" else np.dtype(jnp.float8_e4m3fn)
