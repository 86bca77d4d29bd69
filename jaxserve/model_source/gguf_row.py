"""What a GGUF architecture is: one row of the tables in `gguf_architectures` and `gguf_encoders`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

QKV, OUTPUT, MLP = ("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down")
"""The tensors of a layer that may have a bias."""
SILU = {"hidden_act": "silu"}
NOTHING: Mapping[str, Any] = MappingProxyType({})
DECODER_NAMES: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
"""The names of a decoder's tensors outside of layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. Metadata keys are without the architecture's name before them.

    config.json:
        model: its class and type. `windowed_model`: those of a model with sliding windows, where they differ.
        constants: fields that follow from the architecture alone; metadata overrides them.
        implied: returns further fields that follow from the config so far.
        norm_epsilon: the key of the norms' epsilon and its field.
        numbers: optional keys that hold a number, and their fields. `rope_numbers`: fields in `rope_parameters`.
        integers, flags: keys that hold a whole number, or true or false, and their fields. A file must have the keys of
            all fields that aren't among the `constants`.
        biases: fields that tell whether all of some tensors of a layer have a bias. `norms`: fields that tell whether
            a layer has some norms.
        partial_rotation: whether heads may be rotated in part.
        causal: whether tokens attend to earlier ones only.
        tables: tables of embeddings that files may lack, and the fields with their numbers of rows.
        latent: whether attention is latent. `attention.key_length_mla` is then the size of a head, and
            `attention.key_length` that of a row in llama.cpp's cache; files of before April 2025 have only the former,
            under the latter's name.
        drafts: the field of the number of layers that draft several tokens at once. The file counts them as layers of
            the model, and has them last.
        value_heads: the order of the value heads of gated delta nets, if layers are such: that of Hugging Face, or
            `tiled` (`weights.gguf_heads`).
    Sliding windows:
        window_period: each layer with a multiple of this number has full attention, where the file doesn't list them;
            1: all layers have a window; 0: windows aren't supported.
        full_first: whether the first layer has full attention, and each that follows it by a multiple of the period.
        local_theta: the default base of the rotation in layers with a window; 0: the base of the other layers. None:
            all layers have the same rotation.
    What is checked and what is ignored:
        only: the only supported value of some keys. `ignored`: the beginnings of keys that change nothing.
        whole_yarn_factor: whether `rope.scaling.attn_factor` is all that YaRN multiplies by, not one factor more.
    Tensors:
        names: Hugging Face's names of a layer's tensors that aren't named as Llama's, by part of the layer or by part
            and kind, which some tensors lack. Those that begin with `mtp.` are no layer's. A `*` stands for the number
            of an expert: the file has all experts in one tensor. The rows of two tensors of the same name alternate,
            those of the gate come first. `top_names`: those of tensors outside of layers. `layers`: where layers are.
        pairs_adjacent: whether the converter reordered q's and k's rows, so that the two dimensions that a rotation
            turns are side by side. Hugging Face has them half a head apart.
        norm_offset: the number that the converter added to the weights of norms, but those inside delta nets.
    Mixtures of experts:
        mixture: the row of files that have experts, where dense models have the same architecture.
    """

    model: tuple[str, str]
    windowed_model: tuple[str, str] | None = None
    constants: Mapping[str, Any] = MappingProxyType(SILU)
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: NOTHING
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    numbers: Mapping[str, str] = NOTHING
    rope_numbers: Mapping[str, str] = NOTHING
    integers: Mapping[str, str] = NOTHING
    flags: Mapping[str, str] = NOTHING
    biases: Mapping[str, tuple[str, ...]] = MappingProxyType({"attention_bias": QKV + OUTPUT})
    norms: Mapping[str, tuple[str, ...]] = NOTHING
    partial_rotation: bool = False
    causal: bool = True
    tables: Mapping[str, str] = NOTHING
    latent: bool = False
    drafts: str = ""
    value_heads: Literal["", "grouped", "tiled"] = ""
    window_period: int = 0
    full_first: bool = False
    local_theta: float | None = None
    only: Mapping[str, Any] = NOTHING
    ignored: tuple[str, ...] = ()
    whole_yarn_factor: bool = False
    names: Mapping[str, str] = NOTHING
    top_names: Mapping[str, str] = DECODER_NAMES
    layers: str = "model.layers"
    pairs_adjacent: bool = False
    norm_offset: float = 0.0
    mixture: Architecture | None = None
