"""The seconds that a step should take on this device: the one place where figures get their prediction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from device_sections.machine import COPY, MATMUL
from device_sections.run import SectionRun
from jaxserve.runtime.programs.cost import ProgramCost
from jaxserve.runtime.sizing import prediction
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.sizing.roofline import Roofline, roofline


def limits(run: SectionRun, made: Deployment) -> Roofline | None:
    """Return the roofline of the bandwidth and matmul rate that were measured on this device; None without them."""
    copy, matmul = run.found(COPY), run.found(MATMUL)
    if copy is None or matmul is None:
        return None
    measured: Any = SimpleNamespace(memory_bandwidth=copy * 1e9, peak_flops={made.dtype.name: matmul * 1e12})
    return roofline(made, measured)


def step_seconds(
    run: SectionRun,
    made: Deployment,
    *,
    decodes: int,
    context: int,
    prompt: int = 0,
    cost: ProgramCost | None = None,
) -> float | None:
    """Return the seconds of a step in which `decodes` requests of `context` tokens decode and `prompt` tokens of
    another prompt are computed; None if the device's rates weren't measured.

    They follow from the bytes and launches of its program if its `cost` is given, else from the roofline.
    """
    limit = limits(run, made)
    if limit is None or limit.peak_flops is None:
        return None
    if cost is not None:
        return prediction.step_seconds(limit, cost, decodes=decodes, context=context, prompt=prompt)
    read = (limit.weight_bytes(decodes + prompt) + decodes * limit.kv_bytes(context)) / limit.bandwidth
    attention = decodes * limit.decode_flops(context) + limit.prompt_flops(prompt)
    rows = decodes + (prompt > 0)
    flops = (decodes + prompt) * limit.layer_flops + rows * limit.head_flops + attention
    return max(read, flops / limit.peak_flops)
