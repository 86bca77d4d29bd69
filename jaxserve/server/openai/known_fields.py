"""The fields of OpenAI's, vLLM's and SGLang's requests that are known here and not built.

Clients and gateways (sglang-router, vllm-router) write out every field with its default. So a value that asks for
nothing passes, one that asks for something is refused by name, and a field that nobody knows is a 400. The types are
that table: `NullOrFalse` is a field that may be null or false. Owns no field that does something; those of one OpenAI
route alone stand with it, in `openai/protocol.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from jaxserve.server.http.fields import (
    Null,
    NullOrFalse,
    NullOrNoList,
    NullOrNoObject,
    NullOrNoText,
    NullOrOne,
    NullOrTrue,
    NullOrZero,
    only,
)


class Known(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What SGLang takes on all of its generating routes, and its gateway or a client may write out."""

    lora_path: NullOrNoText = None
    session_id: Null = None
    session_params: NullOrNoObject = None
    custom_logit_processor: NullOrNoText = None
    custom_labels: NullOrNoObject = None
    extra_key: NullOrNoText = None
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


class KnownOpenAI(Known, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common: OpenAI's, vLLM's, then SGLang's."""

    store: NullOrFalse = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None

    use_beam_search: NullOrFalse = None
    length_penalty: NullOrOne = None
    prompt_logprobs: Null = None
    logprob_token_ids: NullOrNoList = None
    truncate_prompt_tokens: Null = None
    truncation_side: Null = None
    allowed_token_ids: Null = None
    bad_words: NullOrNoList = None
    spaces_between_special_tokens: NullOrTrue = None
    structured_outputs: Null = None
    guided_json: Null = None
    guided_regex: Null = None
    guided_choice: NullOrNoList = None
    guided_grammar: Null = None
    guided_decoding_backend: Null = None
    guided_whitespace_pattern: Null = None
    logits_processors: NullOrNoList = None
    kv_transfer_params: NullOrNoObject = None
    ec_transfer_params: NullOrNoObject = None
    vllm_xargs: NullOrNoObject = None
    repetition_detection: Null = None
    thinking_token_budget: Annotated[Any, only(-1)] = None
    stream_interval: NullOrOne = None
    watermarking: NullOrFalse = None
    return_tokens_as_token_ids: NullOrFalse = None
    return_token_offsets: NullOrFalse = None
    return_mm_kwargs: NullOrTrue = None
    routed_experts_prompt_start: NullOrZero = None

    regex: Null = None
    ebnf: Null = None
    json_schema: Null = None
    structural_tag: Null = None
    custom_params: NullOrNoObject = None
    sampling_seed: Null = None
    return_cached_tokens_details: NullOrFalse = None


class KnownGenerate(Known, kw_only=True, forbid_unknown_fields=True):
    """`/generate` alone."""

    input_embeds: Null = None
    positional_embed_overrides: Null = None
    image_data: NullOrNoList = None
    video_data: NullOrNoList = None
    audio_data: NullOrNoList = None
    mm_hashes: NullOrNoList = None
    mm_content_hashes: NullOrNoList = None
    modalities: NullOrNoList = None
    video_config: Null = None
    image_max_dynamic_patch: Null = None
    video_max_dynamic_patch: Null = None
    token_ids_logprob: NullOrNoList = None
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
    lora_id: NullOrNoText = None
    conversation_id: Null = None
    routing_key: Null = None
    decode_tp_size: Null = None
    kv_router_hint: Null = None
    external_trace_header: Null = None
    received_time: Null = None
    http_worker_ipc: Null = None
    need_wait_for_mm_inputs: NullOrFalse = None
    num_items_assigned: NullOrNoObject = None
    encoder_urls: NullOrNoList = None
    multi_item_delimiter_indices: NullOrNoList = None


class KnownSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of `/generate`."""

    json_schema: Null = None
    regex: Null = None
    ebnf: Null = None
    structural_tag: Null = None
    custom_params: NullOrNoObject = None
    spaces_between_special_tokens: NullOrTrue = None
    beam_width: NullOrOne = None
    stream_interval: NullOrOne = None
