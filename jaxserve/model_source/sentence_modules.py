"""Reads the files of sentence-transformers beside a model: its modules, how they pool, its prompts and its limit.

`modules.json` lists what follows the model's layers: one module that pools, or one that scores by logits of tokens;
dense layers after pooling; normalization. Names of types are those of any of its versions.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import CONTEXT, TOKEN_ID, WIDTH, Fields, abbreviate, read_json
from jaxserve.model_source.pooling import LayerActivation, PooledLayer, PoolingMethod

MODULES_FILE = "modules.json"
_PROMPTS_FILE, _LIMITS_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"
MODULE_FOLDERS = "[0-9]_*"
"""The pattern of the folders of modules, such as 1_Pooling."""

_METHODS: dict[str, PoolingMethod] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, LayerActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_SENTENCE = "sentence_embedding"


@dataclasses.dataclass(frozen=True)
class SentenceModules:
    """The modules of a folder, and where they are: `pooling` or `scoring`, if there is one, then `dense` ones.

    Without pooling, as PyLate has it, dense ones make a vector of each token.
    """

    folder: Path
    pooling: str | None = None
    scoring: str | None = None
    dense: tuple[str, ...] = ()
    normalize: bool = False

    @property
    def embeds(self) -> bool:
        """Whether they make vectors."""
        return self.pooling is not None or bool(self.dense)

    def method(self) -> PoolingMethod:
        """Return how sequences are pooled. Raises `ConfigError` naming a mode that isn't supported."""
        if self.pooling is None:
            return "all"
        fields = self._fields(self.pooling)
        modes = fields.get("pooling_mode") or [mode for name, mode in _OLD_MODES.items() if fields.get(name)]
        modes = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
        if len(modes) > 1 or modes[0] not in _METHODS:
            raise ConfigError(
                f"{fields.where}: pooling_mode {' + '.join(map(str, modes))} is not supported; lasttoken, mean and "
                "cls are, of which --pooling last, mean or cls chooses one"
            )
        return _METHODS[modes[0]]

    def check_prompts(self, has_prompts: bool) -> None:
        """Raise `ConfigError` if vectors are made without the tokens of prompts."""
        if self.pooling is None:
            return
        fields = self._fields(self.pooling)
        if has_prompts and not fields.boolean("include_prompt", True):
            raise ConfigError(
                f"{fields.where}: include_prompt=false is not supported with prompts: all tokens of a text are pooled"
            )

    def layers(self) -> tuple[PooledLayer, ...]:
        """Return the dense layers. Raises `ConfigError`."""
        return tuple(_dense_layer(path, self._fields(path)) for path in self.dense)

    def scored_tokens(self) -> tuple[int, ...]:
        """Return the token whose logit is a score, after the one that says the opposite, if there is one."""
        assert self.scoring is not None
        fields = self._fields(self.scoring)
        yes = fields.integer("true_token_id", TOKEN_ID)
        return (yes,) if fields.get("false_token_id") is None else (fields.integer("false_token_id", TOKEN_ID), yes)

    def _fields(self, path: str) -> Fields:
        file = self.folder / path / "config.json"
        return Fields(read_json(file), str(file))


def read_modules(folder: Path) -> SentenceModules | None:
    """Return the modules of a folder, None if it has none.

    Raises `ConfigError` naming a module that isn't supported where it is.
    """
    file = folder / MODULES_FILE
    if not file.is_file():
        return None
    found = SentenceModules(folder)
    for kind, path in _entries(file):
        dense = found.scoring is None and not found.normalize
        if kind == "Transformer" and not path:
            continue
        if kind == "Pooling" and found == SentenceModules(folder):
            found = dataclasses.replace(found, pooling=path)
        elif kind == "LogitScore" and found == SentenceModules(folder):
            found = dataclasses.replace(found, scoring=path)
        elif kind == "Dense" and dense:
            found = dataclasses.replace(found, dense=(*found.dense, path))
        elif kind == "Normalize" and found.embeds:
            found = dataclasses.replace(found, normalize=True)
        else:
            raise ConfigError(
                f"{file}: module {abbreviate(kind)} at {abbreviate(path)} is not supported there; supported: "
                "Transformer at '', then Pooling, any number of Dense and Normalize, or LogitScore"
            )
    return found


def dense_folders(folder: Path) -> list[str]:
    """Return the folders of dense layers inside a model's folder."""
    file = folder / MODULES_FILE
    return [path for kind, path in _entries(file) if kind == "Dense"] if file.is_file() else []


def sentence_fields(folder: Path) -> Fields:
    """Return the fields of the file that has prompts, and what makes scores of logits."""
    return _fields_of(folder / _PROMPTS_FILE)


def read_prompts(folder: Path) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the prompts by name, and the name of the one that texts have by default, "" for none."""
    fields = sentence_fields(folder)
    file, prompts = fields.where, fields.object("prompts")
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise ConfigError(f"{file}: prompts: {name} should be a string, it is {abbreviate(text)}")
    default = fields.text("default_prompt_name", "")
    if default and default not in prompts:
        names = ", ".join(prompts) or "none"
        raise ConfigError(f"{file}: default_prompt_name={abbreviate(default)} is none of its prompts: {names}")
    return tuple(prompts.items()), default


def read_template_arguments(folder: Path) -> tuple[tuple[str, Any], ...]:
    """Return what a chat template is rendered with."""
    fields = _fields_of(folder / _LIMITS_FILE)
    inner = Fields(fields.object("processing_kwargs"), f"{fields.where}: processing_kwargs")
    return tuple(inner.object("chat_template").items())


def read_max_tokens(folder: Path) -> int | None:
    """Return the most tokens that a text may have, None if the files don't say."""
    fields = _fields_of(folder / _LIMITS_FILE)
    if fields.get("max_seq_length") is None:  # since version 5.4 it is the tokenizer's
        most = _fields_of(folder / "tokenizer_config.json").get("model_max_length")
        return most if isinstance(most, int) and most in CONTEXT else None
    return fields.integer("max_seq_length", CONTEXT)


def lowercases(folder: Path) -> bool:
    """Return whether texts are made lower case before they are encoded."""
    return (folder / MODULES_FILE).is_file() and _fields_of(folder / _LIMITS_FILE).boolean("do_lower_case", False)


def _fields_of(file: Path) -> Fields:
    """Return the fields of a file, none if there is no such file."""
    return Fields(read_json(file) if file.is_file() else {}, str(file))


def _entries(file: Path) -> list[tuple[str, str]]:
    """Return the type, without the names of its packages, and the path of each module. Raises `ConfigError`."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise ConfigError(f"{file} should hold a list of objects")
    found = []
    for i, each in enumerate(content):
        fields = Fields(each, f"{file}: module {i}")
        kind, path = fields.text("type", "").rpartition(".")[2], fields.text("path", "")
        if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
            raise ConfigError(f"{fields.where}: path {abbreviate(path)} is outside of the model's folder")
        found.append((kind, path))
    return found


def _dense_layer(path: str, fields: Fields) -> PooledLayer:
    kind = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(kind.rpartition(".")[2]) if kind.startswith("torch.nn.modules.") else None
    if activation is None:
        raise ConfigError(
            f"{fields.where}: activation_function={abbreviate(kind)} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    for name in ("module_input_name", "module_output_name"):
        if fields.text(name, _SENTENCE) != _SENTENCE:
            raise ConfigError(
                f"{fields.where}: {name}={abbreviate(fields.get(name))} is not supported: only {_SENTENCE} is"
            )
    if fields.boolean("use_residual", False):
        raise ConfigError(f"{fields.where}: use_residual=true is not supported")
    return PooledLayer(
        f"{path}/linear",
        fields.integer("in_features", WIDTH),
        fields.integer("out_features", WIDTH),
        has_bias=fields.boolean("bias", True),
        activation=activation,
    )
