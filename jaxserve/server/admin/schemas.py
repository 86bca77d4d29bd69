"""Makes the JSON Schemas of requests as strict as the server's own checks.

Most of a schema comes from the field types (`fields.py`). This module adds the limits that are known once the model is
loaded (vocabulary, context, template, policy) and each request's conditions between fields. JSON Schema can't express
conditions between numbers, which only errors report: `min_tokens` is at most `max_tokens`, a prompt and its output fit
the context together, the number of prompts times `n` is at most 2048.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.api_types import MAX_STOP_IDS
from jaxserve.server.http.fields import EXPLICIT_SCHEMA, LOAD_BOUND
from jaxserve.server.server_state import ServerState
from jaxserve.text.template_arguments import RESERVED_ARGUMENTS, idle_arguments, template_words


def request_schemas(types: Sequence[type], state: ServerState) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return references to the schemas of `types`, and the schemas by name."""
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for kind in types:
        conditions = getattr(kind, "conditions", ())
        if conditions:
            components[kind.__name__]["allOf"] = [*conditions]
    limits = _ModelLimits(state)
    return list(references), {name: limits.apply(schema) for name, schema in components.items()}


class _ModelLimits:
    def __init__(self, state: ServerState) -> None:
        loaded = state.loaded
        self._model = state.model_name
        self._max_logprobs = state.config.max_logprobs
        self._uses_priorities = state.engine_config.uses_priorities
        self._trusts_templates = state.config.trust_request_chat_template
        self._refuses_priorities = state.refuses_priorities
        self._vocab_size = 2**31 if loaded is None else loaded.engine.info.vocab_size
        truncates = state.config.allow_auto_truncate
        self._max_model_len = 2**31 if loaded is None or truncates else loaded.engine.info.max_model_len
        self._num_eos_ids = 0 if loaded is None else len(loaded.tokenizer.eos_ids)
        self._template = None if loaded is None else loaded.template_source
        self._reasons = loaded is not None and loaded.formats.reasoning is not None

    def apply(self, node: Any) -> Any:
        """Return `node`, a part of a schema, with the limits of the served model."""
        if isinstance(node, list):
            return [self.apply(item) for item in node]
        if not isinstance(node, dict):
            return node
        explicit_schema = node.get(EXPLICIT_SCHEMA)
        if explicit_schema is not None:
            kept = {name: node[name] for name in ("default", "description") if name in node}
            return {**self.apply(explicit_schema), **kept}
        bound = node.get(LOAD_BOUND)
        rest = {name: self.apply(item) for name, item in node.items() if name != LOAD_BOUND}
        return rest if bound is None else rest | self._limits(bound)

    def _limits(self, bound: str) -> dict[str, Any]:
        last_id, length = self._vocab_size - 1, self._max_model_len
        match bound:
            case "chat_template" if not self._trusts_templates:
                return {"enum": []}
            case "model":
                return {"enum": [self._model]}
            case "num_logprobs":
                return {"maximum": self._max_logprobs}
            case "priority" if not self._uses_priorities:
                return {"enum": [] if self._refuses_priorities else [0]}
            case "prompt_ids":
                return {"minItems": 1, "maxItems": length - 1}
            case "pooled_ids":
                return {"minItems": 1}
            case "stop_ids":
                return {"maxItems": MAX_STOP_IDS - self._num_eos_ids}
            case "token_count":
                return {"maximum": length - 1}
            case "token_id":
                return {"maximum": last_id}
            case "token_key":
                return {"pattern": _number_pattern(last_id)}
            case "template_arguments" if self._template is not None:
                words = template_words(self._template)
                idle = idle_arguments(words, reasons=self._reasons)
                return {
                    "propertyNames": {"enum": sorted(words.difference(RESERVED_ARGUMENTS).union(idle))},
                    "properties": {name: {"enum": [*values]} for name, values in idle.items()},
                }
            case "reasoning_effort" if self._template is not None and not template_words(self._template).intersection(
                ("reasoning_effort", "enable_thinking")
            ):
                return {"enum": [None]}
            case "documents" if self._template is not None and "documents" not in template_words(self._template):
                return {"maxItems": 0}
        return {}


def _number_pattern(last: int) -> str:
    """Return a regular expression that matches the decimal numbers from 0 to `last`."""
    digits = str(last)
    choices = ["0"] if last < 10 else ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"]
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 else 0
        if int(digit) > lowest:
            choices.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return f"^({'|'.join([*choices, digits])})$"
