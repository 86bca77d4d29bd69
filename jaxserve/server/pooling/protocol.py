"""The request bodies of the routes that pool: OpenAI's embeddings, Cohere's and Jina's rerank, vLLM's and SGLang's own.

Owns shapes only. Null always means the default.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.inert_fields import InertFields
from jaxserve.server.generation.message_fields import (
    CONTINUE_FINAL_MESSAGE,
    Messages,
    TemplateArguments,
    TemplateSource,
)
from jaxserve.server.http.fields import (
    MAX_SEQUENCES,
    POOLED_IDS,
    PROMPT_TEXT,
    ModelName,
    Name,
    Null,
    NullOrEmptyList,
    NullOrEmptyObject,
    NullOrFalse,
    NullOrOne,
    NullOrTrue,
    Priority,
    Text,
    accepts_only,
    one_of,
    prompt_schema,
)

_IN_TEXT = "describe it in a text"
_ADAPTER = "serve a checkpoint that has the adapter merged in"
_IDS = "this route takes texts; send them as text_1 and text_2"
_LABELS = "serve a reranker or a classifier, whose labels are those tokens, and send text_1 and text_2"
_SPLIT = "documents aren't split; shorten them with max_tokens_per_doc"
_FLOATS = "numbers are float32, in little-endian order"

_Truncation = Annotated[int, Meta(ge=-1, extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1}]})]
_Most = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_SEQUENCES)]
_Documents = Text | Annotated[list[Text | dict[str, Any]], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class PooledFields(InertFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of all these routes: vLLM's, then what SGLang adds.

    A text that is longer than `truncate_prompt_tokens`, or with -1 than the model takes, loses its end, or its
    beginning if `truncation_side` is left; without it, a text that is too long is an error.
    """

    model: ModelName | None = None
    truncate_prompt_tokens: _Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: Text | None = None
    request_id: Name | None = None
    rid: Name | None = None

    padding: Annotated[Any, accepts_only("do_not_pad", advice="texts need no padding")] = None
    mm_processor_kwargs: NullOrEmptyObject = None
    lora_path: Annotated[Any, accepts_only("", advice=_ADAPTER)] = None
    embed_overrides: Null = None
    embed_override_token_id: Null = None

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The ids that the client gave the request."""
        return tuple(name for name in (self.rid, self.request_id) if name is not None)

    def response_id(self, kind: str, http_id: str) -> str:
        """Return the id of the response: from the body if it has one, else from `http_id`, the X-Request-Id."""
        return self.rid or f"{kind}-{self.request_id or http_id}"


class TextFields(PooledFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of routes that take texts or ids (`input`), or a conversation (`messages`), which becomes one text."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (one_of("input", "messages"), CONTINUE_FINAL_MESSAGE)

    input: Annotated[str | list[str | int | list[int]], prompt_schema(PROMPT_TEXT, POOLED_IDS)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: TemplateSource | None = None
    chat_template_kwargs: TemplateArguments | None = None
    escape_marks: bool | None = None

    media_io_kwargs: NullOrEmptyObject = None


class VectorFields(TextFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of routes that answer with vectors. `prompt_name` names a prompt of the model, "" none.

    `normalize` and vLLM's `use_activation` say the same of embeddings.
    """

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    embed_dtype: Annotated[Any, accepts_only("float32", advice=_FLOATS)] = None
    endianness: Annotated[Any, accepts_only("native", "little", advice=_FLOATS)] = None

    def normalizes(self) -> bool | None:
        """Return whether vectors are normalized, None if that isn't said. Raises `InvalidRequestError`."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError(
                "normalize and use_activation say different things: send one of them", param="normalize"
            )
        return self.use_activation if self.normalize is None else self.normalize


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/embeddings`."""


class PoolingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/pooling`. `task` must be what the model does; its vectors are embeddings, of texts or of their
    tokens, or values of labels."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyRequest(TextFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/classify`. With `use_activation` false, `probs` are logits."""

    use_activation: bool | None = None

    text: Annotated[Any, accepts_only(advice="send it as input, or to /encode")] = None
    input_ids: Annotated[Any, accepts_only(advice="send them as input, or to /encode")] = None


class PairFields(PooledFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of routes that compare queries with documents. `instruct` is SGLang's name of `instruction`."""

    instruction: Text | None = None
    instruct: Text | None = None
    chat_template_kwargs: TemplateArguments | None = None
    max_tokens_per_query: _Most | None = None
    max_tokens_per_doc: _Most | None = None
    use_activation: bool | None = None

    def asked(self) -> tuple[str, str] | None:
        """Return the field of the instruction and the instruction, if there is one."""
        if self.instruction is not None and self.instruct is not None:
            raise InvalidRequestError("instruct and instruction are the same: send one of them", param="instruct")
        if self.instruct is not None:
            return "instruct", self.instruct
        return None if self.instruction is None else ("instruction", self.instruction)


class RerankRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/rerank`, `/v2/rerank` and `/rerank`. A document is a text, or an object with the field `text` or
    with the fields that `rank_fields` names. `top_n` 0 means all."""

    query: Text
    documents: _Documents
    top_n: _Most | None = None
    return_documents: bool | None = None
    rank_fields: Annotated[list[Name], Meta(min_length=1, max_length=64)] | None = None

    max_chunks_per_doc: Annotated[Any, accepts_only(1, advice=_SPLIT)] = None
    relevant_spans: Null = None


class ScoreRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/score` and `/score`: one text or several, and as many others, or any number for one."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        one_of("text_1", "data_1", "queries"),
        one_of("text_2", "data_2", "documents", "items"),
    )

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None

    query: Annotated[Any, accepts_only(advice="send it as text_1")] = None
    label_token_ids: Annotated[Any, accepts_only([], advice=_LABELS)] = None
    apply_softmax: NullOrFalse = None
    temperature: NullOrOne = None
    item_first: NullOrFalse = None
    return_token_logprobs: NullOrFalse = None
    return_pooled_hidden_states: NullOrFalse = None
    score_extraction_token: Null = None
    query_embed_overrides: Null = None
    item_embed_overrides: Null = None

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Return the fields and texts of both sides. Raises `InvalidRequestError`."""
        for first, seconds in _SIDES.items():
            one = getattr(self, first)
            found = [(name, texts) for name in seconds if (texts := getattr(self, name)) is not None]
            if one is None or not found:
                continue
            others = {*_SIDES, *(name for names in _SIDES.values() for name in names)} - {first, found[0][0]}
            if extra := sorted(name for name in others if getattr(self, name) is not None):
                raise InvalidRequestError(f"{extra[0]} can't be sent with {first}", param=extra[0])
            (second, other) = found[0]
            left, right = ([each] if isinstance(each, str) else list(each) for each in (one, other))
            if len(left) not in (1, len(right)):
                raise InvalidRequestError(
                    f"{first} has {len(left)} texts and {second} {len(right)}: give one {first} for all, or one for "
                    "each",
                    param=first,
                )
            return (first, left), (second, right)
        raise InvalidRequestError(
            "Give text_1 and text_2, or queries and documents, or data_1 and data_2", param="text_1"
        )


_SIDES = {"text_1": ("text_2",), "queries": ("documents", "items"), "data_1": ("data_2",)}


class EncodeRequest(InertFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/encode`, SGLang's: `text` or `input_ids`, one or a list, and an id (`rid`) for all or for each."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (one_of("text", "input_ids"),)

    model: ModelName | None = None
    text: Annotated[str | list[str], prompt_schema(PROMPT_TEXT)] | None = None
    input_ids: Annotated[list[int | list[int]], prompt_schema(POOLED_IDS)] | None = None
    rid: Name | Annotated[list[Name], Meta(min_length=1, max_length=MAX_SEQUENCES)] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    priority: Priority | None = None

    sampling_params: NullOrEmptyObject = None
    input_embeds: Annotated[Any, accepts_only(advice="send text or input_ids")] = None
    image_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    video_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    audio_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    modalities: NullOrEmptyList = None
    is_cross_encoder_request: Annotated[Any, accepts_only(False, advice="send pairs to /v1/score")] = None
    lora_path: Annotated[Any, accepts_only("", advice=_ADAPTER)] = None
    lora_id: Annotated[Any, accepts_only("", advice=_ADAPTER)] = None
    embed_overrides: Null = None
    embed_override_token_id: Null = None
    positional_embed_overrides: Null = None
    return_pooled_hidden_states: NullOrFalse = None
    return_prompt_token_ids: Annotated[Any, accepts_only(False, advice="/tokenize gives them")] = None
    multi_item_delimiter_indices: NullOrEmptyList = None
    log_metrics: NullOrTrue = None
    routing_key: Null = None
    http_worker_ipc: Null = None
    external_trace_header: Null = None
    received_time: Null = None
