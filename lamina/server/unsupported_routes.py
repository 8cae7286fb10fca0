"""Routes of OpenAI's API, vLLM and other servers that Lamina does not have: the reply names them and a replacement."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from lamina.server.errors import ApiError

_DECODES = "it decodes one causal LM: use a server with an embedding or reranking model"
_TEXT = "it reads and writes text alone: POST /v1/chat/completions"
_STATELESS = "send the whole conversation to POST /v1/chat/completions"
_WEIGHTS = "start a server on the new weights"
_ADAPTERS = "merge the adapter into the model and serve that"
_ADMIN = "start it with LAMINA_ADMIN_KEY, and use lamina-launch {}"
_PARTS = "POST /tokenize, then POST /v1/completions with token ids"
# A service of other servers, its paths with all below them, and its replacement in Lamina.
_UNSERVED: list[tuple[str, tuple[str, ...], str]] = [
    ("OpenAI's Responses API", ("/v1/responses", "/v1/conversations"), _STATELESS),
    ("OpenAI's Assistants API", ("/v1/assistants", "/v1/threads"), _STATELESS),
    ("embeddings", ("/v1/embeddings", "/v2/embed", "/embed", "/embeddings"), _DECODES),
    ("pooling", ("/pooling", "/classify", "/v1/systemone"), _DECODES),
    ("reranking", ("/rerank", "/v1/rerank", "/v2/rerank"), _DECODES),
    ("scores of texts", ("/score", "/v1/score", "/generative_scoring"), _DECODES),
    ("moderation", ("/v1/moderations",), "use a server with a moderation model"),
    ("speech", ("/v1/audio", "/v1/realtime"), _TEXT),
    ("pictures and films", ("/v1/images", "/v1/videos"), _TEXT),
    ("files and batches of OpenAI's API", ("/v1/files", "/v1/uploads", "/v1/batches"), "send each request by itself"),
    ("conversations by the batch", ("/v1/chat/completions/batch",), "send each conversation by itself"),
    ("training", ("/v1/fine_tuning", "/v1/evals"), _WEIGHTS),
    ("stores of documents", ("/v1/vector_stores", "/v1/containers"), "put the documents into the messages"),
    ("Anthropic's API", ("/v1/messages",), "POST /v1/chat/completions, or a proxy that translates"),
    ("Cohere's API", ("/cohere", "/v2/chat"), "POST /v1/chat/completions"),
    ("Ollama's API", ("/api",), "POST /v1/chat/completions"),
    ("text of other servers' APIs", ("/generate", "/generate_stream", "/infill"), "POST /v1/completions"),
    ("tokens in, tokens out", ("/inference/v1/generate",), "POST /v1/completions with token ids and return_token_ids"),
    ("rendered prompts", tuple(f"/v1/{kind}/{word}" for kind in ("completions", "chat/completions")
                               for word in ("render", "derender")), _PARTS),
    ("SageMaker's routes", ("/invocations",), "POST /v1/chat/completions or /v1/completions"),
    ("probes of other servers", ("/ready", "/readyz", "/healthz", "/livez"), "GET /health"),
    ("adapters (LoRA)", ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
    ("sleep", ("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"), _ADMIN.format("drain")),
    ("new weights in a running engine", ("/update_weights", "/init_weight_transfer_engine", "/start_weight_update",
                                         "/finish_weight_update", "/weight_info"), _WEIGHTS),
    ("elastic expert parallelism", ("/scale_elastic_ep", "/is_scaling_elastic_ep"), _ADMIN.format("scale")),
    ("profiles", ("/start_profile", "/stop_profile"), "start it with --trace FILE, read by lamina-launch timeline"),
    ("facts of the server", ("/server_info",), "GET /version, /v1/models and /metrics"),
    ("caches of media", ("/reset_mm_cache", "/reset_encoder_cache"), "there is none to reset"),
    ("pages that load scripts from elsewhere", ("/redoc",), "GET /docs"),
]  # fmt: skip
# Routes that a flag or variable enables.
_BY_FLAG = {
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    "/reset_prefix_cache": "--server-dev-mode",
    "/scale": "LAMINA_ADMIN_KEY",
    "/drain": "LAMINA_ADMIN_KEY",
    "/cordon": "LAMINA_ADMIN_KEY",
    "/v1/sessions": "--enable-prefix-caching",
    "/v1/sessions/{session_id:path}": "--enable-prefix-caching",
    "/v1/sessions/{session_id:path}/export": "--enable-prefix-caching",
    "/v1/sessions/import": "--enable-prefix-caching",
    "/v1/completions/{answer_id}": "--journal DIR",
    "/v1/chat/completions/{answer_id}": "--journal DIR",
}
_BY_PATH = {path: (what, instead) for what, paths, instead in _UNSERVED for path in paths}


def unsupported_route(path: str, served: Collection[str]) -> str:
    """Return a text with the service that other servers have at ``path`` and its replacement here; "" if
    none is known.
    """
    steps = path.rstrip("/").split("/")
    for end in range(len(steps), 1, -1):
        above = "/".join(steps[:end])
        if above in _BY_PATH:
            what, instead = _BY_PATH[above]
            return f"Lamina does not serve {above} ({what}): {instead}"
    for route, flag in _BY_FLAG.items():
        if route not in served and _is_at(route, path):
            return f"this server does not serve {route}: start it with {flag}"
    return ""


def _is_at(route: str, path: str) -> bool:
    """Return True if ``path`` matches ``route``, whose variable part, if any, is at its end."""
    fixed, variable, _ = route.partition("{")
    return path.startswith(fixed) and len(path) > len(fixed) if variable else path == route


def route_not_found(path: str, served: Collection[str]) -> ApiError:
    """Return the reply for an unknown ``path``: why it is not here, or the nearest known route."""
    if text := unsupported_route(path, served):
        return ApiError(404, text, code="not_served")
    near = get_close_matches(path, served, n=1, cutoff=0.75)
    hint = f": did you mean {near[0]}?" if near else ""
    return ApiError(404, f"there is no such route{hint}", code="not_found")
