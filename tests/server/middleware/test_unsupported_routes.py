"""Routes of OpenAI, vLLM and other servers that this one lacks are answered by name, with what to use."""

from __future__ import annotations

import msgspec
import pytest
from fake import FakeClient, http_of, make_service
from test_layers import ask, error_of, routes, run

from lamina.server.app import make_app
from lamina.server.unsupported_routes import unsupported_route


@pytest.mark.parametrize(
    ("path", "named", "instead"),
    [
        ("/v1/responses", "/v1/responses (OpenAI's Responses API)", "/v1/chat/completions"),
        ("/v1/responses/resp_1/cancel", "/v1/responses (", "/v1/chat/completions"),
        ("/v1/embeddings", "/v1/embeddings (embeddings)", "embedding"),
        ("/v1/audio/transcriptions", "/v1/audio (speech)", "text alone"),
        ("/v1/rerank", "/v1/rerank (reranking)", "reranking model"),
        ("/score", "/score (", "reranking model"),
        ("/pooling/", "/pooling (pooling)", "embedding"),
        ("/v1/chat/completions/render", "/v1/chat/completions/render (rendered prompts)", "/tokenize"),
        ("/v1/messages", "/v1/messages (Anthropic's API)", "/v1/chat/completions"),
        ("/livez", "/livez (probes of other servers)", "GET /health"),
    ],
)
def test_a_route_of_others_is_named(path: str, named: str, instead: str) -> None:
    error = error_of(response := ask("POST", path, json={"input": "x"}))
    assert (response.status_code, error["code"], error["type"]) == (404, "not_served", "invalid_request_error")
    assert error["message"].startswith(f"Lamina does not serve {named}")
    assert instead in error["message"].partition("): ")[2]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/tokenizer_info", "--enable-tokenizer-info-endpoint"),
        ("/reset_prefix_cache", "--server-dev-mode"),
        ("/scale", "LAMINA_ADMIN_KEY"),
        ("/v1/sessions", "--enable-prefix-caching"),
        ("/v1/sessions/tea", "--enable-prefix-caching"),
        ("/v1/sessions/tea/export", "--enable-prefix-caching"),
        ("/v1/sessions/import", "--enable-prefix-caching"),
        ("/v1/chat/completions/chatcmpl-1", "--journal DIR"),
    ],
)
def test_a_route_that_a_flag_adds_says_the_flag(path: str, flag: str) -> None:
    client = FakeClient()
    client.ready = msgspec.structs.replace(client.ready, caches_prefixes=False)
    for method in ("GET", "POST", "DELETE"):
        error = error_of(ask(method, path, make_service(client)))
        assert error["message"].endswith(f": start it with {flag}")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
    ],
)
def test_a_path_that_is_misspelt_is_told_the_nearest(path: str, near: str) -> None:
    assert error_of(ask("POST", path, json={}))["message"] == f"there is no such route: did you mean {near}?"


def test_what_is_near_nothing_is_told_nothing() -> None:
    assert error_of(ask("GET", "/v1/responsesx/"))["message"] == "there is no such route"
    assert error_of(ask("GET", "/wp-admin.php"))["message"] == "there is no such route"


def test_no_route_that_is_served_is_called_unserved() -> None:
    service = make_service(enable_tokenizer_info_endpoint=True, server_dev_mode=True, admin_key="key")
    paths = [r.path for r in routes(make_app(service))]
    assert {"/health", "/v1/models/{model:path}", "/tokenize", "/scale", "/v1/completions"} <= {*paths}
    assert {p: unsupported_route(p, paths) for p in paths if unsupported_route(p, paths)} == {}


def test_openai_s_client_does_not_ask_again() -> None:
    from openai import AsyncOpenAI, NotFoundError

    asked: list[str] = []

    async def work() -> None:
        async with http_of(make_service()) as http:
            http.event_hooks["request"] = [lambda r: _note(asked, r.url.path)]
            client = AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=http)
            with pytest.raises(NotFoundError, match="does not serve /v1/embeddings"):
                await client.embeddings.create(model="m", input="x")
            with pytest.raises(NotFoundError, match="does not serve /v1/audio"):
                await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF"))

    run(work())
    assert asked == ["/v1/embeddings", "/v1/audio/transcriptions"]


async def _note(asked: list[str], path: str) -> None:
    asked.append(path)
