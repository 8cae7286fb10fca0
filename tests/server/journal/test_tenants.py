"""The requests that share KV: by API key, and by the cache_salt of a body."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake import FakeClient, make_service
from running import Running, eventually
from test_layers import ask, error_of

from lamina.cli.launch import main
from lamina.kv.disk_store.maintenance import store_summary
from lamina.kv.disk_store.store_directory import StoreDirectory
from lamina.kv.page_keys import tenant_of
from lamina.server.call import Service
from lamina.server.tenants import salt_of

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
ROUTES = (("/v1/completions", TEXT), ("/v1/chat/completions", TALK))


def salts(service: Service, *asked: tuple[str, str | None]) -> list[bytes]:
    """Returns the salts that the engine gets with requests by (key, cache_salt), the same by either route."""
    client = service.client
    assert isinstance(client, FakeClient)
    for path, body in ROUTES:
        for key, salt in asked:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            response = ask("POST", path, service, json={**body, "cache_salt": salt}, headers=headers)
            assert response.status_code == 200
    told = [cache_options.salt for cache_options in client.cache_options]
    one, other = told[: len(asked)], told[len(asked) :]
    assert one == other
    return one


def test_a_server_without_keys_is_one_tenant_that_its_clients_may_divide() -> None:
    none, mine, again, other = salts(make_service(), ("", None), ("", "mine"), ("", "mine"), ("", "other"))
    assert none == b""
    assert mine == again
    assert len({none, mine, other}) == 3
    assert {tenant_of(salt) for salt in (none, mine, other)} == {b""}


def test_what_a_body_says_of_its_cache_is_told() -> None:
    service = make_service(api_key="one,two")
    client = service.client
    assert isinstance(client, FakeClient)
    for key, more in (
        ("one", {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}),
        ("one", {"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}}),
        ("two", {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}),
        ("two", {"prompt_cache_key": "", "kv_discard": [[256, 384], [128, 256]]}),
    ):
        for path, body in ROUTES:
            headers = {"authorization": f"Bearer {key}"}
            assert ask("POST", path, service, json={**body, **more}, headers=headers).is_success
    told = client.cache_options
    assert [cache_options.retention_s for cache_options in told] == [86400.0] * 2 + [1800.0] * 2 + [0.0] * 4
    one, again, other = (
        {t.affinity_key for t in told[:2]},
        {t.affinity_key for t in told[2:4]},
        {t.affinity_key for t in told[4:6]},
    )
    assert one == again != other, "another API key's are no kin"
    assert len(one) == len(other) == 1
    assert {(t.affinity_key, t.discard_ranges) for t in told[6:]} == {(b"", ((128, 384),))}
    for bad in (
        {"prompt_cache_retention": "7d"},
        {"prompt_cache_options": {"ttl": "1h"}},
        {"prompt_cache_options": {"tl": 1}},
        {"kv_discard": [[1]]},
        {"kv_discard": [[128, 384], [300, 200]]},
        {"kv_discard": [[0, 1 << 70]]},
    ):
        assert ask("POST", "/v1/completions", service, json={**TEXT, **bad}, headers=headers).status_code == 400


def test_each_key_is_a_tenant_of_its_own_and_a_salt_divides_it() -> None:
    asked = [("one", None), ("one", "x"), ("two", None), ("two", "x")]
    found = salts(make_service(api_key="one,two"), *asked, *asked)
    assert found[:4] == found[4:]
    assert len({*found, b""}) == 5, "nobody is of the tenant of a server without keys"
    one, one_x, two, two_x = (tenant_of(salt) for salt in found[:4])
    assert (one, two) == (one_x, two_x)
    assert len({one, two, b""}) == 3


def test_no_salt_leads_to_another_tenant() -> None:
    """Also where a client knows the id of another one's key, or tries how the parts are put together."""
    ids = bytes(32), b"\x01" * 32
    texts = [None, "", "x", "\x01x", bytes(32).decode(), ("\x01" * 32), "\x20" + "\x01" * 32, "\ud800", "\x00"]
    found = [salt_of(key_id, text) for key_id in (*ids, b"") for text in texts]
    assert len(set(found)) == len(found)


def test_a_later_server_knows_its_tenants_again() -> None:
    first, second = (salts(make_service(api_key="one,two"), ("one", "x"), ("two", None)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("bad", ["", "x" * 1025, 5, ["x"]])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_salt_is_text_of_1_to_1024_characters(path: str, body: dict[str, Any], bad: Any) -> None:
    response = ask("POST", path, json={**body, "cache_salt": bad})
    assert response.status_code == 400
    assert error_of(response)["param"] == "cache_salt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    flags = ("--dtype=float32", "--block-size=16", "--server-dev-mode", f"--kv-offload=dir={folder / 'kv'}")
    running = Running(folder / "log", *flags, env={"LAMINA_API_KEY": "one,two"})
    yield running
    running.kill()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_same_tenant_hits_and_another_misses(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def cached(key: str, salt: str | None = None) -> int:
            body = {"prompt": [9] * 40, "max_tokens": 2, "cache_salt": salt}
            answer = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return int(answer.json()["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0))

        asked: list[tuple[str, str | None]] = [("one", None), ("two", None), ("one", "x"), ("two", "x")]
        assert [cached(*each) for each in asked] == [0, 0, 0, 0]
        assert [cached(*each) for each in asked] == [39, 39, 39, 39]
        reset = http.post("/reset_prefix_cache", headers={"authorization": "Bearer one"})
        assert reset.json() == {"success": True}
        assert [cached(*each) for each in asked] == [0, 0, 0, 0]
        assert http.post("/reset_prefix_cache").status_code == 401


@pytest.mark.timeout(300)
def test_each_key_has_a_data_key_on_disk_that_can_be_destroyed_alone(
    server: Running, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of the server: it ends it."""
    kv, purge = folder / "kv", ["kv", "purge", str(folder / "kv"), "--tenant", hashlib.sha256(b"one").hexdigest()]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for key in ("one", "two"):
            body = {"prompt": [7] * 300, "max_tokens": 2}
            assert http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).is_success
    with closing(StoreDirectory(str(kv), make=False)) as store:
        assert eventually(lambda: [part.pages for part in store_summary(store).parts] == [3, 3], 60)
    assert main(purge) == 2
    assert "another server has it open" in capsys.readouterr().err
    server.kill()
    data_keys = {file.name for file in kv.glob("key-*")}
    assert len(data_keys) == 2
    assert main(purge) == 0
    assert capsys.readouterr().out == "purged 3 pages of the tenant, and its data key\n"
    assert len({file.name for file in kv.glob("key-*")} & data_keys) == 1
    assert main(["kv", "verify", str(kv)]) == 0
    assert capsys.readouterr().out == "3 pages are whole, 0 are damaged\n"
