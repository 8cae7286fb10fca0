"""The server's configuration: frozen, keyword-only, checked where it is made. Flags of ``serve`` come from here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from lamina.config.conflicts import SSL_CERTFILE, SSL_KEYFILE, check_together
from lamina.config.flag_groups import flag_name
from lamina.config.option import parse_seconds, parse_size
from lamina.executor.chat_renderer import TemplateLimits
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.overload import NO_LIMITS, OVERLOAD_POLICIES, SloLimits
from lamina.scheduler.conductor.routing import POLICIES

from .memory_limits import MemoryLimits, memory_limits
from .reasoning_parsers import REASONING_PARSERS
from .tool_parsers import TOOL_PARSERS


def option(default: Any, help: str) -> Any:
    """A field with the text that ``lamina-launch`` prints for its flag."""
    return dataclasses.field(default=default, metadata={"help": help})


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of the HTTP server. Lists are separated by commas; 0 or "" switches a feature off by default."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 = any free one, which is printed")
    uds: str = option("", "Unix socket to listen on instead of host and port")
    served_model_name: str = option("", "names that clients may use for the model, by comma; empty = MODEL as given")
    tokenizer: str = option("", "a path or hub id; empty = the model's own")
    generation_config: str = option(
        "auto",
        "sampling parameters that requests leave out: auto = the model's generation_config.json, none, or a directory",
    )
    api_key: str = option(
        "",
        "keys, by comma, of which requests must bear one, except to /health, /ping and /; better LAMINA_API_KEY",
    )
    admin_key: str = option(
        "", "the operator's key, which `lamina-launch scale`, `drain` and `cordon` need; better LAMINA_ADMIN_KEY"
    )
    ssl_keyfile: str = option("", "private key for TLS, a PEM file")
    ssl_certfile: str = option("", "certificate for TLS, a PEM file")
    allowed_origins: str = option("", "origins, by comma, whose pages may call this server from a browser (CORS)")
    allowed_hosts: str = option("", "names, by comma, by which clients may reach a server without keys; * = any")
    max_num_queued_reqs: int = option(256, "completions that may wait beyond those that decode; above: status 429")
    max_num_queued_tokens: int = option(0, "prompt tokens that may wait for their first token; above: status 429")
    slo_ttft: str = option(
        "", "promised time to the first token, such as 2s; a request that would wait longer gets status 429"
    )
    slo_tbt: str = option(
        "", "promised time between two tokens, such as 100ms; a request that would make it longer gets status 429"
    )
    overload: str = option(
        "early",
        f"when the load of decoding counts for them: {', '.join(OVERLOAD_POLICIES)} (docs/prefill.md)",
    )
    prefill_policy: str = option(
        "auto", f"which of --prefill-workers computes a prompt: {', '.join(POLICIES)} (docs/prefill.md)"
    )
    kvcache_balancing_threshold: float = option(
        1.5,
        "a prompt's KV comes from another worker that has so many times as much of it",
    )
    max_body: str = option("8MiB", "size of a request's body")
    body_total: str = option(
        "", "memory of all bodies and prompts together; empty = a 16th of this host's memory (docs/serve.md)"
    )
    answer_total: str = option("", "memory of all answers together; empty = an 8th of this host's memory")
    max_nesting: int = option(64, "depth of a request's JSON")
    max_prompts: int = option(256, "prompts in a request")
    max_n: int = option(16, "completions of a prompt (n)")
    max_logprobs: int = option(
        20, "alternatives of a token (logprobs, top_logprobs, prompt_logprobs); -1 = up to the whole vocabulary"
    )
    max_stop: int = option(16, "stop strings of a request")
    max_stop_chars: int = option(256, "characters of a stop string")
    enable_force_include_usage: bool = option(
        False, "streams always end with usage, also where a request does not ask for it"
    )
    enable_prompt_tokens_details: bool = option(
        False, "usage always has the number of cached prompt tokens; else only where some were cached"
    )
    return_tokens_as_token_ids: bool = option(False, "log-probabilities call a token token_id:5 by default")
    enable_tokenizer_info_endpoint: bool = option(False, "GET /tokenizer_info: the tokenizer's configuration")
    server_dev_mode: bool = option(False, "POST /reset_prefix_cache, for all clients of this server")
    enable_request_id_headers: bool = option(True, "answers bear X-Request-Id, the client's own where it sends one")
    root_path: str = option("", "path that a proxy puts before the server's own, such as /llm")
    allow_unknown_fields: bool = option(False, "ignore fields of a body that the server does not know; else status 400")
    chat_template: str = option("", "a file with a chat template (Jinja) in place of the model's own")
    chat_template_content_format: str = option(
        "auto", "what the template gets of a message: string, openai (a list of parts), or auto, the one that it shows"
    )
    tool_call_parser: str = option(
        "auto", f"the format of tool calls: {', '.join(TOOL_PARSERS)}, or auto, the one that the chat template shows"
    )
    reasoning_parser: str = option(
        "", f"the format of reasoning, which becomes a field of its own: {', '.join(REASONING_PARSERS)}"
    )
    template_memory: str = option("256MiB", "memory that the chat template may take for a request; above: status 400")
    max_logit_bias: int = option(300, "tokens in logit_bias")
    header_timeout_s: float = option(10.0, "seconds for a connection to send a request's headers")
    body_timeout_s: float = option(30.0, "seconds for a request's body to arrive")
    template_timeout_s: float = option(5.0, "seconds that the chat template may run for a request; above: status 400")
    tokenizer_timeout_s: float = option(
        30.0, "seconds that the tokenizer may take for a request's long texts; above: status 400"
    )
    slow_reader_timeout_s: float = option(30.0, "seconds without any progress after which a slow reader is cut off")
    sse_keep_alive_s: float = option(15.0, "seconds of silence after which a stream gets a comment line; 0 = never")
    shutdown_timeout: float = option(
        30.0, "seconds on SIGTERM or Ctrl-C for requests to finish; a second one ends at once"
    )
    health_timeout_s: float = option(
        4.0, "seconds without progress of a step, or without an answer of an idle worker, until /health says 503"
    )
    journal: str = option("", "directory where accepted requests are kept, so that the next server finishes them")
    journal_size: str = option("64MiB", "its size, about; answers go with the oldest half")
    dashboard: bool = option(True, "a page at / to chat and to watch both pools; it asks for the API key")
    metrics_compat: str = option("", "'vllm' shows metrics under the names of vLLM too")
    log_json: bool = option(False, "log lines as JSON")
    log_level: str = option("info", f"the least level of lines in the log: {', '.join(LOG_LEVELS)}")
    log_stats_s: float = option(10.0, "seconds between status lines in the log; 0 = none")
    enable_log_requests: bool = option(True, "log a line for every request; never its text")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = -1 if f.name == "max_logprobs" else 0
            if isinstance(value, int | float) and value < least:
                raise ValueError(f"{flag_name(f.name)} must be at least {least}, not {value}")
        for name in (
            "max_nesting",
            "max_prompts",
            "max_n",
            "header_timeout_s",
            "body_timeout_s",
            "slow_reader_timeout_s",
            "template_timeout_s",
            "tokenizer_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{flag_name(name)} must be positive, not {getattr(self, name)}")
        if self.port > 65535:
            raise ValueError(f"--port must lie in 0..65535, not {self.port}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path must begin with / and not end with it, such as /llm, not {self.root_path!r}")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}")
        if self.metrics_compat not in ("", "vllm"):
            raise ValueError(f"--metrics-compat must be vllm or empty, not {self.metrics_compat!r}")
        if self.chat_template_content_format not in (formats := ("auto", "string", "openai")):
            given = self.chat_template_content_format
            raise ValueError(f"--chat-template-content-format must be one of {', '.join(formats)}, not {given!r}")
        for name, table in (
            ("tool_call_parser", ("auto", *TOOL_PARSERS)),
            ("reasoning_parser", ("", *REASONING_PARSERS)),
        ):
            if (given := getattr(self, name)) not in table:
                known = ", ".join(filter(None, table))
                raise ValueError(f"{flag_name(name)} must be one of {known}, not {given!r}")
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_key.strip())):
            if getattr(self, name) and not keys:
                raise ValueError(f"{flag_name(name)} is blank: give a key, or leave it out")
        halves = {SSL_KEYFILE: self.ssl_keyfile, SSL_CERTFILE: self.ssl_certfile}
        check_together({name for name, value in halves.items() if value})
        if self.prefill_policy not in POLICIES:
            raise ValueError(f"--prefill-policy must be one of {', '.join(POLICIES)}, not {self.prefill_policy!r}")
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
