"""Makes the schemas of requests as strict as the server, by what is served: its vocabulary, context, template, policy.

The types say most of it (`fields.py`); this puts in what they mark as known only at load, and each request's conditions
between its fields. What JSON Schema can't say of two numbers is said by the error alone: that `min_tokens` is at most
`max_tokens`, that a prompt and its output fit the context together, that prompts times `n` are at most 2048.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.api_types import MAX_STOP_IDS
from jaxserve.server.http.fields import DESCRIBED, FITTED
from jaxserve.server.openai.chat_messages import OURS, template_names
from jaxserve.server.server_state import Serving


def fitted_schemas(types: Sequence[type], serving: Serving) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """References to the schemas of `types`, and the schemas by name."""
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for kind in types:
        conditions = getattr(kind, "conditions", ())
        if conditions:
            components[kind.__name__]["allOf"] = [*conditions]
    fit = _Fit(serving)
    return list(references), {name: fit.schema(schema) for name, schema in components.items()}


class _Fit:
    def __init__(self, serving: Serving) -> None:
        loaded = serving.loaded
        self._model = serving.model_name
        self._policy = serving.engine_config.schedule_policy
        self._vocab_size = 2**31 if loaded is None else loaded.engine.info.vocab_size
        self._max_model_len = 2**31 if loaded is None else loaded.engine.info.max_model_len
        self._num_eos_ids = 0 if loaded is None else len(loaded.tokenizer.eos_ids)
        self._template = None if loaded is None else loaded.template_source

    def schema(self, node: Any) -> Any:
        """`node` and all below it, as they are for what is served."""
        if isinstance(node, list):
            return [self.schema(item) for item in node]
        if not isinstance(node, dict):
            return node
        described = node.get(DESCRIBED)
        if described is not None:
            kept = {name: node[name] for name in ("default", "description") if name in node}
            return {**self.schema(described), **kept}
        bound = node.get(FITTED)
        rest = {name: self.schema(item) for name, item in node.items() if name != FITTED}
        return rest if bound is None else rest | self._bounds(bound)

    def _bounds(self, bound: str) -> dict[str, Any]:
        last_id, length = self._vocab_size - 1, self._max_model_len
        match bound:
            case "model":
                return {"enum": [self._model]}
            case "priority" if self._policy != "priority":
                return {"enum": [0]}
            case "prompt_ids":
                return {"minItems": 1, "maxItems": length - 1}
            case "stop_ids":
                return {"maxItems": MAX_STOP_IDS - self._num_eos_ids}
            case "token_count":
                return {"maximum": length - 1}
            case "token_id":
                return {"maximum": last_id}
            case "token_key":
                return {"pattern": _numbers_to(last_id)}
            case "template_arguments" if self._template is not None:
                return {"propertyNames": {"enum": sorted(template_names(self._template).difference(OURS))}}
            case "documents" if self._template is not None and "documents" not in template_names(self._template):
                return {"maxItems": 0}
        return {}


def _numbers_to(last: int) -> str:
    """A regular expression of the decimal numbers from 0 to `last`."""
    digits = str(last)
    choices = ["0"] if last < 10 else ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"]
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 else 0
        if int(digit) > lowest:
            choices.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return f"^({'|'.join([*choices, digits])})$"
