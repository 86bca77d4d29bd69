"""Opens a model's weights with the reader for their file format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params
from jaxserve.quant import CONVERTED, CheckpointQuantization, Stored, convert_forms, held_weights, hold_weights
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.dummy import dummy_reader
from jaxserve.weights.finite import FiniteSource
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.kv_scales import KVScales, parse_kv_scale_name, read_kv_scales
from jaxserve.weights.load import check_names, checkpoint_reader
from jaxserve.weights.quantized.folder import QuantizedFolder
from jaxserve.weights.quantized.held import held_reader
from jaxserve.weights.quantized.mxfp4 import Mxfp4Folder
from jaxserve.weights.quantized.orbax import OrbaxRows
from jaxserve.weights.source import QuantizedSource, TensorSource
from pallas_kernels.quantized_matmul import PackedWeight, QuantizedWeight

LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]

_TOWERS = (
    "vision_tower.", "multi_modal_projector.", "vision_model.", "audio_tower.", "embed_vision.", "embed_audio.",
    "vision_embedder.", "visual.",
)  # fmt: skip
_HEADS = ("classifier.", "cls.", "dense.", "score.")
# Tensors that only quantized weights have
_ONLY_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")
_FORMAT_OF_KIND = {"folder": "safetensors", "gguf": "gguf", "orbax": "orbax"}


def open_weights(
    source: ModelSource,
    abstract: Any,
    *,
    dense: Any = None,
    quantization: CheckpointQuantization | None = None,
    on_the_fly: bool = False,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    part: str = "",
) -> WeightReader:
    """Return a reader of the parameters of `abstract`; so far only names, shapes and types have been read.

    If some weights are quantized or packed, `dense` is the same tree without them; with `on_the_fly`, weights of 16
    bits are quantized as they are read. `quantization` is read from the checkpoint's config. If the parameters are only
    a part of the checkpoint, the names of their tensors begin with `part`. Raises `ConfigError` if the source isn't of
    `load_format`, or its tensors don't fit the model.
    """
    dense = abstract if dense is None else dense
    if load_format == "dummy":
        if any(isinstance(weight, PackedWeight) for weight in held_weights(abstract).values()):
            return held_reader(abstract, dense, dummy_reader(dense, seed), None)
        return dummy_reader(abstract, seed)
    _check_format(source, load_format)
    if source.kind == "orbax":
        # The import stands here, so that other formats start without it
        from jaxserve.weights.orbax import OrbaxCheckpoint

        checkpoint = OrbaxCheckpoint(source.path)
        if quantization is None:
            return held_reader(abstract, dense, checkpoint.reader(dense), None)
        stored = hold_weights(dense, convert_forms(quantization.method, dense))
        reader = checkpoint.reader(stored)
        held = {path: weight for path, weight in held_weights(stored).items() if isinstance(weight, QuantizedWeight)}
        rows = OrbaxRows(held, reader.fill, str(source.path))
        whole = WeightReader(rows.fill_dense, tuple(range(len(flatten(dense)[0]))))
        return held_reader(abstract, dense, whole, rows)
    opened = open_source(source, quantization=quantization)
    _check_config(opened, quantization)
    quantized = opened if isinstance(opened, QuantizedSource) and not on_the_fly else None
    ignored = _ignored(opened, part)
    return checkpoint_reader(abstract, FiniteSource(opened), dense, quantized=quantized, ignored=ignored, part=part)


def check_tensors(source: ModelSource, model: ModelConfig, load_format: LoadFormat = "auto", *, part: str = "") -> None:
    """Raise `ConfigError` if the names and shapes of a file's tensors are not those that its config describes.

    It is called before programs are compiled, so that a wrong file is found early. A folder of `jaxserve convert` is
    checked when it is opened instead. `part` is as in `open_weights`.
    """
    if load_format != "dummy" and source.kind != "orbax":
        leaves, _ = flatten(abstract_params(LaidOutModel(model), np.dtype(np.float32)))
        opened = open_source(source, load_format, model.quantization)
        _check_config(opened, model.quantization)
        check_names(opened, [spec for _, spec in leaves], _ignored(opened, part))


def stored_types(source: ModelSource, model: ModelConfig, load_format: LoadFormat = "auto") -> Stored:
    """Return how the tensors of a checkpoint are stored, if they may be quantized; else {}."""
    if load_format == "dummy" or source.kind == "orbax":
        return {}
    opened = open_source(source, load_format, model.quantization)
    return opened.stored if isinstance(opened, QuantizedSource) else {}


def open_source(
    source: ModelSource, load_format: LoadFormat = "auto", quantization: CheckpointQuantization | None = None
) -> TensorSource:
    """Open the tensors of a GGUF file or a Hugging Face folder. Raises `ConfigError` as `open_weights` does."""
    _check_format(source, load_format)
    assert source.kind != "orbax", source
    if source.kind == "gguf":
        return GGUFFile(source.path)
    folder = SafetensorsFolder(source.path)
    if quantization is None:
        return folder
    if quantization.converted:
        raise ConfigError(f"{source.path}: quant_method={CONVERTED} is only that of folders of `jaxserve convert`")
    if quantization.method == "mxfp4":
        return Mxfp4Folder(folder, quantization)
    return QuantizedFolder(folder, quantization)


def checkpoint_kv_scales(source: ModelSource, model: AnyModel) -> KVScales | None:
    """Return the scales of a Hugging Face folder; None if it has none, or for other formats, which can't have any."""
    return read_kv_scales(open_source(source), model) if source.kind == "folder" else None


def has_kv_scales(source: ModelSource) -> bool:
    """Return whether `checkpoint_kv_scales` would find any."""
    return source.kind == "folder" and any(parse_kv_scale_name(name) for name in open_source(source).infos)


def is_ignored(name: str) -> bool:
    """Return whether no parameter needs a checkpoint tensor: frequencies, which are computed; the copy of a tied head;
    a head, or layers after pooling, which the task of the model doesn't need; scales of a KV cache, which the state
    has; encoders, as images and sound are refused."""
    own = name.removeprefix("model.")
    computed = name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
    return computed or parse_kv_scale_name(name) is not None or own.startswith((*_TOWERS, *_HEADS)) or "/" in name


def _ignored(source: TensorSource, part: str) -> Callable[[str], bool]:
    """Return the function that tells whether a source may hold a tensor of a name that no parameter has."""

    def ignored(name: str) -> bool:
        return is_ignored(name) or not name.startswith(part)

    if isinstance(source, QuantizedFolder):
        return lambda name: ignored(name) or source.is_zero_bias(name)
    return ignored


def _check_config(opened: TensorSource, quantization: CheckpointQuantization | None) -> None:
    found = next((name for name in opened.infos if name.endswith(_ONLY_QUANTIZED)), None)
    if found is not None and quantization is None:
        raise ConfigError(
            f"{opened.description}: the checkpoint is quantized (it has {found}), but its config.json has no "
            "quantization_config that says how; fetch the config.json that belongs to it, or put the content of "
            "quantize_config.json there as quantization_config, with quant_method"
        )


def _check_format(source: ModelSource, load_format: LoadFormat) -> None:
    found = _FORMAT_OF_KIND[source.kind]
    if load_format in ("auto", found):
        return
    if load_format == "orbax":
        raise ConfigError(
            f"load_format=orbax was asked for, but {source.path} is no folder of `jaxserve convert`; leave it at auto"
        )
    raise ConfigError(f"load_format={load_format} was asked for, but {source.path} holds {found}; leave it at auto")
