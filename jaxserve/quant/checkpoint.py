"""Reads `quantization_config` of a config.json: how each weight of a Hugging Face checkpoint is stored.

It reads these methods by the rules of the tools that write them: AWQ (AutoAWQ), GPTQ (AutoGPTQ, GPTQModel), fp8
(AutoFP8, DeepSeek, Qwen3), fbgemm_fp8, compressed-tensors (llm-compressor), mxfp4 (gpt-oss). Errors name a method or
field that isn't supported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields, Range, abbreviate
from jaxserve.quant.stored import MXFP4_GROUP, Packing, Stored, StoredWeight
from pallas_kernels.quantized_matmul import Scheme

_F16, _BF16, _F32 = np.dtype(np.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32)
OnTheFly = Literal["fp8", "int8", "int4"]
"""The schemes that weights of 16 bits can be quantized to."""
CONVERTED = "jaxserve"
"""The method that `jaxserve convert` writes; its `scheme` is one of `OnTheFly`."""
_GROUP = Range(1, 2**20)
_BLOCK = (128, 128)
# It is no linear layer in DeepSeek's code, so its configs don't name it
_DEEPSEEK_ROUTER = r"re:.*\.mlp\.gate$"
UNKNOWN_ORDER = "not read yet"
"""Stands for an order of inputs that only the files tell; all tensors of a parameter are assumed to have the same."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How weights of modules that match `pattern` are stored.

    A pattern that starts with "re:" is a regular expression. `Linear` matches every linear layer.
    """

    pattern: str
    stored: StoredWeight

    def matches(self, module: str) -> bool:
        """Return whether the rule is for this module, such as `model.layers.0.mlp.down_proj`."""
        return self.pattern == "Linear" or _matches(self.pattern, module)


@dataclasses.dataclass(frozen=True)
class CheckpointQuantization:
    """The content of a `quantization_config`. `ignored` are patterns of modules that are not quantized.

    `block` is the shape of the blocks of a weight that share a scale, if they cover several outputs.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    quantizes_head: bool = False

    @property
    def converted(self) -> bool:
        """Whether `jaxserve convert` has written the checkpoint."""
        return any(rule.stored.packing == "converted" for rule in self.rules)

    def stored(self, name: str) -> StoredWeight | None:
        """Return how a tensor of the model is stored, None if it isn't quantized."""
        module = name.removesuffix(".weight")
        if module == name:
            return next(
                (rule.stored for rule in self.rules if rule.stored.packing == "mxfp4" and rule.matches(name)), None
            )
        if module == "lm_head" and not self.quantizes_head:
            return None
        if any(_matches(pattern, module) for pattern in self.ignored):
            return None
        return next((rule.stored for rule in self.rules if rule.matches(module)), None)


def read_quantization(fields: Fields) -> CheckpointQuantization | None:
    """Return the parsed `quantization_config`, None if there is none. Raises `ConfigError` if it isn't supported."""
    name = "quantization_config" if fields.get("quantization_config") else "compression_config"
    raw = fields.object(name)
    if not raw:
        return None
    inner = Fields(raw, f"{fields.where}: {name}")
    supported = ", ".join(method for method in _METHODS if method != CONVERTED)
    # Older configs of bitsandbytes have no quant_method
    default = "bitsandbytes" if inner.get("load_in_4bit") or inner.get("load_in_8bit") else ""
    method = inner.text("quant_method", default)
    if not method:
        raise inner.error("quant_method", f"one of {supported}")
    reader = _METHODS.get(method)
    if reader is None:
        raise ConfigError(
            f"{inner.where}: quant_method={abbreviate(method)} is not supported; supported: {supported}, and GGUF "
            "files. Take the model in one of these, or in 16 bits with --quantization fp8, int8 or int4"
        )
    found = reader(inner)
    for pattern in (*found.ignored, *(rule.pattern for rule in found.rules)):
        _check_pattern(inner, pattern)
    return found


def method_of(quantization: CheckpointQuantization | None, stored: Stored) -> str | None:
    """Return how a checkpoint is quantized: `gguf`, or the method of its config; None if it isn't."""
    if quantization is not None:
        return quantization.method
    return "gguf" if any(tensor.quantized for tensor in stored.values()) else None


def stored_by_config(quantization: CheckpointQuantization | None, abstract: Any) -> Stored:
    """Return how the linear layers of a model with these `ParamSpec`s are stored, as far as its config tells."""
    if quantization is None:
        return {}
    parts = {part.name for spec in jax.tree.leaves(abstract) if spec.inputs for part in spec.parts}
    found = ((name, quantization.stored(name)) for name in sorted(parts))
    return {name: stored for name, stored in found if stored is not None}


def _check_pattern(fields: Fields, pattern: str) -> None:
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise ConfigError(f"{fields.where}: {abbreviate(pattern)} is no regular expression: {error}") from error


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern names this module, one around it, or the last part of its path."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    plain = pattern.removeprefix("language_model.").replace("model.language_model.", "model.", 1).rstrip(".")
    return f".{plain}." in f".{module}."


def _only(fields: Fields, name: str, supported: Sequence[Any], default: Any) -> Any:
    """Return a field that has one of the supported values. Raises `ConfigError` naming the others."""
    value = fields.get(name, default)
    if value not in supported or isinstance(value, bool) != isinstance(supported[0], bool):
        some = " or ".join(map(repr, supported))
        raise ConfigError(f"{fields.where}: {name}={abbreviate(value)} is not supported; only {some}")
    return value


def _group(fields: Fields, name: str = "group_size") -> int | None:
    value = fields.get(name, -1)
    return None if value == -1 else fields.integer(name, _GROUP)


def _awq(fields: Fields) -> CheckpointQuantization:
    bits = "bits" if fields.get("bits") is not None else "w_bit"
    _only(fields, bits, (4,), 4)
    _only(fields, "version", ("gemm", "GEMM", "exllama"), "gemm")
    group = _group(fields, "group_size" if fields.get("group_size") is not None else "q_group_size")
    zeros = fields.boolean("zero_point", True)
    stored = StoredWeight(_described("awq", 4, group, zeros), Scheme("int4", group, zeros), "awq", _F16)
    ignored = tuple(fields.texts("modules_to_not_convert") or ())
    return CheckpointQuantization("awq", (Rule("Linear", stored),), ignored)


def _gptq(fields: Fields) -> CheckpointQuantization:
    _only(fields, _gptq_format(fields), ("gptq", "gptq_v2"), "gptq")
    _only(fields, "is_marlin_format", (False,), False)
    rules, ignored = [], list(fields.texts("modules_to_not_convert") or ())
    dynamic = Fields(fields.object("dynamic"), f"{fields.where}: dynamic")
    for pattern in dynamic.raw:
        changes = dynamic.object(pattern)
        name = f"re:{pattern[2:] if pattern[:2] in ('+:', '-:') else pattern}"
        if pattern.startswith("-:"):
            ignored.append(name)
        else:
            rules.append(Rule(name, _gptq_weight(Fields({**fields.raw, **changes}, dynamic.where))))
    rules.append(Rule("Linear", _gptq_weight(fields)))
    return CheckpointQuantization("gptq", tuple(rules), tuple(ignored), quantizes_head=fields.boolean("lm_head", False))


def _gptq_format(fields: Fields) -> str:
    """Return the name of the field that tells the format of zeros: versions of GPTQModel write different ones."""
    return "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"


def _gptq_weight(fields: Fields) -> StoredWeight:
    bits = _only(fields, "bits", (4, 8), 4)
    group, zeros = _group(fields), not fields.boolean("sym", True)
    reordered = fields.boolean("desc_act", False) and group is not None
    scheme = Scheme("int4" if bits == 4 else "int8", group, zeros)
    packing: Packing = "gptq_v2" if fields.get(_gptq_format(fields)) == "gptq_v2" else "gptq"
    kind, order = _described("gptq", bits, group, zeros), UNKNOWN_ORDER if reordered else ""
    return StoredWeight(kind, scheme, packing, _F16, order)


def _fp8(fields: Fields) -> CheckpointQuantization:
    activations = _only(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
    _only(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = fields.get("weight_block_size")
    ignored = (*(fields.texts("ignored_layers") or ()), *(fields.texts("modules_to_not_convert") or ()))
    if block is not None:
        if block != list(_BLOCK):
            raise ConfigError(f"{fields.where}: weight_block_size={block} is not supported; only {list(_BLOCK)} is")
        if activations == "static":
            raise ConfigError(f"{fields.where}: activation_scheme=static is not supported with weight_block_size")
        return _blocks_of_fp8("fp8", (*ignored, _DEEPSEEK_ROUTER))
    scheme = Scheme("fp8", activations="token" if activations == "dynamic" else "static")
    kind = f"fp8, {activations} activations"
    return CheckpointQuantization("fp8", (Rule("Linear", StoredWeight(kind, scheme, "plain", _F32)),), ignored)


def _blocks_of_fp8(method: str, ignored: tuple[str, ...]) -> CheckpointQuantization:
    scheme = Scheme("fp8", _BLOCK[1], activations="group")
    stored = StoredWeight(f"{method}, blocks of {_BLOCK[0]} x {_BLOCK[1]}", scheme, "plain", _F32)
    return CheckpointQuantization(method, (Rule("Linear", stored),), ignored, _BLOCK)


def _fbgemm(fields: Fields) -> CheckpointQuantization:
    stored = StoredWeight("fbgemm_fp8", Scheme("fp8", activations="token"), "plain", _F32)
    ignored = tuple(fields.texts("modules_to_not_convert") or ())
    return CheckpointQuantization("fbgemm_fp8", (Rule("Linear", stored),), ignored)


def _compressed(fields: Fields) -> CheckpointQuantization:
    sparsity = fields.object("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"{fields.where}: sparsity_config with format={abbreviate(sparsity)} is not supported")
    if fields.object("transform_config").get("config_groups"):
        raise ConfigError(f"{fields.where}: transform_config (rotated weights and inputs) is not supported")
    rules, blocks = [], set()
    groups = Fields(fields.object("config_groups"), f"{fields.where}: config_groups")
    for name in groups.raw:
        inner = Fields(groups.object(name), f"{groups.where}.{name}")
        stored, block = _compressed_group(inner, inner.text("format", fields.text("format", "pack-quantized")))
        blocks.add(block)
        rules += [Rule(pattern, stored) for pattern in inner.texts("targets") or ["Linear"]]
    if not rules:
        raise fields.error("config_groups", "an object of at least one group")
    if len(blocks) > 1:
        raise ConfigError(f"{fields.where}: config_groups with and without blocks are not supported together")
    # A rule for some modules precedes the rule for all linear layers
    rules.sort(key=lambda rule: rule.pattern == "Linear")
    ignored = tuple(fields.texts("ignore") or ())
    [block] = blocks
    return CheckpointQuantization("compressed-tensors", tuple(rules), ignored, block, quantizes_head=True)


_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed_group(fields: Fields, format: str) -> tuple[StoredWeight, tuple[int, int] | None]:
    if format not in _COMPRESSED_FORMATS:
        some = ", ".join(_COMPRESSED_FORMATS)
        raise ConfigError(f"{fields.where}: format={abbreviate(format)} is not supported; only {some}")
    weights = Fields(fields.object("weights"), f"{fields.where}.weights")
    inputs = Fields(fields.object("input_activations"), f"{fields.where}.input_activations")
    if fields.get("output_activations") is not None:
        raise ConfigError(f"{fields.where}: output_activations is not supported")
    kind, bits = _only(weights, "type", ("int", "float"), "int"), _only(weights, "num_bits", (4, 8), 8)
    size = weights.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = _only(weights, "strategy", ("tensor", "channel", "group", "block"), by_size)
    zeros = not weights.boolean("symmetric", True)
    packed = format == "pack-quantized"
    if (kind == "float" and (bits == 4 or zeros)) or (bits == 4 and not packed):
        raise ConfigError(f"{weights.where}: {bits}-bit {kind} in format {format} is not supported")
    group = weights.integer("group_size", _GROUP) if strategy == "group" else None
    block = None
    if strategy == "block":
        if kind != "float":
            raise ConfigError(f"{weights.where}: blocks of integers are not supported, only fp8")
        _only(weights, "block_structure", (list(_BLOCK), "x".join(map(str, _BLOCK))), [])
        block, group = _BLOCK, _BLOCK[1]
    if inputs.raw and (bits == 4 or zeros):
        raise ConfigError(
            f"{fields.where}: {bits}-bit weights{' with zeros' * zeros} and quantized inputs are not supported"
        )
    activations = _compressed_inputs(inputs, kind, bits, blocks=block is not None) if inputs.raw else None
    scheme = Scheme("fp8" if kind == "float" else "int4" if bits == 4 else "int8", group, zeros, activations)
    reordered = packed and group is not None and weights.get("actorder") in ("group", "dynamic", True)
    name = f"{'fp8' if kind == 'float' else f'int{bits}'}{f', groups of {group}' if group and not block else ''}"
    if block:
        name += f", blocks of {block[0]} x {block[1]}"
    if activations is not None:
        name += f", {'static' if activations == 'static' else 'dynamic'} activations"
    order = UNKNOWN_ORDER if reordered else ""
    factors = _F32 if activations is not None else _BF16
    return StoredWeight(name + " with zeros" * zeros, scheme, "packed" if packed else "plain", factors, order), block


def _compressed_inputs(fields: Fields, kind: str, bits: int, *, blocks: bool) -> Any:
    _only(fields, "type", (kind,), kind)
    _only(fields, "num_bits", (bits,), bits)
    _only(fields, "symmetric", (True,), True)
    if not fields.boolean("dynamic", False):
        _only(fields, "strategy", ("tensor",), "tensor")
        return "static"
    if blocks:
        _only(fields, "group_size", (_BLOCK[1],), _BLOCK[1])
        return "group"
    # A scale for each token is at least as exact as one for all tokens
    _only(fields, "strategy", ("token", "tensor"), "token")
    return "token"


_EXPERTS = r"re:.*\.experts\.(gate_up|down)_proj$"


def _mxfp4(fields: Fields) -> CheckpointQuantization:
    fields.texts("modules_to_not_convert")  # It lists all modules that aren't experts
    stored = StoredWeight("MXFP4", Scheme("fp4", MXFP4_GROUP), "mxfp4", _BF16)
    return CheckpointQuantization("mxfp4", (Rule(_EXPERTS, stored),))


def _described(method: str, bits: int, group: int | None, zeros: bool) -> str:
    return f"{method}, {bits} bits{f' in groups of {group}' if group else ''}{' with zeros' * zeros}"


def _converted(fields: Fields) -> CheckpointQuantization:
    scheme = _only(fields, "scheme", get_args(OnTheFly), None)
    return CheckpointQuantization(scheme, (Rule("Linear", StoredWeight(scheme, packing="converted")),))


_METHODS: Mapping[str, Callable[[Fields], CheckpointQuantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    CONVERTED: _converted,
}
