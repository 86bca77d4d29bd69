"""Divides the layers of a model among pipeline stages, by `--pp-layer-partition`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config.pipeline import layer_partition
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import AnyModel, Stage
from jaxserve.runtime.devices.mesh import device_bytes


def divide_layers(
    config: EngineConfig, model: AnyModel, params: Any, axes: Mapping[str, int], *, drafting: Any = None
) -> list[Stage]:
    """Return the stages of a model with these `params`, whose weights the axes of a mesh divide.

    The last stage also has the parameters that are `drafting`. Raises `ConfigError` for a model that can't be divided
    into so many, or by this partition.
    """
    count, layers = config.pp_size, model.config.num_layers
    _check(config, model)
    wanted = layer_partition(config)
    if wanted == "layers":
        sizes: Sequence[int] = _evenly(layers, count)
    elif wanted == "memory":
        head = 0 if params.output is None else device_bytes(params.output, axes)
        embedding = device_bytes(params.embedding, axes)
        own = [device_bytes(layer, axes) for layer in params.layers]
        own[0] += embedding
        own[-1] += (head or embedding) + device_bytes(drafting, axes)
        sizes = divide_by_weight(own, count)
    else:
        sizes = wanted
        if sum(sizes) != layers:
            raise ConfigError(
                f"pp_layer_partition={config.pp_layer_partition} has {sum(sizes)} layers, and the model {layers}; name "
                f"the layers of each stage, such as {','.join(map(str, _evenly(layers, count)))}"
            )
    ends = list(itertools.accumulate(sizes))
    return [Stage(i, count, end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def divide_by_weight(weights: Sequence[int], count: int) -> list[int]:
    """Return the layers of each stage: the heaviest is as light as possible, then all are as even as possible."""
    total = [0, *itertools.accumulate(weights)]

    def divide(most: float) -> list[int] | None:
        """Return the layers of stages of at most `most` with the smallest sum of squares, None if there are none."""
        # By the number of layers divided so far: the sum of squares, and the layers of each stage
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for _ in range(count):
            longer: dict[int, tuple[float, list[int]]] = {}
            for at, (squares, sizes) in best.items():
                for end in range(at + 1, len(total)):
                    if (weight := total[end] - total[at]) > most:
                        break
                    if (found := squares + weight**2) < longer.get(end, (math.inf, []))[0]:
                        longer[end] = found, [*sizes, end - at]
            best = longer
        return best.get(len(weights), (0.0, None))[1]

    limits = sorted({total[end] - total[at] for at in range(len(weights)) for end in range(at + 1, len(total))})
    least = bisect.bisect_left(limits, True, key=lambda most: divide(most) is not None)
    sizes = divide(limits[least])
    assert sizes is not None
    return sizes


def _check(config: EngineConfig, model: AnyModel) -> None:
    """Raise `ConfigError` if a model can't be divided into the stages that are asked for."""
    layers = model.config.num_layers
    if config.pp_size > layers:
        raise ConfigError(f"pp_size={config.pp_size} is more than the {layers} layers of the model; lower --pp-size")
    if model.config.held_per_token or any(model.config.kv_source(i) != i for i in range(layers)):
        raise ConfigError(
            f"pp_size={config.pp_size}: layers of this model use vectors, or keys and values, of earlier ones, which "
            "stages don't send; use --tp-size instead"
        )
    if config.speculative_method == "eagle3":
        raise ConfigError(
            f"speculative_method=eagle3 with pp_size={config.pp_size}: the head needs the inputs of layers of several "
            "stages; take another method, or leave one of the two out"
        )


def _evenly(layers: int, count: int) -> list[int]:
    """Return as many layers for each stage; the last one gets the fewest, as it has the head, then the first one."""
    each, left = divmod(layers, count)
    sizes = [each] * count
    for stage in sorted(range(count), key=lambda stage: (stage == count - 1, stage == 0))[:left]:
        sizes[stage] += 1
    return sizes
