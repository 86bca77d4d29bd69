"""Reads the header of a GGUF file: its key-values and its tensor table. The files of a split model are read as one.

Arrays (such as a vocabulary of 150,000 strings) are decoded only when asked for, so that a config is read in
milliseconds. Weights are never read, except for a small float32 tensor that is asked for by name. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields, Range

MAGIC = b"GGUF"

type Scalar = int | float | bool | str

_STRING, _ARRAY = 8, 9
_SCALARS = {
    type_id: struct.Struct("<" + code)
    for type_id, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_F32 = 0
_MAX_RANK = 4
_MAX_NAME, _MAX_TEXT = 1 << 10, 1 << 24
_ALIGNMENT = Range(1, 1 << 20)
_FILES = Range(0, 99_999)
_MAX_TENSOR_VALUES = 1 << 14
# ggml type -> (weights a block, bytes a block), for the types whose tensors can be checked against the file's size
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    12: (256, 144), 13: (256, 176), 14: (256, 210), 39: (32, 17),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GGUFTensorInfo:
    """An entry of the tensor table. `shape` is in numpy's order (rows first); `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    path: Path


@dataclasses.dataclass(frozen=True, repr=False)
class _ArrayRef:
    element_type: int
    count: int
    offset: int

    def __repr__(self) -> str:
        return f"an array of {self.count}"


class GGUFMetadata:
    """The metadata of one file, and its tensors. The first file of a split model has the tensors of all its files.

    `number` is the file's place among several. Raises `ConfigError` unless all are complete little-endian GGUF 2 or 3
    files.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path = path
        self._values: dict[str, Scalar | _ArrayRef] = {}
        self._decoded: dict[str, list[Scalar]] = {}
        tensors: dict[str, GGUFTensorInfo] = {}
        self.fields = Fields(self._values, str(path))
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise ConfigError(f"{path} is not a GGUF file: it doesn't start with the bytes 'GGUF'")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        try:
            self._parse(tensors)
        except UnicodeDecodeError as error:
            raise self._damaged(f"its header can't be read ({error.reason})") from None  # the error holds all the bytes
        except (struct.error, IndexError, KeyError, OverflowError, RecursionError) as error:
            raise self._damaged(f"its header can't be read ({error!r})") from error
        self.files = {path: self._data}
        for part in self._following(number):
            self.files |= part.files
            if twice := tensors.keys() & part.tensors.keys():
                raise part._damaged(f"tensor {min(twice)} is in another file of the model, too")
            tensors |= part.tensors
        self.tensors: Mapping[str, GGUFTensorInfo] = MappingProxyType(tensors)

    def _following(self, number: int) -> Iterator[GGUFMetadata]:
        """Yield the files that follow the first one of a model. Raises `ConfigError` if this isn't file `number`."""
        found, count = (self.fields.integer(f"split.{key}", _FILES, least) for key, least in (("no", 0), ("count", 1)))
        if found != number:
            raise ConfigError(
                f"{self.path} is file {found + 1} of the {count} that a model is split into, and file {number + 1} was "
                "expected: pass the first one, and leave their names as they were"
            )
        last = f"-{count:05d}.gguf"
        for i in range(1, count if number == 0 else 1):
            path = self.path.with_name(f"{self.path.name.removesuffix(f'-00001-of{last}')}-{i + 1:05d}-of{last}")
            if not path.is_file():
                raise ConfigError(
                    f"{self.path} is the first of {count} files that a model is split into, but there is no {path}: "
                    "fetch it, too, and leave their names as they were"
                )
            yield GGUFMetadata(path, i)

    def _parse(self, tensors: dict[str, GGUFTensorInfo]) -> None:
        (version,) = _U32.unpack_from(self._data, 4)
        if version not in (2, 3):
            raise ConfigError(
                f"{self.path} is GGUF version {version} (or big-endian); only little-endian versions 2 and 3 are read: "
                "convert the model again with a current llama.cpp"
            )
        (num_tensors,) = _U64.unpack_from(self._data, 8)
        (num_values,) = _U64.unpack_from(self._data, 16)
        position = 24
        for _ in range(num_values):
            key, position = self._string(position, _MAX_NAME)
            if key in self._values:
                raise self._damaged(f"it has two values of {key}")
            (type_id,) = _U32.unpack_from(self._data, position)
            self._values[key], position = self._value(type_id, position + 4)
        infos = []
        for _ in range(num_tensors):
            name, position = self._string(position, _MAX_NAME)
            (rank,) = _U32.unpack_from(self._data, position)
            if rank > _MAX_RANK:
                raise self._damaged(f"tensor {name} has {rank} dimensions; the most is {_MAX_RANK}")
            *dims, ggml_type, offset = struct.unpack_from(f"<{rank}QIQ", self._data, position + 4)
            position += 4 + 8 * rank + 12
            infos.append((name, tuple(reversed(dims)), ggml_type, offset))
        alignment = self.fields.integer("general.alignment", _ALIGNMENT, 32)
        data_start = -(-position // alignment) * alignment
        ends: list[tuple[int, int, str]] = []
        for name, shape, ggml_type, offset in infos:
            if name in tensors:
                raise self._damaged(f"it has two tensors {name}")
            if offset % alignment:
                raise self._damaged(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            tensors[name] = GGUFTensorInfo(name, shape, ggml_type, data_start + offset, self.path)
            weights, block_bytes = _BLOCKS.get(ggml_type, (1, 0))
            end = data_start + offset + math.prod(shape) // weights * block_bytes
            if end > len(self._data):
                raise self._damaged(f"tensor {name} ends at byte {end}, the file at {len(self._data)}")
            ends.append((data_start + offset, end, name))
        ends.sort()
        for (_, end, name), (start, _, following) in itertools.pairwise(ends):
            if end > start:
                raise self._damaged(f"tensors {name} and {following} overlap")

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged or cut short: {why}; fetch the file again")

    def _string(self, position: int, most: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._data, position)
        start = position + 8
        if length > most or start + length > len(self._data):
            raise IndexError(f"a string of {length} bytes at {position}")
        return self._data[start : start + length].decode(), start + length

    def _value(self, type_id: int, position: int) -> tuple[Scalar | _ArrayRef, int]:
        if type_id == _STRING:
            return self._string(position, _MAX_TEXT)
        if type_id == _ARRAY:
            (element_type,) = _U32.unpack_from(self._data, position)
            (count,) = _U64.unpack_from(self._data, position + 4)
            start = position + 12
            end = self._skip(element_type, count, start)
            if end > len(self._data):
                raise IndexError(f"an array of {count} elements at {position}")
            return _ArrayRef(element_type, count, start), end
        scalar = _SCALARS[type_id]
        value: Scalar = scalar.unpack_from(self._data, position)[0]
        return value, position + scalar.size

    def _skip(self, element_type: int, count: int, position: int) -> int:
        if element_type == _STRING:
            unpack, data = _U64.unpack_from, self._data
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
            return position
        if element_type == _ARRAY:
            for _ in range(count):
                _, position = self._value(_ARRAY, position)
            return position
        return position + count * _SCALARS[element_type].size

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str) -> Scalar | None:
        """Return a single value, or None if the key is missing or holds an array."""
        value = self._values.get(key)
        return None if isinstance(value, _ArrayRef) else value

    def array(self, key: str) -> list[Scalar] | None:
        """Return an array of scalars or strings, decoded at the first call; None if the key is missing or no array."""
        ref = self._values.get(key)
        if not isinstance(ref, _ArrayRef):
            return None
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, ref)
        return self._decoded[key]

    def _decode(self, key: str, ref: _ArrayRef) -> list[Scalar]:
        if ref.element_type == _STRING:
            values: list[Scalar] = []
            unpack, data, position = _U64.unpack_from, self._data, ref.offset
            for _ in range(ref.count):
                start = position + 8
                position = start + unpack(data, position)[0]
                # A vocabulary may hold pieces that are not valid UTF-8
                values.append(data[start:position].decode(errors="replace"))
            return values
        if ref.element_type == _ARRAY:
            raise ConfigError(f"{self.path}: key {key} holds arrays of arrays, which are not supported")
        code = _SCALARS[ref.element_type].format[1:]
        return list(struct.unpack_from(f"<{ref.count}{code}", self._data, ref.offset))

    def float32_tensor(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor, flat."""
        info = self.tensors[name]
        if info.ggml_type != _F32:
            raise ConfigError(f"{self.path}: tensor {name} should be float32, its ggml type is {info.ggml_type}")
        if math.prod(info.shape) > _MAX_TENSOR_VALUES:
            raise ConfigError(
                f"{self.path}: tensor {name} has {math.prod(info.shape)} values; the most is {_MAX_TENSOR_VALUES}"
            )
        return list(struct.unpack_from(f"<{math.prod(info.shape)}f", self.files[info.path], info.offset))
