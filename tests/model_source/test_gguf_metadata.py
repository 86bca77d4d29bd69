from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import POSITIVE
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from tests.model_source.gguf_files import write_gguf


def test_reads_every_scalar_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße 你好")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata = GGUFMetadata(tmp_path / "m.gguf")

    assert {key: metadata.get(key) for key in metadata} == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -5,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**63,
        "i64": -(2**40),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "grüße 你好",
    }


def test_arrays_are_decoded_when_asked_for(tmp_path: Path) -> None:
    tokens = ["a", "", "字", "<0x0A>"]
    path = write_gguf(
        tmp_path / "m.gguf", values={"tokens": tokens, "types": [1, -2, 3], "scores": [0.5, -1.0], "x": 7}
    )

    metadata = GGUFMetadata(path)

    assert metadata.array("tokens") == tokens
    assert metadata.array("types") == [1, -2, 3]
    assert metadata.array("scores") == [0.5, -1.0]
    assert metadata.array("x") is None
    assert metadata.array("nothing") is None
    assert metadata.get("tokens") is None
    assert metadata.get("x") == 7


def test_tensor_table_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    embedding = np.arange(48, dtype=np.float32).reshape(3, 16)
    packed = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata = GGUFMetadata(tmp_path / "m.gguf")

    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        info = metadata.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.ggml_type, info.offset) == (tensor.tensor_type, tensor.data_offset)
    assert metadata.float32_tensor("token_embd.weight") == embedding.ravel().tolist()
    with pytest.raises(ConfigError, match="packed should be float32"):
        metadata.float32_tensor("packed")


def test_a_field_names_the_file_and_the_key(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", values={"text": "x", "flag": True, "list": [1, 2]})
    fields = GGUFMetadata(path).fields

    assert fields.number("missing", POSITIVE, 3) == 3
    for key, value in (("text", "'x'"), ("flag", "True"), ("list", "an array of 2")):
        with pytest.raises(ConfigError, match=rf"m\.gguf: {key} should be a number in .*, it is {value}"):
            fields.number(key, POSITIVE)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", values={"tokens": ["a", "b"], "types": [1, 2]}).read_bytes()
    cut = tmp_path / "cut.gguf"

    for length in range(4, len(whole) - 32, 7):  # the end may be padding
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf is damaged or cut short"):
            GGUFMetadata(cut)


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", values={"tokens": ["a", "b"], "types": [1, 2]}).read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    refused = 0

    for _ in range(300):
        content = bytearray(whole)
        for position in rng.integers(4, 500, size=3):
            content[position] = int(rng.integers(256))
        damaged.write_bytes(content)
        try:
            metadata = GGUFMetadata(damaged)
            for key in metadata:
                metadata.array(key)
        except ConfigError:
            refused += 1

    assert refused > 100


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a GGUF file"):
            GGUFMetadata(path)
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ConfigError, match="only little-endian versions 2 and 3"):
            GGUFMetadata(path)
