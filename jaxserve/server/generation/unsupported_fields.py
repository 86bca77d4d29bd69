"""The fields of vLLM's and SGLang's requests that are not supported here.

Gateways (sglang-router, vllm-router) send every field with its default. So a value without an effect is accepted, and
any other is refused with the field's name and what to do instead. The types say which values are accepted: a
`NullOrFalse` field may be null or false. Owns no supported field; unsupported fields of only one OpenAI route are in
`openai/protocol.py`, and those of all APIs in `inert_fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from jaxserve.server.generation.inert_fields import InertFields
from jaxserve.server.http.fields import (
    Null,
    NullOrEmptyList,
    NullOrEmptyObject,
    NullOrFalse,
    NullOrTrue,
    NullOrZero,
    accepts_only,
)

_IN_TEXT = "describe it in a text"
_FORM = "hold the answer with structured_outputs, or its tokens with logit_bias"
_TURNS = "send the whole prompt; the prefix cache finds its beginning"
_BEAMS = "sample several answers with n, or send temperature: 0"
_ADAPTER = "serve a checkpoint that has the adapter merged in"
_PROMPT = "/v1/completions gives them with echo and logprobs, /generate with logprob_start_len"


class UnsupportedFields(InertFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of all of SGLang's generating routes."""

    lora_path: Annotated[Any, accepts_only("", advice=_ADAPTER)] = None
    session_id: Annotated[Any, accepts_only(advice=_TURNS)] = None
    session_params: Annotated[Any, accepts_only({}, advice=_TURNS)] = None
    custom_logit_processor: Annotated[Any, accepts_only("", advice=_FORM)] = None
    custom_labels: NullOrEmptyObject = None
    extra_key: Annotated[Any, accepts_only("", advice="chat and completions take cache_salt")] = None
    return_hidden_states: NullOrFalse = None
    return_routed_experts: NullOrFalse = None
    routed_experts_start_len: NullOrZero = None
    return_prompt_token_ids: Annotated[Any, accepts_only(False, advice="/tokenize gives them")] = None
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
    """The fields of both completions and chat: vLLM's, then SGLang's."""

    use_beam_search: Annotated[Any, accepts_only(False, advice=_BEAMS)] = None
    length_penalty: Annotated[Any, accepts_only(1, advice="bound the answer with max_tokens")] = None
    prompt_logprobs: Annotated[Any, accepts_only(advice=_PROMPT)] = None
    logprob_token_ids: Annotated[Any, accepts_only([], advice="ask for the best tokens with logprobs")] = None
    truncate_prompt_tokens: Annotated[Any, accepts_only(advice="shorten the prompt; /tokenize counts its tokens")] = (
        None
    )
    truncation_side: Null = None
    allowed_token_ids: Annotated[Any, accepts_only(advice=_FORM)] = None
    bad_words: Annotated[Any, accepts_only([], advice="lower their tokens with logit_bias")] = None
    spaces_between_special_tokens: NullOrTrue = None
    logits_processors: Annotated[Any, accepts_only([], advice=_FORM)] = None
    kv_transfer_params: NullOrEmptyObject = None
    ec_transfer_params: NullOrEmptyObject = None
    vllm_xargs: NullOrEmptyObject = None
    repetition_detection: Null = None
    watermarking: NullOrFalse = None
    return_token_offsets: NullOrFalse = None
    return_mm_kwargs: NullOrTrue = None
    routed_experts_prompt_start: NullOrZero = None

    custom_params: NullOrEmptyObject = None
    sampling_seed: Annotated[Any, accepts_only(advice="send it as seed")] = None
    return_cached_tokens_details: NullOrFalse = None


class UnsupportedGenerateFields(UnsupportedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of `/generate` only."""

    input_embeds: Annotated[Any, accepts_only(advice="send text or input_ids")] = None
    positional_embed_overrides: Null = None
    image_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    video_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    audio_data: Annotated[Any, accepts_only([], advice=_IN_TEXT)] = None
    mm_hashes: NullOrEmptyList = None
    mm_content_hashes: NullOrEmptyList = None
    modalities: NullOrEmptyList = None
    video_config: Null = None
    image_max_dynamic_patch: Null = None
    video_max_dynamic_patch: Null = None
    token_ids_logprob: Annotated[Any, accepts_only([], advice="ask for the best tokens with top_logprobs_num")] = None
    return_sampling_mask: NullOrFalse = None
    return_flat_raw_top_logprobs: NullOrFalse = None
    return_flat_raw_top_logprobs_b64: NullOrFalse = None
    return_indexer_topk: NullOrFalse = None
    return_bytes: NullOrFalse = None
    return_entropy: NullOrFalse = None
    log_metrics: NullOrTrue = None
    no_logs: NullOrFalse = None
    require_reasoning: NullOrFalse = None
    max_thinking_tokens: Annotated[Any, accepts_only(advice="chat takes thinking_token_budget")] = None
    lora_id: Annotated[Any, accepts_only("", advice=_ADAPTER)] = None
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
    beam_width: Annotated[Any, accepts_only(1, advice=_BEAMS)] = None
