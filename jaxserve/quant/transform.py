"""Replaces weights in a model's tree of `ParamSpec`s by quantized or packed ones, and finds them in such a tree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.params import Initializer, ParamSpec, Path, TensorPart, path_of
from jaxserve.quant.choice import HEAD, WeightForm, split_axis, ties_head
from pallas_kernels.quantized_matmul import (
    BLOCK,
    STRIP,
    HeldWeight,
    NumberType,
    PackedWeight,
    QuantizedWeight,
    num_groups,
    numbers_shape,
    run_bytes,
)

# The standard deviations of the bytes that `--load-format dummy` draws at random, and of the numbers in them
_DUMMY: dict[NumberType, tuple[float, float]] = {"int4": (64, 4.6), "int8": (30, 30), "fp4": (64, 2.9), "fp8": (1, 1)}
_DUMMY_INPUT_SCALE = 0.05


def hold_weights(abstract: Any, forms: Mapping[Path, WeightForm]) -> Any:
    """Return the tree with a quantized or packed weight, made of specs of its arrays, at the path of each form.

    A head that is tied to the embedding gets a weight of its own.
    """
    if HEAD in forms and ties_head(abstract):
        abstract = dataclasses.replace(abstract, output=dataclasses.replace(abstract.embedding, inputs=1))

    def hold(keys: tuple[Any, ...], spec: ParamSpec) -> ParamSpec | HeldWeight:
        form = forms.get(path_of(keys))
        return spec if form is None else _held(flat_inputs(spec), form)

    return jax.tree_util.tree_map_with_path(hold, abstract)


def held_weights(tree: Any) -> dict[Path, HeldWeight]:
    """Return the quantized and packed weights of a tree, by the path that the dense weight would have."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, HeldWeight))
    return {path_of(keys): leaf for keys, leaf in leaves if isinstance(leaf, HeldWeight)}


def flat_inputs(spec: ParamSpec) -> ParamSpec:
    """Return the spec of a linear layer's weight with one dimension of inputs.

    An embedding, which is packed if it is the head too, has one already.
    """
    if spec.inputs <= 1:
        return dataclasses.replace(spec, inputs=1)
    split = len(spec.shape) - spec.inputs
    axis = next((axis for axis in spec.axes[split:] if axis is not None), None)
    dims = spec.stored_shape[split:]

    def flat(part: TensorPart) -> TensorPart:
        assert part.shape[split + 1 :] == dims[1:], part
        index = part.index[split] * math.prod(dims[1:])
        shape = (*part.shape[:split], math.prod(part.shape[split:]))
        return dataclasses.replace(part, shape=shape, index=(*part.index[:split], index))

    return dataclasses.replace(
        spec,
        shape=(*spec.shape[:split], math.prod(spec.shape[split:])),
        axes=(*spec.axes[:split], axis),
        inputs=1,
        # Heads that are repeated for shards divide their inputs among them, in order
        kv_replicas=spec.kv_replicas if "kv_heads" in spec.axes[:split] else 1,
        parts=tuple(map(flat, spec.parts)),
    )


def _held(spec: ParamSpec, form: WeightForm) -> HeldWeight:
    scheme = form.scheme
    *_, inputs = spec.shape
    order = _array((inputs,), np.dtype(np.int32), (None,), "range") if form.reordered else None
    static = scheme is not None and scheme.activations == "static"
    input_scale = _array((1,), np.dtype(np.float32), (None,), "constant") if static else None
    if form.backend is None:
        at = split_axis(spec)
        outer, inner = spec.shape[:at], spec.shape[at + 1 : -1]
        strips = spec.shape[at] * math.prod(inner) // STRIP
        run = run_bytes("bf16" if scheme is None else scheme.numbers)
        axes = (*spec.axes[: at + 1], spec.axes[-1], None)
        data = _array((*outer, strips, inputs // BLOCK, run), np.dtype(np.uint8), axes)
        return PackedWeight(data, order, input_scale, scheme, inner)
    assert scheme is not None, form
    shape, dtype = numbers_shape(spec.shape, scheme)
    groups = num_groups(inputs, scheme)
    # All shards hold a single group whole
    axes = spec.axes if groups > 1 else (*spec.axes[:-1], None)
    deviation, size = _DUMMY[scheme.numbers]
    factors = dataclasses.replace(spec, shape=(*spec.shape[:-1], groups), dtype=form.factors, axes=axes, parts=())
    return QuantizedWeight(
        dataclasses.replace(spec, shape=shape, dtype=dtype, parts=(), scale=deviation),
        dataclasses.replace(factors, init="constant", scale=spec.scale / size),
        dataclasses.replace(factors, dtype=form.zeros, init="zeros") if scheme.zeros else None,
        order,
        input_scale,
        scheme,
        form.backend,
        form.arrangement,
    )


def _array(
    shape: tuple[int, ...], dtype: np.dtype, axes: tuple[str | None, ...], init: Initializer = "zeros"
) -> ParamSpec:
    return ParamSpec(shape, dtype, axes, init, scale=_DUMMY_INPUT_SCALE)
