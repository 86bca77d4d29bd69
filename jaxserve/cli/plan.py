"""`jaxserve plan`: shows whether a model fits a device that isn't here, its KV cache, and its highest possible speed.

It compiles nothing (with --compile, the largest programs): --model may be a folder without weights, or a config.json.
If something doesn't fit, it names the flags that would make it fit.
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
    from jaxserve.runtime.sizing.capacity_report import CapacityReport

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
    made, capacity, footprint = plan.deployment, plan.deployment.capacity, plan.deployment.sizes.footprint
    used = footprint.weights + footprint.state + plan.temp_bytes + made.sizes.pool_bytes
    memory = [
        ("weights", footprint.weights, made.weights.summary),
        ("state by slot", footprint.state, f"{capacity.num_slots} slots"),
        ("largest working memory", plan.temp_bytes, plan.temp_source),
        *_pool_rows(plan),
        ("left", plan.usable_bytes - used, f"of {plan.usable_bytes / _GIB:.2f} GiB usable"),
        ("reserved", plan.target.memory_bytes - plan.usable_bytes, "--mem-fraction-static"),
    ]
    rows = [(name, f"{size / _GIB:.2f}", note) for name, size, note in memory]
    peak = plan.limits.peak_flops
    parts = [
        f"{made.config.model} in {made.dtype.name} on {plan.num_devices} x {plan.target.name}{_ranks(plan)} "
        f"({plan.target.memory_bytes / _GIB:.1f} GiB, {plan.target.memory_bandwidth / 1e12:.2f} TB/s, "
        f"{'no figure for' if peak is None else f'{peak / 1e12:.0f} TFLOP/s in'} {made.dtype.name}, each)",
        format_table(("memory of a device", "GiB", ""), rows, left=(0, 2)),
        *([f"not quantized: {made.weights.reasons}"] if made.weights.summary and made.weights.others else []),
        f"KV cache on each device, a token: {_token_sizes(plan)}\n"
        f"largest context: {capacity.max_model_len:,} tokens\n"
        f"largest batch: {plan.num_slots} requests; "
        + ", ".join(f"{plan.max_requests(context)} of {context:,} tokens" for context in plan.contexts),
        "decode, tokens a second at best (rows: batch, columns: context)\n" + _decode_table(plan),
        "prefill, tokens a second at best: " + _prefill_line(plan),
    ]
    if plan.predictions:
        parts.append("tokens a second as predicted from the compiled programs: " + _predicted_line(plan))
    parts += [f"doesn't fit: {one.problem}\n  would fit with: {' or '.join(one.fixes)}" for one in plan.shortfalls]
    return "\n\n".join(parts)


def _pool_rows(plan: CapacityReport) -> list[tuple[str, int, str]]:
    page = plan.deployment.capacity.page_size
    return [
        (f"KV pool{_of_layers(spec)}", pages * page * size, f"{pages * page:,} tokens in {pages:,} pages of {page}")
        for spec, pages, size in plan.kv_groups
        if spec.num_layers
    ]


def _token_sizes(plan: CapacityReport) -> str:
    return ", ".join(f"{size / 1024:.1f} KiB{_of_layers(spec)}" for spec, _, size in plan.kv_groups if spec.num_layers)


def _of_layers(spec: KVSpec) -> str:
    layers = f" of {spec.num_layers} layer{'' if spec.num_layers == 1 else 's'}"
    return layers if spec.window is None else f"{layers} with a window of {spec.window:,}"


def _ranks(plan: CapacityReport) -> str:
    data, tensor, replicas = plan.deployment.data, plan.deployment.tensor, plan.deployment.replicas
    if replicas > 1:
        return f", {replicas} replicas x tensor parallel {tensor}"
    mesh = f", data parallel {data} x tensor parallel {tensor}" if data > 1 else ""
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
        f"{plan.predicted_rate(key):,.0f} by {key} ({one.seconds * 1e3:.2f} ms)"
        for key, one in plan.predictions.items()
    )


def as_json(plan: CapacityReport) -> dict[str, Any]:
    """Return the plan as JSON; sizes in bytes are per device."""
    made, footprint = plan.deployment, plan.deployment.sizes.footprint
    return {
        "model": made.config.model,
        "target": plan.target.name,
        "devices": plan.num_devices,
        "tp_size": made.tensor,
        "dp_size": made.num_ranks,
        "ep_size": made.divided.expert_parts,
        "dp_mode": made.config.dp_mode,
        "dtype": made.dtype.name,
        "kv_cache_dtype": made.state.kv[0].keys.dtype.name,
        "attention_backend": made.backend.name,
        "memory_bytes": plan.target.memory_bytes,
        "usable_bytes": plan.usable_bytes,
        "quantization": made.weights.method,
        "not_quantized": {dotted(path): reason for path, reason in made.weights.others.items()},
        "weight_bytes": footprint.weights,
        "state_bytes": footprint.state,
        "temp_bytes": plan.temp_bytes,
        "temp_source": plan.temp_source,
        "kv_bytes_per_token": sum(footprint.kv_per_token),
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
            for spec, pages, size in plan.kv_groups
        ],
        "context_length": made.capacity.max_model_len,
        "max_running_requests": plan.num_slots,
        "decode_tokens_per_second": [
            {"batch": batch, "context": context, "limit": limit}
            for batch in plan.batches
            for context in plan.contexts
            if (limit := plan.decode_limit(batch, context)) is not None
        ],
        "prefill_tokens_per_second": [
            {"length": context, "limit": plan.prefill_limit(context)} for context in plan.contexts
        ],
        "predicted_tokens_per_second": [
            {"program": str(key), "seconds": one.seconds, "rate": plan.predicted_rate(key)}
            for key, one in plan.predictions.items()
        ],
        "misfits": [{"what": one.problem, "fixes": one.fixes} for one in plan.shortfalls],
    }
