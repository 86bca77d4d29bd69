"""The settings of the HTTP server. Field names are flags (`--host`) and YAML keys; descriptions are the help texts.

None means "chosen at start-up". Checks that need no file are made here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.config.metric_settings import check_metric_settings
from jaxserve.config.ranges import SERVER_RANGES, check_ranges
from jaxserve.config.sampling_defaults import read_override
from jaxserve.errors import ConfigError

SHARED_SERVER_SETTINGS = frozenset(
    {
        "chat_template",
        "escape_marks",
        "default_chat_template_kwargs",
        "chat_template_content_format",
        "generation_config",
        "override_generation_config",
        "max_logprobs",
        "constrained_json_whitespace_pattern",
        "constrained_json_disable_any_whitespace",
    }
)
"""The settings of the server that `LLM` has too."""

SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password", "hf_token"})
"""The settings whose values are masked wherever settings are shown."""

_NEED_CERTIFICATE = (
    "ssl_keyfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "enable_ssl_refresh",
)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server. Raises `ConfigError` naming the field and the limit."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 chooses a free one")] = 8000
    uds: Annotated[
        str | None, Meta(description="path of a Unix domain socket to listen on; host and port are ignored then")
    ] = None
    root_path: Annotated[
        str,
        Meta(description="path under which a proxy forwards to this server, such as /llm; requests may begin with it"),
    ] = ""
    ssl_certfile: Annotated[str | None, Meta(description="PEM file of the certificate; HTTPS is served")] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="PEM file of the certificate's key; default: in ssl_certfile")
    ] = None
    ssl_keyfile_password: Annotated[str | None, Meta(description="password of ssl_keyfile")] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="PEM file of the authorities whose client certificates are accepted")
    ] = None
    ssl_cert_reqs: Annotated[
        int, Meta(description="certificates of clients; 0: not asked for; 1: checked if sent; 2: required")
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="ciphers of TLS up to 1.2, in OpenSSL's form; default: Python's")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="read the files of TLS again when they change, for new connections")
    ] = False
    served_model_name: Annotated[
        str | None, Meta(description="model name in /v1/models and in responses; default: --model as given")
    ] = None
    api_key: Annotated[str | None, Meta(description="bearer key required by /v1 and the admin routes")] = None
    admin_api_key: Annotated[
        str | None,
        Meta(description="bearer key of the admin routes, which api_key then doesn't open; default: api_key"),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="origins whose pages may call this server from a browser (CORS), * for all; default: none"),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Meta(description="methods that pages of allowed_origins may use, * for all")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Meta(description="headers that pages of allowed_origins may send, * for all")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="let pages of allowed_origins send cookies and HTTP authentication")
    ] = False
    chat_template: Annotated[
        str | None,
        Meta(
            description="chat template to use instead of the model's default one: a Jinja file, or the name of another "
            "of the model's templates; qwen3_reranker: the model card's form of a query and a document"
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="arguments of the chat template as JSON, for requests whose chat_template_kwargs lack them"),
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="how the template gets contents; string: as texts, parts joined; openai: as lists of parts; "
            "auto: as the template reads them"
        ),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, Meta(description="let requests bring their own chat_template; it runs with limits on time and memory")
    ] = False
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        Meta(description="pattern of the whitespace in JSON answers, for requests that name none, such as [ \\n]?"),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, Meta(description="write JSON answers without whitespace, for requests that don't say")
    ] = False
    allow_auto_truncate: Annotated[
        bool,
        Meta(description="cut off the end of prompts that are too long for the context, instead of refusing them"),
    ] = False
    abort_on_priority_when_disabled: Annotated[
        bool, Meta(description="answer 503 to requests that name a priority, unless schedule_policy is priority")
    ] = False
    fingerprint_mode: Annotated[
        Literal["none", "full", "hash", "custom"],
        Meta(
            description="system_fingerprint of answers; none: null; hash: the version and a hash of the engine's "
            "settings; full: the sizes of the mesh, too; custom: fingerprint_value"
        ),
    ] = "none"
    fingerprint_value: Annotated[str | None, Meta(description="system_fingerprint with fingerprint_mode custom")] = None
    weight_version: Annotated[str, Meta(description="version of the weights, in /model_info and /generate")] = "default"
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="serve /tokenizer_info: the tokenizer's special tokens and the chat template")
    ] = False
    response_role: Annotated[str, Meta(description="role of the answers of /v1/chat/completions")] = "assistant"
    generation_config: Annotated[
        str,
        Meta(
            description="sampling options of requests that name none; auto: those of the checkpoint's "
            "generation_config.json; vllm: neutral ones; or a folder with that file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        Meta(
            description='sampling options over those of generation_config, as JSON, such as {"temperature": 0.6}; '
            "max_new_tokens limits all answers of a server"
        ),
    ] = None
    max_logprobs: Annotated[
        int, Meta(description="most alternatives to each token whose log probabilities a request may ask for")
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="write tokens of log probabilities as token_id:ID, so that each has a name of its own")
    ] = False
    stream_response_default_include_usage: Annotated[
        bool, Meta(description="end every stream of chat and completions with the token counts")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Meta(
            description="end every stream of chat and completions with the token counts, and let every chunk have "
            "those so far"
        ),
    ] = False
    stream_interval: Annotated[
        int, Meta(description="tokens of a sequence that a chunk of a stream has at least, but for the first and last")
    ] = 1
    incremental_streaming_output: Annotated[
        bool, Meta(description="let each chunk of a stream of /generate have its own text only, not all text so far")
    ] = False
    sse_keep_alive_interval: Annotated[
        float, Meta(description="seconds of silence after which a stream has a comment, so that proxies wait; 0: never")
    ] = 0.0
    escape_marks: Annotated[
        bool, Meta(description="encode special tokens that are spelled in the texts of a conversation as ordinary text")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(description="how the model writes calls of tools, such as hermes or mistral; default: its template says"),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(description="how the model marks reasoning, such as deepseek_r1; default: its template says"),
    ] = None
    keep_billing_header: Annotated[
        bool,
        Meta(
            description="keep a first system block that begins with x-anthropic-billing-header: in /v1/messages, "
            "though it changes with each request, so that no prompt finds another's prefix in the cache"
        ),
    ] = False
    default_thinking_budget: Annotated[
        int,
        Meta(
            description="tokens of reasoning after which the answer must follow, for chats that name none; -1: no bound"
        ),
    ] = -1
    max_stored_responses: Annotated[
        int, Meta(description="number of /v1/responses that are kept in memory, to be continued or read by id; 0: none")
    ] = 1000
    max_stored_response_bytes: Annotated[
        int, Meta(description="most bytes of all responses that are kept; the least recently used are forgotten first")
    ] = 256 * 2**20
    stored_response_seconds: Annotated[
        float, Meta(description="seconds for which a response is kept after its last use")
    ] = 3600.0
    api_server_count: Annotated[
        int, Meta(description="number of processes that answer HTTP, on one port; more than 1 need a processor each")
    ] = 1
    metrics_prefix: Annotated[
        tuple[str, ...],
        Meta(description="engines under whose names /metrics has its series too, for their dashboards; vllm, sglang"),
    ] = ()
    extra_metric_labels: Annotated[
        dict[str, Any] | None, Meta(description="labels of all series of /metrics, as JSON")
    ] = None
    custom_histogram_buckets: Annotated[
        dict[str, Any] | None,
        Meta(
            description='bounds of histograms of /metrics, as JSON, such as {"time_to_first_token_seconds": [0.1, 0.5]}'
        ),
    ] = None
    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Meta(
            description="severity from which the lines on HTTP are written; each answered request has one at info; "
            "default: only with log_level debug"
        ),
    ] = None
    access_log_exclude: Annotated[
        tuple[str, ...], Meta(description="paths, and all paths below them, whose requests have no line in the log")
    ] = ()
    log_requests: Annotated[bool, Meta(description="log each request, and its end")] = False
    log_requests_level: Annotated[
        int,
        Meta(
            description="what log_requests logs; 0: ids, counts and times; 1: sampling options, too; 2: the first "
            "characters of prompts and answers, too; 3: the whole texts"
        ),
    ] = 1
    log_requests_format: Annotated[Literal["text", "json"], Meta(description="form of the lines of log_requests")] = (
        "text"
    )
    log_requests_target: Annotated[
        tuple[str, ...],
        Meta(description="where the lines of log_requests go: stdout, or folders with a file each; default: the log"),
    ] = ()
    max_log_len: Annotated[
        int | None,
        Meta(description="most characters of each prompt and answer in log_requests; default: 2048 at level 2"),
    ] = None
    log_error_stack: Annotated[
        bool, Meta(description="log the traceback of each error that a request is answered with")
    ] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="don't serve /openapi.json")] = False
    max_body_bytes: Annotated[int, Meta(description="maximum size of a request body; larger ones are answered 413")] = (
        16 * 2**20
    )
    max_header_bytes: Annotated[
        int, Meta(description="maximum size of a request's target and headers; larger ones are answered 431")
    ] = 64 * 2**10
    request_read_timeout: Annotated[
        float, Meta(description="seconds a request's headers and body may take to arrive, else it is answered 408")
    ] = 60.0
    keep_alive_timeout: Annotated[
        float, Meta(description="seconds a connection stays open after a response, for the next request")
    ] = 5.0
    drain_timeout: Annotated[float, Meta(description="seconds that open requests may take to finish after SIGTERM")] = (
        30.0
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if not self.response_role:
            raise ConfigError("response_role is empty; give a role such as assistant, or leave it out")
        if not self.allowed_origins and (
            (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (("*",), ("*",), False)
        ):
            raise ConfigError("allowed_methods, allowed_headers and allow_credentials need allowed_origins")
        self._check_listening()
        check_metric_settings(self.metrics_prefix, self.extra_metric_labels, self.custom_histogram_buckets)
        read_override(self.override_generation_config or {})
        if not self.log_requests and (
            (self.log_requests_level, self.log_requests_format, self.log_requests_target, self.max_log_len)
            != (1, "text", (), None)
        ):
            raise ConfigError(
                "log_requests_level, log_requests_format, log_requests_target and max_log_len need log_requests"
            )
        if not all(self.log_requests_target):
            raise ConfigError("log_requests_target has an empty text; name stdout or a folder")
        if (self.fingerprint_mode == "custom") != (self.fingerprint_value is not None):
            raise ConfigError(
                "fingerprint_mode custom needs a fingerprint_value, and no other mode takes one: got fingerprint_mode "
                f"{self.fingerprint_mode} with fingerprint_value {self.fingerprint_value!r}"
            )
        if self.constrained_json_disable_any_whitespace and self.constrained_json_whitespace_pattern is not None:
            raise ConfigError(
                "constrained_json_whitespace_pattern and constrained_json_disable_any_whitespace are both set, which "
                "contradict each other: leave one out"
            )
        check_ranges(self, SERVER_RANGES)

    def _check_listening(self) -> None:
        if self.uds == "":
            raise ConfigError("uds must be a path, got an empty text")
        if self.root_path and re.fullmatch(r"(/[\w.~%@+-]+)+", self.root_path) is None:
            raise ConfigError(f"root_path must be a path such as /llm, not ending with /, got {self.root_path!r}")
        if self.admin_api_key == "":
            raise ConfigError("admin_api_key must not be empty: set a key, or leave it out")
        for path in self.access_log_exclude:
            if not path.startswith("/"):
                raise ConfigError(f"access_log_exclude must have paths that begin with /, got {path!r}")
        if self.ssl_certfile is None and (names := [name for name in _NEED_CERTIFICATE if getattr(self, name)]):
            raise ConfigError(
                f"set ssl_certfile too: without it plain HTTP is served, which has no use for {', '.join(names)}"
            )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, the authorities that clients' certificates "
                "must be from"
            )
