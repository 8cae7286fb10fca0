"""``session_id`` in a body, GET /v1/sessions and DELETE /v1/sessions/ID."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

import httpx
import msgspec
import pytest
from fake import READY, FakeClient, make_service
from test_layers import ask, error_of

from lamina.scheduler.sessions.session_table import SessionCopy, SessionName
from lamina.scheduler.sessions.session_turns import SessionBusyError, TranscriptDigest, messages_transcript
from lamina.server.app import make_app, with_middleware
from lamina.server.call import Service
from lamina.server.engine_client.messages import EngineState, SessionsReply, SessionsRequest
from lamina.server.session_routes import PortedSession
from lamina.server.tenants import salt_of


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def chat(service: Service, *texts: str, key: str = "", **more: Any) -> httpx.Response:
    body = {"messages": talk(*texts), "max_tokens": 2, "session_id": "mine", **more}
    return ask("POST", "/v1/chat/completions", service, json=body, headers=headers(key))


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def test_a_session_goes_on_is_listed_and_deleted() -> None:
    service = make_service()
    assert chat(service, "hi").status_code == 200
    assert chat(service, "hi", "yes?", "more").status_code == 200
    (found,) = ask("GET", "/v1/sessions", service).json()["data"]
    assert (found["id"], found["object"], found["turns"], found["tier"]) == ("mine", "session", 2, "pool")
    response = chat(service, "something else")
    assert response.status_code == 400
    assert error_of(response)["code"] == "session_mismatch"
    assert error_of(response)["param"] == "session_id"
    assert ask("DELETE", "/v1/sessions/mine", service).json()["deleted"] is True
    assert ask("DELETE", "/v1/sessions/mine", service).status_code == 404
    assert chat(service, "something else").status_code == 200


def test_completions_have_sessions_too() -> None:
    service = make_service()
    for prompt, status in (("ab", 200), (["abc"], 200), ("b", 400), ([5, 6], 400)):
        body = {"prompt": prompt, "max_tokens": 2, "session_id": "mine"}
        assert ask("POST", "/v1/completions", service, json=body).status_code == status


def test_each_api_key_has_sessions_of_its_own() -> None:
    service = make_service(api_key="one,two")
    assert chat(service, "hi", key="one").status_code == 200
    assert chat(service, "ho", key="two").status_code == 200
    assert ask("DELETE", "/v1/sessions/mine", service, headers=headers("two")).status_code == 200
    assert len(ask("GET", "/v1/sessions", service, headers=headers("one")).json()["data"]) == 1
    assert ask("GET", "/v1/sessions", service, headers=headers("two")).json()["data"] == []
    assert ask("GET", "/v1/sessions", service).status_code == 401


@pytest.mark.parametrize("more", [{"n": 2}, {"session_id": ""}, {"session_id": "x\n"}, {"session_id": 5}], ids=str)
def test_what_cannot_be_a_turn(more: dict[str, Any]) -> None:
    service = make_service()
    assert chat(service, "hi", **more).status_code == 400
    assert chat(service, "hi").status_code == 200


def test_a_server_that_keeps_no_kv_has_no_sessions() -> None:
    service = make_service()
    client = service.client
    assert isinstance(client, FakeClient)
    client.ready = msgspec.structs.replace(READY, caches_prefixes=False)
    response = chat(service, "hi")
    assert response.status_code == 400
    assert "--enable-prefix-caching" in error_of(response)["message"]
    assert ask("GET", "/v1/sessions", service).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_request_while_the_session_runs_is_refused_at_once(stream: bool) -> None:
    service = make_service()
    client = service.client
    assert isinstance(client, FakeClient)
    client.hold = True
    body = {"messages": talk("hi"), "max_tokens": 2, "session_id": "mine", "stream": stream}

    async def work() -> list[httpx.Response]:
        transport = httpx.ASGITransport(with_middleware(make_app(service), service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            first = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while not client.added:
                await asyncio.sleep(0)
            found = [await http.post("/v1/chat/completions", json=body), await http.delete("/v1/sessions/mine")]
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            client.hold = False
            return [*found, await http.post("/v1/chat/completions", json=body)]

    *refused, again = asyncio.run(work())
    assert [r.status_code for r in refused] == [409, 409]
    assert error_of(refused[0])["code"] == "session_busy"
    assert again.status_code == 200, "who went away ended the turn"


def test_metrics_tell_tiers() -> None:
    service = make_service()
    client = service.client
    assert isinstance(client, FakeClient)
    client.state = EngineState(
        running=0,
        waiting=0,
        free_blocks=[48],
        steps=1,
        metrics={
            "sessions": {"pool": 3},
            "session_resumed_turns": {"host": 2},
            "session_wait_seconds": {"host": 1.5},
        },
    )
    client.state = msgspec.structs.replace(client.state, evictable_blocks=[11])
    client.counters = {"memory-1": {"kv_fetched_pages": 5.0, "kv_saved_bytes": 7.0, "kv_failed_transfers": 3.0}}
    text = ask("GET", "/metrics", service).text
    assert re.search(r'lamina:kv_prefetched_pages_total{[^}]*worker="memory-1"} 5.0', text)
    assert re.search(r'lamina:kv_offload_failed_transfers_total{[^}]*worker="memory-1"} 3.0', text)
    assert re.search(r'lamina:kv_evictable_blocks{[^}]*worker="memory-1"[^}]*} 11.0', text)
    assert re.search(r'lamina:kv_offload_store_bytes_total{[^}]*worker="memory-1"} 7.0', text)
    assert re.search(r'lamina:sessions{[^}]*tier="pool"} 3.0', text)
    assert re.search(r'lamina:session_resumed_turns_total{[^}]*tier="host"} 2.0', text)
    assert re.search(r'lamina:session_wait_seconds_total{[^}]*tier="host"} 1.5', text)


def test_the_tenant_is_the_key_alone() -> None:
    service = make_service(api_key="one")
    chat(service, "hi", key="one", cache_salt="x")
    client = service.client
    assert isinstance(client, FakeClient)
    (name,) = client.named
    assert name.name == "mine"
    assert name.tenant != client.cache_options[0].salt
    assert name != SessionName(salt_of(b"", None), "mine")


def ported(service: Service, key: str = "", name: str = "mine") -> httpx.Response:
    return ask("GET", f"/v1/sessions/{name}/export", service, headers=headers(key))


def taken(service: Service, session: str, key: str = "") -> httpx.Response:
    return ask("POST", "/v1/sessions/import", service, json={"session": session}, headers=headers(key))


def test_a_session_goes_from_server_to_server() -> None:
    """Its next turn goes on with the conversation from there."""
    old, new = make_service(), make_service()
    assert chat(old, "hi").status_code == 200
    data = ported(old).json()["session"]
    assert taken(new, data).json() == {"id": "mine", "object": "session", "turns": 1}
    assert error_of(chat(new, "something else"))["code"] == "session_mismatch"
    assert chat(new, "hi", "yes?", "more").status_code == 200


@pytest.mark.parametrize(("tokens", "status"), [(20_000, 200), (24_000, 400)])
def test_a_long_session_comes_as_long_as_it_may_be(tokens: int, status: int) -> None:
    service = make_service()
    client = service.client
    assert isinstance(client, FakeClient)
    client.ready = msgspec.structs.replace(READY, max_model_len=20_000)
    copy = SessionCopy(identity=b"i" * 32, name="m" * 256, turns=9, salt=b"s" * 64, tokens=b"t" * 4 * tokens)
    spoken = TranscriptDigest("messages", 1 << 20, b"d" * 32)
    data = msgspec.msgpack.encode(PortedSession(copy, spoken))
    response = taken(service, base64.b64encode(data).decode())
    assert response.status_code == status
    assert status == 200 or "session is larger than 110762 bytes" in error_of(response)["message"]


def test_what_is_no_export() -> None:
    service = make_service()
    assert chat(service, "hi").status_code == 200
    assert ported(service, name="other").status_code == 404
    for session in ("", "%%%", "AAAA", ported(service).json()["session"][:40]):
        response = taken(service, session)
        assert response.status_code == 400
        assert error_of(response)["message"] == "session is no export of a session"


def test_a_refused_import_leaves_the_session_as_it_was() -> None:
    service = make_service()
    assert chat(service, "hi").status_code == 200
    data = ported(service).json()["session"]
    client = service.client
    assert isinstance(client, FakeClient)
    client.refusal = "there is a session 'mine': drop that first"
    response = taken(service, data)
    assert (response.status_code, error_of(response)["message"]) == (400, client.refusal)
    assert error_of(chat(service, "something else"))["code"] == "session_mismatch"


def test_no_turn_begins_while_the_engine_takes_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_service(), make_service()
    assert chat(old, "hi").status_code == 200
    name, busy, answer = SessionName(salt_of(b"", None), "mine"), list[str](), new.client.query

    async def slow(question: SessionsRequest) -> SessionsReply:
        with pytest.raises(SessionBusyError) as refused:
            new.session_turns.begin(name, messages_transcript(talk("something else")))
        busy.append(str(refused.value))
        return await answer(question)

    monkeypatch.setattr(new.client, "query", slow)
    assert taken(new, ported(old).json()["session"]).status_code == 200
    assert len(busy) == 1
    assert chat(new, "hi", "yes?", "more").status_code == 200


def test_a_session_that_speaks_is_not_copied() -> None:
    service = make_service()
    assert chat(service, "hi").status_code == 200
    data, name = ported(service).json()["session"], SessionName(salt_of(b"", None), "mine")
    service.session_turns.begin(name, messages_transcript(talk("hi")))
    for response in (ported(service), taken(service, data)):
        assert response.status_code == 409
        assert error_of(response)["code"] == "session_busy"
