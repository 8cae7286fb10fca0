"""Nothing that a client sends ends an engine: extreme values of every field, then all that a server says of itself."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from extremes import Asked, others, requests
from hypothesis import HealthCheck, given, settings
from wired import ADMIN_KEY, WiredServer, over_a_wire

LOOKS = ("/v1/sessions", "/v1/models", "/load", "/metrics", "/version")
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "session_id": "plain"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
}
TURN = {**PLAIN["/v1/chat/completions"], "session_id": "mine"}
ANSWER_S = 30.0


class Client:
    """Asks a server, all of whose answers must be below 500, from its first engine."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self.server, self._runner, self._shut = WiredServer(folder), runner, list[bytes]()
        runner.run(self.server.open())

    def ask(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}", **({"content-type": "application/json"} if body else {})}
        sent = self.server.http.request(method.upper(), path, content=body, headers=headers)
        answer = self._runner.run(asyncio.wait_for(sent, ANSWER_S))
        assert answer.status_code < 500, f"{answer.status_code} {answer.text}"
        return answer

    def tell(self, path: str, body: Any) -> httpx.Response:
        return self.ask("POST", path, msgspec.json.encode(body))

    def look(self, *paths: str) -> None:
        """All is well, by what the server says."""
        assert self.ask("GET", "/health").json() == {"status": "ok"}
        assert len(self.server.engines) == 1, "its engine has ended"
        for path in paths:
            assert self.ask("GET", path).status_code == 200

    def look_at_sessions(self) -> None:
        """Each is exported, as often as one likes."""
        for session in self.ask("GET", "/v1/sessions").json()["data"]:
            for _ in range(2):
                assert self.ask("GET", f"/v1/sessions/{quote(session['id'], safe='')}/export").status_code == 200


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with over_a_wire(), asyncio.Runner() as runner:
        made = Client(tmp_path_factory.mktemp("extremes"), runner)
        yield made
        runner.run(made.server.close())


def test_no_value_of_any_field_ends_an_engine_or_is_an_error_of_the_server(client: Client) -> None:
    """But /scale, which ends engines by order: workers of this test do not come or go."""
    openapi = client.ask("GET", "/openapi.json").json()
    assert openapi["paths"].pop("/scale")
    looks = iter(range(10**9))

    @settings(max_examples=240, suppress_health_check=[*HealthCheck])
    @given(requests(openapi, PLAIN))
    def of_each(asked: Asked) -> None:
        client.ask(*asked)
        if asked.path == "/drain":
            client.tell("/drain", {"on": False})
        client.look(*(LOOKS if next(looks) % 20 == 0 else ()))

    of_each()
    client.look_at_sessions()
    client.look(*LOOKS)


def export(client: Client) -> Any:
    """A session of one turn, as it goes from server to server, unpacked; here it is no more."""
    assert client.tell("/v1/chat/completions", TURN).status_code == 200
    packed = base64.b64decode(client.ask("GET", "/v1/sessions/mine/export").json()["session"])
    assert client.ask("DELETE", "/v1/sessions/mine").status_code == 200
    return msgspec.msgpack.decode(packed)


def test_no_value_of_an_imported_session_ends_an_engine_or_is_an_error_of_the_server(client: Client) -> None:
    """Imported sessions that are accepted are listed, exported, imported again and go on."""
    taken = 0
    for other in others(export(client)):
        packed = base64.b64encode(msgspec.msgpack.encode(other)).decode()
        answer = client.tell("/v1/sessions/import", {"session": packed})
        if answer.status_code == 200:
            taken += 1
            path = f"/v1/sessions/{quote(answer.json()['id'], safe='')}"
            again = client.ask("GET", f"{path}/export").json()["session"]
            assert client.ask("DELETE", path).status_code == 200
            assert client.tell("/v1/sessions/import", {"session": again}).status_code == 200, "as it was exported"
            for _ in range(2):
                client.tell("/v1/chat/completions", {**TURN, "session_id": answer.json()["id"]})
                client.ask("GET", "/v1/sessions")
            client.ask("GET", f"{path}/export")
            client.ask("DELETE", path)
        client.look()
    assert taken > 10
    client.look(*LOOKS)
