"""Pages of other sites get nothing from a server without keys; who is at home gets in."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fake import make_service
from test_layers import ask, error_of

GOOD = {"prompt": "x", "max_tokens": 2}


def status(name: str, origin: str | None = None, path: str = "/v1/models", **options: Any) -> int:
    headers = {"host": name, **({} if origin is None else {"origin": origin})}
    return ask("GET", path, make_service(**options), headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:80", "a.localhost:1", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000",
     "[::1]", socket.gethostname()],
)  # fmt: skip
def test_names_of_this_host_are_known(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
             "[::2]", "", "[", "notlocalhost"],
)  # fmt: skip
def test_names_that_were_made_to_lead_here_are_not(host: str) -> None:
    response = ask("POST", "/v1/completions", headers={"host": host}, json=GOOD)
    assert response.status_code == 403
    assert error_of(response)["code"] == "foreign_host"
    assert "--allowed-hosts" in error_of(response)["message"]


def test_the_refusal_has_the_flag_as_it_is_written() -> None:
    response = ask("POST", "/v1/completions", headers={"host": "192.168.1.5:8000"}, json=GOOD)
    assert error_of(response)["message"] == (
        "this server does not answer to the host name '192.168.1.5:8000': start it with --allowed-hosts 192.168.1.5, "
        "or with an API key, which allows all names"
    )


@pytest.mark.parametrize(
    ("host", "options", "known"),
    [
        ("lamina:8000", {"allowed_hosts": "Lamina,other"}, True),
        ("evil.example", {"allowed_hosts": "lamina"}, False),
        ("evil.example", {"allowed_hosts": "*"}, True),
        ("10.0.0.1:8000", {"host": "10.0.0.1"}, True),
        ("10.0.0.2:8000", {"host": "10.0.0.1"}, False),
        ("10.0.0.2:8000", {"host": "0.0.0.0"}, True),
        ("[2001:db8::1]:8000", {"host": "::"}, True),
        ("evil.example", {"host": "0.0.0.0"}, False),
        ("box.lan", {"host": "box.lan"}, True),
        ("anything", {"uds": "/tmp/x"}, True),
    ],
)
def test_names_are_of_the_place_where_it_listens_and_those_allowed(
    host: str, options: dict[str, Any], known: bool
) -> None:
    assert status(host, **options) == (200 if known else 403)


def test_with_a_key_any_name_will_do_and_health_has_none() -> None:
    headers = {"host": "evil.example", "origin": "http://evil.example", "authorization": "Bearer k"}
    assert ask("GET", "/v1/models", make_service(api_key="k"), headers=headers).status_code == 200
    assert status("evil.example", path="/health") == 200


@pytest.mark.parametrize(
    ("origin", "options", "allowed"),
    [
        ("http://localhost:8000", {}, True),
        ("HTTP://LOCALHOST:8000", {}, True),
        ("http://localhost:3000", {}, False),
        ("http://localhost", {}, False),
        ("https://evil.example", {}, False),
        ("null", {}, False),
        ("", {}, False),
        ("http://[", {}, False),
        ("file://localhost:8000", {}, False),
        ("https://a.example", {"allowed_origins": "https://a.example"}, True),
        ("https://b.example", {"allowed_origins": "https://a.example"}, False),
        ("https://b.example", {"allowed_origins": "*"}, True),
    ],
)
def test_pages_are_its_own_or_allowed(origin: str, options: dict[str, Any], allowed: bool) -> None:
    assert status("localhost:8000", origin, **options) == (200 if allowed else 403)
