"""Lowers, compiles, stores and loads the programs of a deployment.

The set of programs is closed: each is compiled ahead of time and called by its key, and nothing else is ever called.
Weights and state are passed as tuples of their leaves: flattening dataclasses with 200 leaves takes 30 us in each call.
`program_cache` decides which programs to load and which to compile.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, PartitionSpec

from jaxserve.params import dotted
from jaxserve.quant import held_weights
from jaxserve.runtime.devices.mesh import GPU, partitions, platform_of, shape_structs
from jaxserve.runtime.programs.fingerprint import as_json, cpu_fact, cpu_flags, source_hash
from jaxserve.runtime.programs.own_files import read_trusted, write_private
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step.handoff import Feedback, Handoff
from jaxserve.runtime.step.program import ProgramKey, Shapes, StepContext
from jaxserve.runtime.step.state import ArraySpec, DeviceState, all_ranks, one_rank
from jaxserve.step_plan import Capacity
from pallas_kernels.cpu import kernels_in, refusal, register


class MeshProgramBuilder(abc.ABC):
    """Lowers, compiles, stores and loads the programs of a mesh; it is made for each kind of function and arguments."""

    def __init__(self, mesh: Mesh, capacity: Capacity, num_processes: int) -> None:
        self.mesh = mesh
        self.capacity = capacity
        self.num_processes = num_processes
        self._added_options: Mapping[str, str] = {}

    @abc.abstractmethod
    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace one program."""

    @abc.abstractmethod
    def trees(self, key: ProgramKey) -> tuple[Any, Any]:
        """Return the tree structures of a program's arguments, as a pair of positional ones and {}, and its output."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return all that a compiled program depends on, by name, in JSON types."""

    def compile(self, key: ProgramKey, dump: Path | None = None) -> jax.stages.Compiled:
        """Lower and compile one program. XLA writes its thunks to the folder `dump`.

        The path of the folder becomes part of the program, so don't store one that was dumped.
        """
        options = {**compiler_options(self.mesh, self.num_processes), **self._added_options}
        if dump is not None:
            options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        return self.lower(key).compile(options)

    def with_options(self, options: Mapping[str, str]) -> Self:
        """Return a builder of the same programs that adds compile options of XLA; they are not among the facts."""
        builder = copy.copy(self)
        builder._added_options = {**self._added_options, **options}
        return builder

    def store(self, compiled: jax.stages.Compiled, path: Path) -> None:
        """Write an executable, and the code of our own CPU kernels that it calls."""
        payload, _, _ = serialize_executable.serialize(compiled)
        text = compiled.as_text() if self.mesh.devices.flat[0].platform == "cpu" else None
        write_private(path, pickle.dumps((kernels_in(text or ""), payload)))

    def load(self, key: ProgramKey, path: Path) -> jax.stages.Compiled:
        """Load an executable that `store` wrote for the same deployment.

        Raises `UntrustedFileError` if another user may have written the file: it is code.
        """
        in_tree, out_tree = self.trees(key)
        devices = list(self.mesh.devices.flat)
        kernels, payload = pickle.loads(read_trusted(path))
        for kernel, code in kernels:
            register(kernel, code)
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )

    def environment_facts(self) -> dict[str, Any]:
        """Return the facts of the devices, of the versions and of this process."""
        device = self.mesh.devices.flat[0]
        return {
            "mesh": dict(self.mesh.shape),
            "devices": [device.id for device in self.mesh.devices.flat],
            "processes": self.num_processes,
            "process": jax.process_index() if self.num_processes > 1 else 0,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "device": f"{device.platform} {device.device_kind}",
            "compiler": getattr(device.client, "platform_version", ""),
            "cpu": cpu_fact() if device.platform == "cpu" else "",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "sources": source_hash(),
        }

    def fingerprint(self) -> str:
        """Return a hash of the facts."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:24]


class ProgramBuilder(MeshProgramBuilder):
    """Makes the programs of one deployment, from the shapes of its arrays alone."""

    def __init__(
        self,
        context: StepContext,
        capacity: Capacity,
        mesh: Mesh,
        param_specs: Any,
        state_specs: DeviceState,
        num_processes: int = 1,
    ) -> None:
        super().__init__(mesh, capacity, num_processes)
        self.context = context
        self.param_specs = param_specs
        self.state_specs = state_specs
        self.shapes = Shapes(context, capacity, state_specs)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace one program `(weights, state, packed, *rows) -> (state, output)`, which is donated the state."""
        given = shape_structs(self.mesh, self._inputs(key))
        structures = [jax.tree.structure(tree) for tree in given[:2]]
        over_mesh = self._over_mesh(key)

        def over_leaves(params: Any, state: Any, *more: Any) -> tuple[tuple[Any, ...], Any]:
            new_state, output = over_mesh(*map(jax.tree.unflatten, structures, (params, state)), *more)
            return leaves_of(new_state), output

        # Profiles and the compiled text show this name.
        over_leaves.__name__ = str(key).replace("-", "_")
        # Kernels read from the current mesh which device they are lowered for: it need not be attached.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.jit(over_leaves, donate_argnums=1).lower(*map(leaves_of, given[:2]), *given[2:])

    def _inputs(self, key: ProgramKey) -> tuple[Any, ...]:
        """Return the specs of the arguments of a program: weights, state, packed input and more rows."""
        kind, size = KINDS[key.kind], KINDS[key.kind].packing(self.capacity, key).size
        packed = ArraySpec((self.capacity.num_ranks, size), np.dtype(np.int32), ("ranks", None))
        params = self.param_specs if kind.takes_weights else ()
        return params, self.state_specs, packed, *kind.rows(self.shapes, key)

    def _over_mesh(self, key: ProgramKey) -> Callable[..., tuple[DeviceState, Any]]:
        """Return the function of a program over global arrays. Inside, code sees one shard of one rank.

        With several processes, every device holds the output of all ranks, as a process can't read another's devices.
        """
        kind = KINDS[key.kind]
        run, output_parts = kind.make(self.context, self.capacity, key), kind.output(self.shapes, key)
        gathers = self.num_processes > 1 and not kind.stays_divided

        def body(params: Any, state: DeviceState, *more: Any) -> tuple[DeviceState, Any]:
            new_state, output = map(all_ranks, run(params, one_rank(state), *map(one_rank, more)))
            gathered = jax.tree.map(_gathered, output, output_parts, is_leaf=_stays_divided)
            return new_state, gathered if gathers else output

        whole = jax.tree.map(
            lambda parts: parts if _stays_divided(parts) else PartitionSpec(),
            output_parts,
            is_leaf=lambda x: _stays_divided(x) or isinstance(x, PartitionSpec),
        )
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=partitions(self._inputs(key)),
            out_specs=(partitions(self.state_specs), whole if gathers else output_parts),
            check_vma=False,
        )

    def trees(self, key: ProgramKey) -> tuple[Any, Any]:
        params, state, *more = self._inputs(key)
        given = leaves_of(params), leaves_of(state), *more
        output = KINDS[key.kind].output(self.shapes, key)
        return jax.tree.structure((given, {})), jax.tree.structure((leaves_of(state), output))

    def facts(self) -> dict[str, Any]:
        platform = platform_of(self.mesh)
        return {
            **self.environment_facts(),
            "model": as_json(self.context.model),
            "attention": as_json(self.context.backend),
            "sample_rows": self.context.sample_rows,
            "speculation": as_json(self.context.drafter),
            "cpu_kernels": platform == "cpu" and refusal() is None,
            "sizes": as_json(self.capacity),
            "dtype": jax.tree.leaves(self.param_specs)[0].dtype.name,
            "kv_cache_dtype": self.state_specs.kv[0].keys.dtype.name if self.state_specs.kv else "none",
            "weights": {dotted(path): weight.form for path, weight in held_weights(self.param_specs).items()},
        }


def leaves_of(tree: Any) -> tuple[Any, ...]:
    """Return the leaves of weights or state, in the form that programs take."""
    return tuple(jax.tree.leaves(tree))


def _stays_divided(output: Any) -> bool:
    """Return whether a part of an output goes to the devices of another pipeline stage, and to no host."""
    return isinstance(output, Handoff | Feedback)


def _gathered(x: Any, parts: Any) -> Any:
    """Return the whole array of which `x` is this shard's part."""
    if _stays_divided(x):
        return x
    for axis, names in enumerate(parts):
        if names is not None and lax.axis_size(names) > 1:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def program_path(folder: Path, key: ProgramKey) -> Path:
    """Return the path of a program in the folder it is kept in."""
    return folder / f"{key}.xla"


def by_compile_cost(keys: Sequence[ProgramKey]) -> list[ProgramKey]:
    """Sort programs by compile time, longest first, so that no long one is left for the end."""
    long = {kind.name for kind in KINDS.values() if kind.compiles_long}
    return sorted(keys, key=lambda key: (key.kind in long, key.size), reverse=True)


def compiler_options(mesh: Mesh, num_processes: int) -> dict[str, Any]:
    """Return XLA's options for the programs of a mesh. `XLA_FLAGS` of the environment win over those for a GPU."""
    if platform_of(mesh) == "cpu":
        # With excess precision, XLA skips roundings to bfloat16 where it fuses, and what it fuses depends on the number
        # of rows. It prefers 256-bit vectors; with 512-bit ones mixed steps are a tenth faster.
        width = {"xla_cpu_prefer_vector_width": 512} if "avx512f" in cpu_flags() else {}
        return {"xla_allow_excess_precision": False, **width}
    if platform_of(mesh) not in GPU:
        return {}
    options: dict[str, Any] = {
        # XLA counts the donated pool twice, takes memory to be full, and computes products and gathers again.
        "xla_disable_hlo_passes": "rematerialization",
        # cuBLASLt computes products: it adds the residual stream as it writes, and needs no minutes of tuning.
        "xla_gpu_enable_triton_gemm": False,
    }
    if num_processes > 1:
        # Processes that share the autotuning wait for each other, but one that finds the program on disk never joins.
        options["xla_gpu_shard_autotuning"] = False
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}
