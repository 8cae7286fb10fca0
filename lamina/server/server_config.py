"""The server's configuration: frozen, keyword-only, checked where it is made. Flags of ``serve`` come from here."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from lamina.config.conflicts import SSL_CERTFILE, SSL_KEYFILE, check_together
from lamina.config.flag_groups import flag_name
from lamina.config.option import Choices, Options, parse_seconds, parse_size
from lamina.executor.chat_renderer import TemplateLimits
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.overload import NO_LIMITS, OVERLOAD_POLICIES, SloLimits
from lamina.scheduler.conductor.routing import POLICIES

from .memory_limits import MemoryLimits, memory_limits
from .reasoning_parsers import REASONING_PARSERS
from .tool_parsers import TOOL_PARSERS

LOG_LEVELS = ("debug", "info", "warning", "error")


class ServerConfig(Options, frozen=True, kw_only=True):
    """The options of the HTTP server. Lists are separated by commas; 0 or "" switches a feature off by default."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "port to listen on; 0 = any free one, which is printed"] = 8000
    uds: Annotated[str, "Unix socket to listen on instead of host and port"] = ""
    served_model_name: Annotated[
        str, "names that clients may use for the model, separated by commas; empty = MODEL as given"
    ] = ""
    tokenizer: Annotated[str, "a path or hub id; empty = the model's own"] = ""
    generation_config: Annotated[
        str,
        "sampling parameters that requests leave out: auto = the model's generation_config.json, none, or a directory",
    ] = "auto"
    api_key: Annotated[
        str,
        "API keys, separated by commas. Every request needs one, except to /health, /ping and /. LAMINA_API_KEY "
        "sets them out of sight of other users",
    ] = ""
    admin_key: Annotated[
        str,
        "the key that `lamina-launch scale`, `drain` and `cordon` need. LAMINA_ADMIN_KEY sets it out of sight of "
        "other users",
    ] = ""
    ssl_keyfile: Annotated[str, "private key for TLS, a PEM file"] = ""
    ssl_certfile: Annotated[str, "certificate for TLS, a PEM file"] = ""
    allowed_origins: Annotated[
        str, "origins, separated by commas, whose pages may call this server from a browser (CORS)"
    ] = ""
    allowed_hosts: Annotated[
        str, "host names, separated by commas, by which clients may call a server without keys; * = any"
    ] = ""
    max_num_queued_reqs: Annotated[int, Meta(ge=0), "the most completions that may wait; others get status 429"] = 256
    max_num_queued_tokens: Annotated[
        int, Meta(ge=0), "the most prompt tokens that may wait for their first token; other requests get status 429"
    ] = 0
    slo_ttft: Annotated[
        str, "promised time to the first token, such as 2s; a request that would wait longer gets status 429"
    ] = ""
    slo_tbt: Annotated[
        str, "promised time between two tokens, such as 100ms; a request that would make it longer gets status 429"
    ] = ""
    overload: Annotated[
        str, f"when the load of decoding counts for them: {', '.join(OVERLOAD_POLICIES)} (docs/prefill.md)"
    ] = "early"
    prefill_policy: Annotated[
        str, Choices(POLICIES), f"which of --prefill-workers computes a prompt: {', '.join(POLICIES)} (docs/prefill.md)"
    ] = "auto"
    kvcache_balancing_threshold: Annotated[
        float,
        Meta(ge=0),
        "KV of a prompt is transferred from a worker that has more than this many times as much of it",
    ] = 1.5
    max_body: Annotated[str, "size of a request's body"] = "8MiB"
    body_total: Annotated[
        str, "memory of all bodies and prompts together; empty = a 16th of this host's memory (docs/serve.md)"
    ] = ""
    answer_total: Annotated[str, "memory of all answers together; empty = an 8th of this host's memory"] = ""
    max_nesting: Annotated[int, Meta(gt=0), "depth of a request's JSON"] = 64
    max_prompts: Annotated[int, Meta(gt=0), "prompts in a request"] = 256
    max_n: Annotated[int, Meta(gt=0), "completions of a prompt (n)"] = 16
    max_logprobs: Annotated[
        int,
        Meta(ge=-1),
        "alternatives of a token (logprobs, top_logprobs, prompt_logprobs); -1 = up to the whole vocabulary",
    ] = 20
    max_stop: Annotated[int, Meta(ge=0), "stop strings of a request"] = 16
    max_stop_chars: Annotated[int, Meta(ge=0), "characters of a stop string"] = 256
    enable_force_include_usage: Annotated[
        bool, "streams always end with usage, even if a request does not ask for it"
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, "usage always has the number of cached prompt tokens, even if it is 0"
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, "log-probabilities name tokens as token_id:5, unless a request says otherwise"
    ] = False
    enable_tokenizer_info_endpoint: Annotated[bool, "offer GET /tokenizer_info, the tokenizer's configuration"] = False
    server_dev_mode: Annotated[bool, "offer POST /reset_prefix_cache to all clients of this server"] = False
    enable_request_id_headers: Annotated[
        bool, "answers have the header X-Request-Id, with the client's own id if it sends one"
    ] = True
    root_path: Annotated[str, "path that a proxy puts before the server's own, such as /llm"] = ""
    allow_unknown_fields: Annotated[bool, "ignore unknown fields of a body, instead of status 400"] = False
    chat_template: Annotated[str, "a file with a chat template (Jinja) in place of the model's own"] = ""
    chat_template_content_format: Annotated[
        str,
        Choices(("auto", "string", "openai")),
        "the form in which the template gets a message's content: string, openai (a list of parts), or auto (found "
        "from the template)",
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        Choices(("auto", *TOOL_PARSERS)),
        f"the format of tool calls: {', '.join(TOOL_PARSERS)}, or auto, the one that the chat template shows",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Choices(("", *REASONING_PARSERS)),
        f"the format of reasoning, which becomes a field of its own: {', '.join(REASONING_PARSERS)}",
    ] = ""
    template_memory: Annotated[str, "memory that the chat template may take for a request; beyond it, status 400"] = (
        "256MiB"
    )
    max_logit_bias: Annotated[int, Meta(ge=0), "tokens in logit_bias"] = 300
    header_timeout_s: Annotated[float, Meta(gt=0), "seconds for a connection to send a request's headers"] = 10.0
    body_timeout_s: Annotated[float, Meta(gt=0), "seconds for a request's body to arrive"] = 30.0
    template_timeout_s: Annotated[
        float, Meta(gt=0), "seconds that the chat template may run for a request; beyond them, status 400"
    ] = 5.0
    tokenizer_timeout_s: Annotated[
        float, Meta(gt=0), "seconds that the tokenizer may take for a request's long texts; beyond them, status 400"
    ] = 30.0
    slow_reader_timeout_s: Annotated[
        float, Meta(gt=0), "seconds without any progress after which a slow reader is cut off"
    ] = 30.0
    sse_keep_alive_s: Annotated[
        float, Meta(ge=0), "seconds of silence after which a stream gets a comment line; 0 = never"
    ] = 15.0
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0),
        "seconds that requests may take to finish after SIGTERM or Ctrl-C; a second signal ends the server at once",
    ] = 30.0
    health_timeout_s: Annotated[
        float,
        Meta(ge=0),
        "seconds without progress of a step, or without an answer from an idle worker, after which /health gives 503",
    ] = 4.0
    journal: Annotated[str, "directory that records accepted requests, so that the next server can finish them"] = ""
    journal_size: Annotated[
        str, "its approximate size; when it is full, the oldest half is deleted, with its answers"
    ] = "64MiB"
    dashboard: Annotated[bool, "a page at / to chat and to watch both pools; it asks for the API key"] = True
    metrics_compat: Annotated[str, Choices(("", "vllm")), "'vllm' shows metrics under the names of vLLM too"] = ""
    log_json: Annotated[bool, "log lines as JSON"] = False
    log_level: Annotated[str, Choices(LOG_LEVELS), f"the least level of lines in the log: {', '.join(LOG_LEVELS)}"] = (
        "info"
    )
    log_stats_s: Annotated[float, Meta(ge=0), "seconds between status lines in the log; 0 = none"] = 10.0
    enable_log_requests: Annotated[bool, "log a line for every request; never its text"] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path must begin with / and not end with it, such as /llm, not {self.root_path!r}")
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_key.strip())):
            if getattr(self, name) and not keys:
                raise ValueError(f"{flag_name(name)} is blank: give a key, or leave it out")
        halves = {SSL_KEYFILE: self.ssl_keyfile, SSL_CERTFILE: self.ssl_certfile}
        check_together({name for name, value in halves.items() if value})
        self.conductor_config  # noqa: B018 - or it raises
        self.memory_limits(0)
        self.template_limits  # noqa: B018 - or it raises
        parse_size(self.journal_size, flag_name("journal_size"))

    @property
    def conductor_config(self) -> ConductorConfig:
        """The rules by which requests are refused. Raises ValueError."""
        ttft_s, tbt_s = (parse_seconds(getattr(self, name), flag_name(name)) for name in ("slo_ttft", "slo_tbt"))
        return ConductorConfig(
            policy=self.prefill_policy,
            threshold=self.kvcache_balancing_threshold,
            overload=self.overload,
            limits=SloLimits(ttft_s or math.inf, tbt_s or math.inf),
        )

    @property
    def has_slo(self) -> bool:
        """True where a time is promised."""
        return self.conductor_config.limits != NO_LIMITS

    @property
    def max_body_bytes(self) -> int:
        """``max_body`` in bytes."""
        return parse_size(self.max_body, flag_name("max_body"))

    def memory_limits(self, memory: int) -> MemoryLimits:
        """The bounds of all requests, on a host or in a control group with ``memory`` bytes. Raises ValueError."""
        return memory_limits(self.body_total, self.answer_total, memory, self.max_body_bytes)

    @property
    def template_limits(self) -> TemplateLimits:
        """The limits of the chat template for a request. Raises ValueError."""
        timeout_name, memory_name = flag_name("template_timeout_s"), flag_name("template_memory")
        memory = parse_size(self.template_memory, memory_name)
        return TemplateLimits(
            timeout_s=self.template_timeout_s, memory=memory, timeout_name=timeout_name, memory_name=memory_name
        )

    @property
    def journal_bytes(self) -> int:
        """``journal_size`` in bytes."""
        return parse_size(self.journal_size, flag_name("journal_size"))

    @property
    def api_keys(self) -> list[str]:
        """``api_key`` as a list."""
        return _split(self.api_key)

    @property
    def origins(self) -> list[str]:
        """``allowed_origins`` as a list."""
        return _split(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """``allowed_hosts`` as a list, in lower case."""
        return _split(self.allowed_hosts.lower())

    def names(self, model: str) -> list[str]:
        """The names that clients may use for ``model``. The first one is in answers."""
        return _split(self.served_model_name) or [model]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
