"""The fields of OpenAI's, vLLM's and SGLang's requests that are not supported here.

Clients and gateways (sglang-router, vllm-router) send every field with its default. So a value without an effect is
accepted, and any other is refused with the field's name. The types say which values are accepted: a `NullOrFalse` field
may be null or false. Owns no supported field; unsupported fields of only one OpenAI route are in `openai/protocol.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from jaxserve.server.http.fields import (
    Null,
    NullOrEmptyList,
    NullOrEmptyObject,
    NullOrEmptyText,
    NullOrFalse,
    NullOrOne,
    NullOrTrue,
    NullOrZero,
    accepts_only,
)


class UnsupportedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all of SGLang's generating routes."""

    lora_path: NullOrEmptyText = None
    session_id: Null = None
    session_params: NullOrEmptyObject = None
    custom_logit_processor: NullOrEmptyText = None
    custom_labels: NullOrEmptyObject = None
    extra_key: NullOrEmptyText = None
    return_hidden_states: NullOrFalse = None
    return_routed_experts: NullOrFalse = None
    routed_experts_start_len: NullOrZero = None
    return_prompt_token_ids: NullOrFalse = None
    bootstrap_host: Null = None
    bootstrap_port: Null = None
    bootstrap_room: Null = None
    bootstrap_pair_key: Null = None
    data_parallel_rank: Null = None
    routed_dp_rank: Null = None
    disagg_prefill_dp_rank: Null = None
    routing_id: Null = None
    images_config: Null = None
    max_dynamic_patch: Null = None
    min_dynamic_patch: Null = None
    use_audio_in_video: NullOrFalse = None
    ngram_corpus_id: Null = None


class UnsupportedOpenAIFields(UnsupportedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of both completions and chat: OpenAI's, then vLLM's, then SGLang's."""

    store: NullOrFalse = None
    service_tier: Annotated[Any, accepts_only("auto", "default")] = None

    use_beam_search: NullOrFalse = None
    length_penalty: NullOrOne = None
    prompt_logprobs: Null = None
    logprob_token_ids: NullOrEmptyList = None
    truncate_prompt_tokens: Null = None
    truncation_side: Null = None
    allowed_token_ids: Null = None
    bad_words: NullOrEmptyList = None
    spaces_between_special_tokens: NullOrTrue = None
    logits_processors: NullOrEmptyList = None
    kv_transfer_params: NullOrEmptyObject = None
    ec_transfer_params: NullOrEmptyObject = None
    vllm_xargs: NullOrEmptyObject = None
    repetition_detection: Null = None
    stream_interval: NullOrOne = None
    watermarking: NullOrFalse = None
    return_tokens_as_token_ids: NullOrFalse = None
    return_token_offsets: NullOrFalse = None
    return_mm_kwargs: NullOrTrue = None
    routed_experts_prompt_start: NullOrZero = None

    custom_params: NullOrEmptyObject = None
    sampling_seed: Null = None
    return_cached_tokens_details: NullOrFalse = None


class UnsupportedGenerateFields(UnsupportedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of `/generate` only."""

    input_embeds: Null = None
    positional_embed_overrides: Null = None
    image_data: NullOrEmptyList = None
    video_data: NullOrEmptyList = None
    audio_data: NullOrEmptyList = None
    mm_hashes: NullOrEmptyList = None
    mm_content_hashes: NullOrEmptyList = None
    modalities: NullOrEmptyList = None
    video_config: Null = None
    image_max_dynamic_patch: Null = None
    video_max_dynamic_patch: Null = None
    token_ids_logprob: NullOrEmptyList = None
    return_sampling_mask: NullOrFalse = None
    return_flat_raw_top_logprobs: NullOrFalse = None
    return_flat_raw_top_logprobs_b64: NullOrFalse = None
    return_indexer_topk: NullOrFalse = None
    return_bytes: NullOrFalse = None
    return_entropy: NullOrFalse = None
    log_metrics: NullOrTrue = None
    no_logs: NullOrFalse = None
    background: NullOrFalse = None
    require_reasoning: NullOrFalse = None
    max_thinking_tokens: Null = None
    lora_id: NullOrEmptyText = None
    conversation_id: Null = None
    routing_key: Null = None
    decode_tp_size: Null = None
    kv_router_hint: Null = None
    external_trace_header: Null = None
    received_time: Null = None
    http_worker_ipc: Null = None
    need_wait_for_mm_inputs: NullOrFalse = None
    num_items_assigned: NullOrEmptyObject = None
    encoder_urls: NullOrEmptyList = None
    multi_item_delimiter_indices: NullOrEmptyList = None


class UnsupportedSamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `sampling_params` in `/generate`."""

    custom_params: NullOrEmptyObject = None
    spaces_between_special_tokens: NullOrTrue = None
    beam_width: NullOrOne = None
    stream_interval: NullOrOne = None
