"""Predicts the time of a step from what its compiled program launches and moves, beside the time of the roofline.

Both times are for the rates that a copy and a large product reach on a device, not for those of its datasheet. The
times of launches are assumptions until a device has been measured (`benchmarks/device.py`).
"""

from __future__ import annotations

import dataclasses

from jaxserve.runtime.devices.target import DeviceTarget
from jaxserve.runtime.programs.cost import ProgramCost
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.sizing.roofline import Roofline, roofline
from jaxserve.runtime.step.program import ProgramKey

CONTEXT = 1024
"""Tokens of each sequence in a predicted decode step."""

# Shares of the datasheet's rates: a copy reaches 4.3 of an H200's 4.8 TB/s, a bfloat16 product 790 of its 989 TFLOP/s.
_COPY_SHARE = 0.9
_PRODUCT_SHARE = 0.8

# Assumed seconds: between two kernels of a command buffer, for a launch by the host, for a host that waits for the
# device and launches again, for an exchange between devices.
_LAUNCH = 1.5e-6
_HOST_LAUNCH = 4e-6
_HOST_WAIT = 30e-6
_EXCHANGE = 10e-6


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted `seconds` of a step, the fewest possible (`limit`), and its numbers of sequences and of tokens.

    A decode step has sequences of `CONTEXT` tokens; any other step is a prompt that fills the program.
    """

    limit: float
    seconds: float
    sequences: int
    tokens: int


def predict(
    deployment: Deployment, target: DeviceTarget, key: ProgramKey, cost: ProgramCost, exchanges: int = 0
) -> Prediction:
    """Predict one step of a program. `exchanges` counts its collectives.

    A step that verifies has as many sequences as can verify whole drafts.
    """
    best = roofline(deployment, target)
    reached = dataclasses.replace(
        best,
        bandwidth=best.bandwidth * _COPY_SHARE,
        peak_flops=None if best.peak_flops is None else best.peak_flops * _PRODUCT_SHARE,
    )
    if rows := KINDS[key.kind].num_decoding(deployment.capacity, key.size):
        limit = reached.decode_seconds(rows, CONTEXT)
        seconds = step_seconds(reached, cost, decodes=rows, context=CONTEXT, exchanges=exchanges)
        return Prediction(limit, seconds, rows, key.size)
    limit = _prompt_seconds(reached, key.size)
    seconds = step_seconds(reached, cost, prompt=key.size, exchanges=exchanges)
    return Prediction(limit, seconds, 1, key.size)


def step_seconds(
    rates: Roofline, cost: ProgramCost, *, decodes: int = 0, context: int = 0, prompt: int = 0, exchanges: int = 0
) -> float:
    """Return the seconds of a step of a program by what it launches and moves, at given rates.

    In it `decodes` requests of `context` tokens decode, and `prompt` tokens of another prompt are computed.
    """
    attention = decodes * rates.decode_flops(context) + rates.prompt_flops(prompt)
    seconds = _seconds(rates, decodes * rates.kv_bytes(context), attention)
    seconds += sum(_seconds(rates, one.nbytes, one.flops) for one in cost.kinds)
    tokens = decodes + prompt
    seconds -= (rates.unread_bytes(tokens) + rates.idle_row_bytes * tokens) / rates.bandwidth
    seconds += cost.launches * _LAUNCH + exchanges * _EXCHANGE
    if cost.grouping is None:
        return seconds
    # The host launches ahead of the device while nothing makes it wait.
    return max(seconds, cost.grouping.top * _HOST_LAUNCH) + cost.grouping.host_waits * _HOST_WAIT


def _seconds(rates: Roofline, nbytes: float, flops: float) -> float:
    products = 0.0 if rates.peak_flops is None else flops / rates.peak_flops
    return max(nbytes / rates.bandwidth, products)


def _prompt_seconds(rates: Roofline, tokens: int) -> float:
    per_second = rates.prefill_tokens_per_second(tokens)
    products = 0.0 if per_second is None else tokens / per_second
    return max(rates.weight_bytes(tokens) / rates.bandwidth, products)
