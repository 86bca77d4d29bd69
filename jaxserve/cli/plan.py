"""`jaxserve plan`: shows whether a model fits a device that isn't here, its KV cache, and its highest possible speed.

It compiles nothing (with --compile, the largest programs): --model may be a folder without weights, or a config.json.
If something doesn't fit, it names the flags that would make it fit. With --pp-size, it says what each stage holds.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.cli.compile import add_target, required_target
from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.params import dotted

if TYPE_CHECKING:
    from jaxserve.params import KVSpec
    from jaxserve.runtime.sizing.capacity_report import CapacityReport, StageReport

_GIB = 2**30


def parser() -> Parser:
    """Return the parser of `jaxserve plan`."""
    parser = Parser(prog="jaxserve plan", description=__doc__)
    add_target(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile the largest programs: their working memory and likely speed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    flags.add_model(parser)
    flags.add_settings(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command. A model that can't be served at all is an error; limits lowered to fit are reported."""
    arguments = parser().parse(argv)
    loaded = flags.config_from_arguments(arguments)
    flags.llm_arguments(loaded)
    name = required_target(arguments.target)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jaxserve.runtime.sizing.capacity_report import report_capacity

    plan = report_capacity(resolve_dp_mode(loaded.engine), name, ask_compiler=arguments.compile)
    print(json.dumps(as_json(plan), indent=2) if arguments.json else as_text(plan))
    return 0


def as_text(plan: CapacityReport) -> str:
    """Return the plan as text."""
    made, capacity = plan.deployment, plan.deployment.capacity
    peak, decodes = plan.target.peak_flops.get(made.dtype.name), made.model.config.generates
    parts = [
        f"{made.config.model} in {made.dtype.name} on {plan.num_devices} x {plan.target.name}{_ranks(plan)} "
        f"({plan.target.memory_bytes / _GIB:.1f} GiB, {plan.target.memory_bandwidth / 1e12:.2f} TB/s, "
        f"{'no figure for' if peak is None else f'{peak / 1e12:.0f} TFLOP/s in'} {made.dtype.name}, each)",
        _stage_table(plan) if made.stages else _memory_table(plan),
        *([f"not quantized: {made.weights.reasons}"] if made.weights.summary and made.weights.others else []),
        ("" if capacity.encodes else f"KV cache on each device, a token: {_token_sizes(plan)}\n")
        + f"largest context: {capacity.max_model_len:,} tokens\n"
        f"largest batch: {plan.num_slots} requests; "
        + ", ".join(f"{plan.max_requests(context)} of {context:,} tokens" for context in plan.contexts),
        *(
            ["decode, tokens a second at best (rows: batch, columns: context)\n" + _decode_table(plan)]
            if decodes
            else []
        ),
        *([_step_line(plan)] if made.stages and decodes else []),
        "prefill, tokens a second at best: " + _prefill_line(plan),
    ]
    if plan.predictions:
        parts.append("tokens a second as predicted from the compiled programs: " + _predicted_line(plan))
    parts += [f"doesn't fit: {one.problem}\n  would fit with: {' or '.join(one.fixes)}" for one in plan.shortfalls]
    return "\n\n".join(parts)


def _memory_table(plan: CapacityReport) -> str:
    """Return what a device holds, a row for each kind."""
    made, [whole] = plan.deployment, plan.stages
    memory = [
        ("weights", whole.weights, made.weights.summary),
        *(
            []
            if made.capacity.encodes
            else [("state by slot", whole.state - whole.states, f"{made.capacity.num_slots} slots")]
        ),
        *([("states of sequences", whole.states, _states(plan))] if whole.states else []),
        ("largest working memory", whole.temp, plan.temp_source),
        *_pool_rows(plan),
        ("left", whole.left, f"of {plan.usable_bytes / _GIB:.2f} GiB usable"),
        ("reserved", plan.target.memory_bytes - plan.usable_bytes, _reserved_by(plan)),
    ]
    rows = [(name, f"{size / _GIB:.2f}", note) for name, size, note in memory]
    return format_table(("memory of a device", "GiB", ""), rows, left=(0, 2))


def _reserved_by(plan: CapacityReport) -> str:
    """Return the flag that says how much of a device's memory is left to others."""
    by_bytes = plan.deployment.config.kv_cache_memory_bytes is not None
    return "--kv-cache-memory-bytes" if by_bytes else "--mem-fraction-static"


def _stage_table(plan: CapacityReport) -> str:
    """Return what a device of each stage holds, a row for each stage, and what is said of all."""
    rows = [
        (str(number), *_ends(stage), *(f"{size / _GIB:.2f}" for size in _sizes(stage)))
        for number, stage in enumerate(plan.stages)
    ]
    header = ("stage", "layers", "devices", "weights", "state", "working memory", "KV pool", "left")
    capacity, weights = plan.deployment.capacity, plan.deployment.weights.summary
    pools = [
        f"{pages * capacity.page_size:,} tokens in {pages:,} pages{_with_window(spec)}"
        for spec, pages, _ in plan.fullest.kv_groups
    ]
    notes = [
        *([f"weights: {weights}"] if weights else []),
        f"state: {capacity.num_slots} slots" + (f", {_states(plan)}" if capacity.num_states else ""),
        f"working memory: {plan.temp_source}",
        f"KV pool: {', '.join(pools)}",
        f"usable: {plan.usable_bytes / _GIB:.2f} GiB by {_reserved_by(plan)}",
    ]
    return f"memory of a device of each stage, GiB\n{format_table(header, rows)}\n{'; '.join(notes)}"


def _ends(stage: StageReport) -> tuple[str, str]:
    """Return the first and the last of its layers, and of its devices."""
    layers, devices = (
        f"{ends[0]}" if len(ends) == 1 else f"{ends[0]}-{ends[-1]}" for ends in (stage.layers, stage.devices)
    )
    return layers, devices


def _sizes(stage: StageReport) -> tuple[int, ...]:
    return stage.weights, stage.state, stage.temp, stage.pool, stage.left


def _states(plan: CapacityReport) -> str:
    """Return how many states of sequences there are, and what one takes."""
    made, whole = plan.deployment, plan.fullest.deployment
    running, states = made.capacity.num_slots, made.capacity.num_states
    one = whole.sizes.state_bytes / 2**20
    return f"{states} of {one:.2f} MiB: {running} of requests, {states - running} more for cached prefixes"


def _pool_rows(plan: CapacityReport) -> list[tuple[str, int, str]]:
    page = plan.deployment.capacity.page_size
    return [
        (f"KV pool{_of_layers(spec)}", pages * page * size, f"{pages * page:,} tokens in {pages:,} pages of {page}")
        for spec, pages, size in plan.fullest.kv_groups
        if spec.num_layers
    ]


def _token_sizes(plan: CapacityReport) -> str:
    return "; ".join(
        ", ".join(f"{size / 1024:.1f} KiB{_of_layers(spec)}" for spec, _, size in stage.kv_groups if spec.num_layers)
        + (f" in stage {number}" if plan.deployment.stages else "")
        for number, stage in enumerate(plan.stages)
    )


def _of_layers(spec: KVSpec) -> str:
    layers = f" of {spec.num_layers} layer{'' if spec.num_layers == 1 else 's'}"
    return f"{layers}{_with_window(spec)}"


def _with_window(spec: KVSpec) -> str:
    return "" if spec.window is None else f" with a window of {spec.window:,}"


def _ranks(plan: CapacityReport) -> str:
    data, tensor, replicas = plan.deployment.data, plan.deployment.tensor, plan.deployment.replicas
    stages = f"{plan.deployment.divided.stages} stages x " if plan.deployment.stages else ""
    if replicas > 1:
        return f", {replicas} replicas x {stages}tensor parallel {tensor}"
    ranks = f"data parallel {data} x " if data > 1 else ""
    mesh = f", {stages}{ranks}tensor parallel {tensor}" if stages or ranks else ""
    experts, parts = plan.deployment.model.config.num_experts, plan.deployment.divided.expert_parts
    return f"{mesh}, {experts // parts} of {experts} experts on a device" if parts > 1 else mesh


def _decode_table(plan: CapacityReport) -> str:
    rows = []
    for batch in plan.batches:
        limits = (plan.decode_limit(batch, context) for context in plan.contexts)
        rows.append((f"{batch}", *("-" if limit is None else f"{limit:,.0f}" for limit in limits)))
    return format_table(("", *(f"{context:,}" for context in plan.contexts)), rows, left=())


def _prefill_line(plan: CapacityReport) -> str:
    found = [(context, plan.prefill_limit(context)) for context in plan.contexts]
    known = [f"{limit:,.0f} for prompts of {context:,}" for context, limit in found if limit is not None]
    return ", ".join(known) or f"the peak rate of {plan.deployment.dtype.name} on this device is unknown"


def _predicted_line(plan: CapacityReport) -> str:
    return ", ".join(
        f"{plan.predicted_rate(name):,.0f} by {name} ({one.seconds * 1e3:.2f} ms)"
        for name, one in plan.predictions.items()
    )


def _step_line(plan: CapacityReport) -> str:
    context = plan.contexts[0]
    steps = (
        f"{plan.step_seconds(batch, context) * 1e3:.1f} ms with {batch}"
        for batch in plan.batches
        if batch <= plan.max_requests(context)
    )
    return (
        f"a decode step computes 1 of {plan.deployment.divided.stages} parts of the batch; through all stages it takes "
        f"at best, by the size of the batch, with requests of {context:,} tokens: {', '.join(steps)}"
    )


def as_json(plan: CapacityReport) -> dict[str, Any]:
    """Return the plan as JSON; sizes in bytes are per device, of the fullest stage if there are several."""
    made, fullest = plan.deployment, plan.fullest
    return {
        "model": made.config.model,
        "target": plan.target.name,
        "devices": plan.num_devices,
        "tp_size": made.tensor,
        "pp_size": made.divided.stages,
        "dp_size": made.num_ranks,
        "ep_size": made.divided.expert_parts,
        "dp_mode": made.config.dp_mode,
        "dtype": made.dtype.name,
        "kv_cache_dtype": made.state.kv[0].keys.dtype.name if made.state.kv else None,
        "attention_backend": made.backend.name,
        "memory_bytes": plan.target.memory_bytes,
        "usable_bytes": plan.usable_bytes,
        "quantization": made.weights.method,
        "not_quantized": {dotted(path): reason for path, reason in made.weights.others.items()},
        "stages": [
            {
                "layers": [stage.layers[0], stage.layers[-1]],
                "devices": [*stage.devices],
                "weight_bytes": stage.weights,
                "state_bytes": stage.state,
                "temp_bytes": stage.temp,
                "kv_bytes_per_token": sum(size for *_, size in stage.kv_groups),
                "pool_bytes": stage.pool,
                "left_bytes": stage.left,
            }
            for stage in plan.stages
        ],
        "weight_bytes": fullest.weights,
        "state_bytes": fullest.state,
        "num_states": made.num_ranks * made.capacity.num_states,
        "bytes_per_state": fullest.deployment.sizes.state_bytes,
        "temp_bytes": fullest.temp,
        "temp_source": plan.temp_source,
        "kv_bytes_per_token": sum(size for *_, size in fullest.kv_groups),
        "max_total_num_tokens": plan.pool_tokens,
        "num_pages": made.num_ranks * made.capacity.num_pages,
        "kv_groups": [
            {
                "layers": spec.num_layers,
                "kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "window": spec.window,
                "num_pages": made.num_ranks * pages,
                "tokens": made.num_ranks * pages * made.capacity.page_size,
                "bytes_per_token": size,
            }
            for spec, pages, size in fullest.kv_groups
        ],
        "context_length": made.capacity.max_model_len,
        "max_running_requests": plan.num_slots,
        "decode_tokens_per_second": [
            {
                "batch": batch,
                "context": context,
                "limit": limit,
                "step_seconds": plan.step_seconds(batch, context),
            }
            for batch in (plan.batches if made.model.config.generates else ())
            for context in plan.contexts
            if (limit := plan.decode_limit(batch, context)) is not None
        ],
        "prefill_tokens_per_second": [
            {"length": context, "limit": plan.prefill_limit(context)} for context in plan.contexts
        ],
        "predicted_tokens_per_second": [
            {"program": name, "seconds": one.seconds, "rate": plan.predicted_rate(name)}
            for name, one in plan.predictions.items()
        ],
        "misfits": [{"what": one.problem, "fixes": one.fixes} for one in plan.shortfalls],
    }
