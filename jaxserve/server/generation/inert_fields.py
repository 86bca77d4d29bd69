"""The fields by which clients speak to the service behind an API, and not to its model: for billing, routing, caches.

Clients of OpenAI's chat and Responses, Anthropic's Messages and OpenRouter send them, and gateways pass them from one
API to another, so all routes that generate take them all. A field of type `Any` is inert: its value can't change the
answer. Any other is accepted while it asks for nothing, and refused otherwise. A route where a field means something
defines it again in its own type.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from jaxserve.server.http.fields import (
    Null,
    NullOrEmptyList,
    NullOrEmptyObject,
    NullOrFalse,
    accepts_only,
)

_ONE_MODEL = "one model is served, named by model; leave it out"
_OWN_TOOLS = "the server runs no tools; offer your own in tools of a chat, and run the calls yourself"
_WHOLE = "send the whole conversation with each request"
_SHORTEN = "shorten the conversation yourself"


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenRouter's question for token counts. Streams of chat and completions have them only if asked for."""

    include: bool | None = None


class InertFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a request: OpenAI's, Anthropic's, OpenRouter's, and a client's own settings that reach the body."""

    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Annotated[Any, accepts_only("auto", "default", "standard_only")] = None
    store: Annotated[Any, accepts_only(False, advice=f"nothing is stored: {_WHOLE}")] = None
    background: Annotated[Any, accepts_only(False, advice="stream the response, or wait for it")] = None
    background_options: NullOrEmptyObject = None
    include: NullOrEmptyList = None
    moderation: Null = None
    access_programs: NullOrEmptyObject = None
    previous_response_id: Annotated[Any, accepts_only(advice=_WHOLE)] = None
    conversation: Annotated[Any, accepts_only(advice=_WHOLE)] = None
    truncation: Annotated[Any, accepts_only("disabled", advice=_SHORTEN)] = None
    web_search_options: Annotated[Any, accepts_only({}, advice=_OWN_TOOLS)] = None

    cache_control: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    betas: Any = None
    anthropic_beta: Any = None
    anthropic_version: Any = None
    container: Annotated[Any, accepts_only(advice=_OWN_TOOLS)] = None
    inference_geo: Null = None
    speed: Annotated[Any, accepts_only("standard")] = None
    mcp_servers: Annotated[Any, accepts_only([], advice=_OWN_TOOLS)] = None
    billing_policy: Null = None
    compaction: Annotated[Any, accepts_only(advice=_SHORTEN)] = None
    context_management: Annotated[Any, accepts_only([], {}, advice=_SHORTEN)] = None
    fallbacks: NullOrEmptyList = None
    fallback_credit_token: Null = None
    thread: Annotated[Any, accepts_only(advice=_WHOLE)] = None

    trace: Any = None
    models: Annotated[Any, accepts_only([], advice=_ONE_MODEL)] = None
    provider: Annotated[Any, accepts_only({}, advice=_ONE_MODEL)] = None
    route: Annotated[Any, accepts_only("fallback", advice=_ONE_MODEL)] = None
    preset: Null = None
    plugins: Annotated[Any, accepts_only([], advice=_OWN_TOOLS)] = None
    transforms: Annotated[Any, accepts_only([], advice=_SHORTEN)] = None
    usage: UsageOptions | None = None

    provider_specific_fields: NullOrEmptyObject = None
    extra_body: Annotated[Any, accepts_only({}, advice="send its fields beside the others")] = None
    extra_headers: Annotated[Any, accepts_only({}, advice="send them as headers")] = None
    extra_query: NullOrEmptyObject = None
    timeout: Annotated[Any, accepts_only(advice="close the connection to end a request")] = None


class InertToolFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a tool, wherever the API has them: beside its type or in its function."""

    cache_control: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    output_schema: Any = None
    is_async: NullOrFalse = msgspec.field(default=None, name="async")
    provider_specific_fields: NullOrEmptyObject = None
