"""A Hugging Face folder as a `TensorSource`: safetensors, in one file or sharded with an index.

Finds the files and reads their headers. The files are memory-mapped: a tensor is read from disk when it is asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # its import makes bfloat16 known to numpy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import ConfigError
from jaxserve.model_source import orbax_hint
from jaxserve.model_source.fields import Fields, abbreviate, read_json
from jaxserve.model_source.sentence_modules import dense_folders
from jaxserve.params import Window
from jaxserve.weights.source import TensorInfo, row_blocks
from jaxserve.weights.stacked_experts import OpenTensor, split_experts

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.language_model.": "model.",
}
# What the names of an encoder's tensors begin with if it was saved with a head
_ENCODER_PREFIXES = ("bert.", "distilbert.", "gte.", "mpnet.", "new.", "nomic_bert.", "roberta.")
# The endings of the first BERTs' layer norms, as TensorFlow names them
_OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# What the names of a model's tensors begin with if it was saved without its head
_WITHOUT_HEAD = ("layers.", "embed_tokens.", "norm.", "embeddings.", "final_norm.")
_OF_A_DRAFT_HEAD = "fc.weight"
_MISTRAL = "consolidated"
_READABLE = ("F64", "F32", "F16", "BF16")
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


class SafetensorsFolder:
    """The tensors in the safetensors files of a folder. Raises `ConfigError` naming missing or broken files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slices: dict[str, OpenTensor] = {}
        self._stored: dict[str, tuple[Path, str]] = {}
        for file, wanted in _files_to_open(folder).items():
            self._open(folder / file, wanted, _name_alone)
        if _is_without_head(self._slices):
            self._slices = {_in_model(name): found for name, found in self._slices.items()}
            self._stored = {_in_model(name): found for name, found in self._stored.items()}
        for module in dense_folders(folder):
            self._open(_dense_file(folder / module), None, f"{module}/{{}}".format)
        self._slices = split_experts(self._slices)
        self._infos = {name: _info(tensor()) for name, tensor in self._slices.items()}

    def _open(self, file: Path, wanted: set[str] | None, name_of: Callable[[str], str]) -> None:
        """Open the tensors of a file that are `wanted`, all if it is None, under the names that `name_of` returns."""
        try:
            opened: Any = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} can't be read as safetensors ({error}); fetch the file again") from error
        for stored in opened.offset_keys():
            if wanted is None or stored in wanted:
                name = name_of(stored)
                self._slices[name] = functools.partial(opened.get_slice, stored)
                self._stored[name] = file, stored

    @property
    def description(self) -> str:
        return str(self._folder)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `TensorSource`."""
        stored = self._slices[name]()
        for block, part in row_blocks(window, out):
            part[...] = stored[block]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor of any type of `_DTYPES` as an array in the mapped file, whose bytes are read when used.

        Raises `ConfigError` for another type.
        """
        file, stored = self._stored[name]
        start, header = _header(file)
        entry = header[stored]
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(f"{file}: type {entry['dtype']} of {stored} is not supported")
        begin, end = entry["data_offsets"]
        data = np.memmap(file, np.uint8, "r", start + begin, (end - begin,))
        return data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


@functools.lru_cache(4)
def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begins, and its header. The `safetensors` package has checked both."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))


def _name_alone(name: str) -> str:
    """Return the name that a tensor of a text model has without an encoder of images beside it, or without a head."""
    for prefix, alone in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    for ending, own in _OLD_ENDINGS.items():
        name = name.removesuffix(ending) + own if name.endswith(ending) else name
    return next((name.removeprefix(prefix) for prefix in _ENCODER_PREFIXES if name.startswith(prefix)), name)


def _is_without_head(names: Collection[str]) -> bool:
    """Return whether names are those of a model that was saved without its head; a head that drafts has such, too."""
    encodes = "embeddings.tok_embeddings.weight" in names
    return encodes or ({"embed_tokens.weight", "norm.weight"} <= set(names) and _OF_A_DRAFT_HEAD not in names)


def _in_model(name: str) -> str:
    """Return the name that a tensor has in a model with its head."""
    return f"model.{name}" if name.startswith(_WITHOUT_HEAD) else name


def _dense_file(folder: Path) -> Path:
    """Return the file with the weights of a dense layer. Raises `ConfigError` if there is only a pickle."""
    pickle = folder / "pytorch_model.bin"
    if not (folder / _SINGLE).is_file() and pickle.is_file():
        raise ConfigError(
            f"{folder} has no {_SINGLE}; {pickle.name} is a pickle, which can run code, so it is never opened. "
            f"{_advice(folder, [pickle.name])}"
        )
    return folder / _SINGLE


def _info(stored: Any) -> TensorInfo:
    kind = stored.get_dtype()
    unreadable = "" if kind in _READABLE else f"type {kind} is not supported, only {', '.join(_READABLE)} are"
    return TensorInfo(tuple(stored.get_shape()), kind, unreadable)


def _files_to_open(folder: Path) -> dict[str, set[str] | None]:
    """Return the files to open, each with the names of the tensors to read from it (None: all)."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if (folder / _INDEX).is_file():
        return _files_in_index(folder)
    found = sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith(_MISTRAL))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ConfigError(
            f"{folder} has {len(found)} safetensors files but no {_INDEX} that says which tensors to read from each"
        )
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    pickles = [name for name in pickles if name.startswith("pytorch_model")] or pickles
    hint = orbax_hint(folder)
    if pickles:
        hint = f"; {pickles[0]} is a pickle, which can run code, so it is never opened. {_advice(folder, pickles)}"
    elif any(folder.glob(f"{_MISTRAL}*.safetensors")):
        hint = f"; {_MISTRAL}*.safetensors is in Mistral's own format: get the files of Hugging Face's format"
    elif not hint:
        hint = (
            ". If its repository has only pytorch_model.bin, as many heads that draft are published, run "
            "`hf download ORG/NAME --local-dir FOLDER` and give FOLDER instead: the error says how to convert it"
        )
    raise ConfigError(f"{folder} has no {_SINGLE} and no {_INDEX}{hint} (--load-format dummy needs no weights)")


def _advice(folder: Path, pickles: list[str]) -> str:
    """Return how to convert pickles to safetensors. A single pickle may be a head, which transformers can't load."""
    if len(pickles) == 1:
        command = (
            "import torch; from safetensors.torch import save_file; "
            f"weights = torch.load({str(folder / pickles[0])!r}, map_location='cpu', weights_only=True); "
            "save_file({name: each.clone().contiguous() for name, each in weights.items()}, "
            f"{str(folder / _SINGLE)!r})"
        )
        return f'Where torch and safetensors are installed, run `python -c "{command}"`'
    command = (
        "from transformers import AutoModelForCausalLM as M; "
        f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained('NEW_FOLDER')"
    )
    return f'Where torch is installed, run `python -c "{command}"`, then copy the tokenizer\'s files to NEW_FOLDER'


def _files_in_index(folder: Path) -> dict[str, set[str] | None]:
    index = Fields(read_json(folder / _INDEX), str(folder / _INDEX))
    weight_map = index.object("weight_map")
    if not weight_map:
        raise index.error("weight_map", "an object that names a file for each tensor")
    for file in weight_map.values():
        # Only the name is checked: a symbolic link in the folder may point anywhere, as the folder's owner decided
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or not file.isprintable():
            raise ConfigError(
                f"{index.where}: weight_map names the file {abbreviate(file)}; "
                "only files of the folder itself are opened"
            )
    files: dict[str, set[str] | None] = {file: set() for file in sorted(set(weight_map.values()))}
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the {len(files)} files its index names: {', '.join(absent[:10])}"
            f"{', …' if len(absent) > 10 else ''}; fetch the model again"
        )
    for name, file in weight_map.items():
        names = files[file]
        assert names is not None
        names.add(name)
    return files
