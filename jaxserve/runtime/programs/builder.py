"""Lowers, compiles, stores and loads the programs of a deployment.

The set of programs is closed: each is compiled ahead of time and called by its key, and nothing else is ever called.
Weights and state are passed as tuples of their leaves: with 200 of them, to flatten dataclasses costs a call 30 us.
`program_cache` decides which of them to load and which to compile.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxserve.params import dotted
from jaxserve.quant import held_weights
from jaxserve.runtime.devices.mesh import GPU, platform_of, shape_structs
from jaxserve.runtime.programs.fingerprint import as_json, cpu_fact, cpu_flags, source_hash
from jaxserve.runtime.programs.own_files import read_trusted, write_private
from jaxserve.runtime.programs.program_set import ProgramKey
from jaxserve.runtime.speculation.draft_model import DraftKey
from jaxserve.runtime.step.batch import StepKey, step_packing, step_shape
from jaxserve.runtime.step.draft import draft_packing, make_draft
from jaxserve.runtime.step.draw import DrawKey, DrawOutput, draw_packing, make_draw
from jaxserve.runtime.step.kv_scales import make_kv_scales, num_tokens, scales_packing
from jaxserve.runtime.step.page_copies import make_read_pages, make_write_pages, row_specs
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.slot_update import (
    ADJUST,
    READ_PROMPTS,
    adjust,
    make_read_prompts,
    make_update,
    update,
    update_packing,
)
from jaxserve.runtime.step.state import ArraySpec, DeviceState
from jaxserve.runtime.step.step import StepContext, StepOutput, make_step
from jaxserve.step_plan import Capacity
from pallas_kernels.cpu import kernels_in, refusal, register

UPDATE_KEY, ADJUST_KEY, READ_PROMPTS_KEY, KV_SCALES_KEY = "update", "adjust", "read_prompts", "kv_scales"
_READ, _WRITE = "read_pages_", "write_pages_"


def read_key(group: int) -> str:
    """Return the key of the program that reads pages of a KV group."""
    return f"{_READ}{group}"


def write_key(group: int) -> str:
    """Return the key of the program that writes pages of a KV group."""
    return f"{_WRITE}{group}"


def copied_group(key: str) -> int:
    """Return the KV group of a program that copies pages."""
    return int(key.rpartition("_")[2])


def step_keys(capacity: Capacity) -> list[StepKey]:
    """Return the key of every step program. Mixed steps always have the sampler; it is skipped if no row needs it."""
    keys = [StepKey("decode", size, greedy) for size in capacity.decode_buckets for greedy in (True, False)]
    keys += [StepKey("verify", size, False) for size in capacity.verify_buckets]
    keys += [StepKey("mixed", size, False) for size in capacity.token_buckets]
    keys.append(StepKey("prompt_logprobs", capacity.prompt_logprob_tokens, False))
    return keys


class ProgramBuilder:
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
        self.context = context
        self.capacity = capacity
        self.mesh = mesh
        self.param_specs = param_specs
        self.state_specs = state_specs
        self.num_processes = num_processes
        self._added_options: Mapping[str, str] = {}

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace one program, which is donated the state."""
        # Kernels read from the current mesh which device they are lowered for: it need not be attached.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self._lower(key)

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        state = shape_structs(self.mesh, self.state_specs)
        if not _takes_weights(key):
            function, *arguments = self._without_weights(str(key))
            return jax.jit(_over_leaves(function, state), donate_argnums=0).lower(leaves_of(state), *arguments)
        function, packed = self._with_weights(key)
        params = shape_structs(self.mesh, self.param_specs)
        over_leaves = _over_leaves(function, params, state)
        return jax.jit(over_leaves, donate_argnums=1).lower(leaves_of(params), leaves_of(state), packed)

    def _with_weights(self, key: ProgramKey) -> tuple[Callable[..., Any], Any]:
        """Return the function of a program that takes weights and state, and its argument after them."""
        specs = self.mesh, self.param_specs, self.state_specs
        if isinstance(key, str):
            size = scales_packing(num_tokens(self.capacity)).size
            return make_kv_scales(self.context, self.capacity, *specs), self._packed(size)
        if isinstance(key, DrawKey):
            draw = make_draw(self.context, key, *specs, replicate_output=self.num_processes > 1)
            return draw, self._packed(draw_packing(key, self.context.model.padded_vocab_size).size)
        if isinstance(key, DraftKey):
            return make_draft(self.context, key, self.capacity, *specs), self._packed(
                draft_packing(key, self.capacity).size
            )
        shape = step_shape(key, self.capacity)
        function = make_step(self.context, shape, *specs, replicate_output=self.num_processes > 1)
        return function, self._packed(step_packing(shape).size)

    def _without_weights(self, key: str) -> tuple[Any, ...]:
        """Return the function of a program that takes no weights, and its arguments after the state."""
        if key == UPDATE_KEY:
            size = update_packing(len(self.capacity.pages_by_group)).size
            return make_update(update, self.mesh, self.state_specs), self._packed(size)
        if key == ADJUST_KEY:
            return make_update(adjust, self.mesh, self.state_specs), self._packed(ADJUST.size)
        if key == READ_PROMPTS_KEY:
            assert self.context.drafter is not None
            read_prompts = make_read_prompts(self.context.drafter)
            return make_update(read_prompts, self.mesh, self.state_specs), self._packed(READ_PROMPTS.size)
        group = copied_group(key)
        rows = row_specs(self.state_specs, group)
        pages = self._packed(rows[0].shape[1])
        if key == read_key(group):
            return make_read_pages(self.mesh, self.state_specs, group), pages
        assert key == write_key(group), key
        return make_write_pages(self.mesh, self.state_specs, group), pages, shape_structs(self.mesh, rows)

    def compile(self, key: ProgramKey, dump: Path | None = None) -> jax.stages.Compiled:
        """Lower and compile one program. XLA writes its thunks to the folder `dump`.

        The path of the folder becomes part of the program, so don't store one that was dumped.
        """
        options = {**compiler_options(self.mesh, self.num_processes), **self._added_options}
        if dump is not None:
            options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        return self.lower(key).compile(options)

    def with_options(self, options: Mapping[str, str]) -> ProgramBuilder:
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
        in_tree, out_tree = self._trees(key)
        devices = list(self.mesh.devices.flat)
        kernels, payload = pickle.loads(read_trusted(path))
        for kernel, code in kernels:
            register(kernel, code)
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )

    def facts(self) -> dict[str, Any]:
        """Return all that a compiled program depends on, by name, in JSON types."""
        device = self.mesh.devices.flat[0]
        return {
            "model": as_json(self.context.model),
            "attention": as_json(self.context.backend),
            "sample_rows": self.context.sample_rows,
            "speculation": as_json(self.context.drafter),
            "cpu_kernels": device.platform == "cpu" and refusal() is None,
            "sizes": as_json(self.capacity),
            "mesh": dict(self.mesh.shape),
            "processes": self.num_processes,
            "process": jax.process_index() if self.num_processes > 1 else 0,
            "dtype": jax.tree.leaves(self.param_specs)[0].dtype.name,
            "kv_cache_dtype": self.state_specs.kv[0].keys.dtype.name,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "device": f"{device.platform} {device.device_kind}",
            "compiler": getattr(device.client, "platform_version", ""),
            "cpu": cpu_fact() if device.platform == "cpu" else "",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "sources": source_hash(),
            "weights": {dotted(path): weight.form for path, weight in held_weights(self.param_specs).items()},
        }

    def fingerprint(self) -> str:
        """Return a hash of the facts."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:24]

    def _packed(self, size: int) -> Any:
        spec = ArraySpec((self.capacity.num_ranks, size), np.dtype(np.int32), ("ranks", None))
        return shape_structs(self.mesh, spec)

    def _trees(self, key: ProgramKey) -> tuple[Any, Any]:
        given = self.state_specs
        if not _takes_weights(key):
            key = str(key)
            _, *others = self._without_weights(key)
            out = (given, row_specs(given, copied_group(key))) if key.startswith(_READ) else given
            return jax.tree.structure(((leaves_of(given), *others), {})), jax.tree.structure(_state_as_leaves(out))
        output: Any = DrawOutput(0, Logprobs(0, 0, 0)) if isinstance(key, DrawKey) else ()  # type: ignore[arg-type]
        if isinstance(key, StepKey):
            logprobs = None if key.greedy else Logprobs(0, 0, 0)  # type: ignore[arg-type]
            prompt = Logprobs(0, 0, 0) if key.kind == "prompt_logprobs" else None  # type: ignore[arg-type]
            experts = None if given.expert_tokens is None else 0
            output = StepOutput(0, 0, logprobs, prompt, experts)  # type: ignore[arg-type]
        arguments: Any = ((leaves_of(self.param_specs), leaves_of(given), 0), {})
        return jax.tree.structure(arguments), jax.tree.structure(_state_as_leaves((given, output)))


def _takes_weights(key: ProgramKey) -> bool:
    return not isinstance(key, str) or key == KV_SCALES_KEY


def leaves_of(tree: Any) -> tuple[Any, ...]:
    """Return the leaves of weights or state, in the form that programs take."""
    return tuple(jax.tree.leaves(tree))


def _over_leaves(function: Callable[..., Any], *trees: Any) -> Callable[..., Any]:
    """Return the function over leaves of its first arguments, which are like `trees`, and of the state it returns."""
    structures = [jax.tree.structure(tree) for tree in trees]

    @functools.wraps(function)
    def over_leaves(*arguments: Any) -> Any:
        given = map(jax.tree.unflatten, structures, arguments)
        return _state_as_leaves(function(*given, *arguments[len(structures) :]))

    return over_leaves


def _state_as_leaves(result: Any) -> Any:
    """Replace the state by its leaves in a result, which is the state or a pair of it and something else."""
    return leaves_of(result) if isinstance(result, DeviceState) else (leaves_of(result[0]), result[1])


def program_path(folder: Path, key: ProgramKey) -> Path:
    """Return the path of a program in the folder it is kept in."""
    return folder / f"{key}.xla"


def by_compile_cost(keys: Sequence[ProgramKey]) -> list[ProgramKey]:
    """Sort programs by compile time, longest first, so that no long one is left for the end."""
    return sorted(keys, key=_cost, reverse=True)


def _cost(key: ProgramKey) -> tuple[bool, int]:
    if isinstance(key, str):
        return (key == KV_SCALES_KEY, 0)
    return (not isinstance(key, DrawKey) and key.kind not in ("decode", "draft"), key.size)


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
        # Products by cuBLASLt: it adds the residual stream as it writes, and needs no minutes of tuning.
        "xla_gpu_enable_triton_gemm": False,
    }
    if num_processes > 1:
        # Processes that share the autotuning wait for each other, but one that finds the program on disk never joins.
        options["xla_gpu_shard_autotuning"] = False
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}
