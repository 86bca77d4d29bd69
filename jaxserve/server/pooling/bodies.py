"""The response bodies of the routes that pool. Owns shapes only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PooledUsage(msgspec.Struct):
    """The token counts of a request; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(msgspec.Struct):
    """One embedding: numbers, or in base64 their float32 bytes in little-endian order."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/embeddings`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PooledUsage


class PoolingObject(msgspec.Struct):
    """One vector, or one of each token, written as embeddings are."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct, kw_only=True):
    """The response of `/pooling`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingObject]
    usage: PooledUsage


class ClassifyObject(msgspec.Struct):
    """The values of all labels of one text, and the label of the largest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """The response of `/classify`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyObject]
    usage: PooledUsage


class ScoreObject(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreObject]
    usage: PooledUsage


class RerankResult(msgspec.Struct):
    """A document, by its `index` among those of the request. `document` is as it came; a text is an object with it."""

    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class BilledUnits(msgspec.Struct):
    """Cohere's units of searches: a query with up to 100 documents is one."""

    search_units: int


class RerankTokens(msgspec.Struct):
    """Cohere's token counts."""

    input_tokens: int
    output_tokens: int = 0


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API whose form a response has."""

    version: str = "2"


class RerankMeta(msgspec.Struct):
    """What Cohere's clients read."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: RerankTokens


class RerankResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/rerank`: the best documents first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]
    meta: RerankMeta


class EncodeMeta(msgspec.Struct):
    """Facts about one text. `cached_tokens` counts those found in the prefix cache, `e2e_latency` is in seconds."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float


class EncodeOutput(msgspec.Struct):
    """The vector of one text, or one of each of its tokens."""

    embedding: list[float | list[float]]
    meta_info: EncodeMeta
