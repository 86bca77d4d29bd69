"""Reads the rotary embeddings of a config.json: transformers 5 writes `rope_parameters`, 4 wrote other fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import (
    CONTEXT,
    NON_NEGATIVE,
    POSITIVE,
    ROPE_FACTOR,
    ROPE_THETA,
    Fields,
    Range,
    abbreviate,
)

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FRACTION = Range(0, 1, open=True)
_READ_ELSEWHERE = {"attention_factor", "max_position_embeddings", "original_max_position_embeddings"}


def read_rope(
    fields: Fields,
    max_position: int,
    head_dim: int,
    *,
    theta: float = 10000.0,
    fraction: float | None = None,
    interleaved: bool = False,
    layer_type: str | None = None,
    known: tuple[str, ...] = (),
    old_names: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """Return the rotary embedding of a model, or of its layers of one type.

    `theta` and the rotated `fraction` of a head are the family's defaults; without `fraction`, it rotates whole heads.
    `known` are fields of `rope_parameters` that the family reads itself, `old_names` maps the names that its older
    checkpoints have for kinds. Raises `ConfigError` for a kind or field that isn't supported.
    """
    raw = _parameters(fields, layer_type)
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    scaling = Fields(raw, f"{fields.where}: {name}")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = old_names.get(kind, kind)
    # proportional has the pairs of a whole head, so it doesn't go with a fraction or with neighbours as pairs
    kinds = (*_KINDS, "proportional") if fraction is None and not interleaved else _KINDS
    if kind not in (*kinds, "factors"):
        raise ConfigError(
            f"{scaling.where}: rope_type {abbreviate(kind)} is not supported; supported: {', '.join(kinds)}"
        )
    theta = scaling.number("rope_theta", ROPE_THETA, fields.number("rope_theta", ROPE_THETA, theta))
    default = fields.number("partial_rotary_factor", _FRACTION, fraction or 1.0)
    rotated = int(head_dim * scaling.number("partial_rotary_factor", _FRACTION, default))
    if fraction is None and kind != "proportional" and rotated != head_dim:
        raise ConfigError(f"{fields.where}: a partial_rotary_factor is not supported for this architecture; only 1 is")
    if rotated % 2 or not rotated:
        raise ConfigError(f"{fields.where}: partial_rotary_factor rotates {rotated} of {head_dim} dimensions, no pairs")
    beside = fields if fields.get("original_max_position_embeddings") is not None else scaling
    default_original = None if kind == "longrope" else max_position
    original = beside.integer("original_max_position_embeddings", CONTEXT, default_original)
    if raw.get("factor") is not None:
        factor = scaling.number("factor", ROPE_FACTOR)
    elif kind in ("linear", "llama3", "dynamic"):
        raise ConfigError(f"{scaling.where}: rope_type {kind!r} needs a factor")
    else:
        factor = max_position / original
    config = RopeConfig(
        theta=theta,
        kind=kind,
        rotated=None if rotated == head_dim else rotated,
        interleaved=interleaved,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor", POSITIVE, 1.0),
        high_freq_factor=scaling.number("high_freq_factor", POSITIVE, 4.0),
        max_position=max_position,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", POSITIVE, 32.0),
        beta_slow=scaling.number("beta_slow", POSITIVE, 1.0),
        attention_factor=(
            None if raw.get("attention_factor") is None else scaling.number("attention_factor", POSITIVE)
        ),
        mscale=scaling.number("mscale", NON_NEGATIVE, 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", NON_NEGATIVE, 0.0),
        truncate=scaling.boolean("truncate", True),
        factors=tuple(scaling.numbers("factors", POSITIVE)),
        short_factors=tuple(scaling.numbers("short_factor", POSITIVE)),
        long_factors=tuple(scaling.numbers("long_factor", POSITIVE)),
    )
    _check(scaling, config, rotated // 2, known)
    return config


def _parameters(fields: Fields, layer_type: str | None) -> Mapping[str, Any]:
    """Return the parameters of one type of layers: those under its name, or those of all types."""
    raw = {**fields.object("rope_scaling"), **fields.object("rope_parameters")}
    if layer_type is None:
        return raw
    nested = Fields({name: value for name, value in raw.items() if isinstance(value, Mapping)}, fields.where)
    if nested.raw and len(nested.raw) < len(raw):
        both = ", ".join(sorted(raw.keys() - nested.raw.keys()))
        raise ConfigError(f"{fields.where}: rope_scaling or rope_parameters has {both} beside those of types of layers")
    return nested.object(layer_type) if nested.raw else raw


def _check(scaling: Fields, config: RopeConfig, pairs: int, known: tuple[str, ...]) -> None:
    odd = scaling.raw.keys() - scaling.read - _READ_ELSEWHERE - set(known)
    if odd:
        raise ConfigError(f"{scaling.where} has fields that jaxserve does not support: {', '.join(sorted(odd))}")
    # Kimi-K2 has equal betas: a step in place of a ramp
    for low, high, equal in (("low_freq_factor", "high_freq_factor", False), ("beta_slow", "beta_fast", True)):
        least, most = getattr(config, low), getattr(config, high)
        if least > most or (least == most and not equal):
            bound = "at most" if equal else "less than"
            raise ConfigError(f"{scaling.where}: {low}={least:g} should be {bound} {high}={most:g}")
    lists = {
        "factors": {"factors": config.factors},
        "longrope": {"short_factor": config.short_factors, "long_factor": config.long_factors},
    }
    for name, values in lists.get(config.kind, {}).items():
        if len(values) != pairs:
            raise ConfigError(
                f"{scaling.where}: {name} has {len(values)} numbers; {pairs} are needed, one for each frequency"
            )
