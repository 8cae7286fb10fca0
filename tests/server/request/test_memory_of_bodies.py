"""Clients that send all they can take no more memory than --limits says, and a server with keys reads none of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from attacked import FILES, Attacked, HealthWatch, answer, attacked, head, push
from running import eventually

BODY, TOTAL = 256 << 10, 16 << 20
OPTIONS = {
    "max_body": str(BODY), "body_total": str(TOTAL), "api_key": "client", "admin_key": "operator",
    "header_timeout_s": 600, "body_timeout_s": 600, "slow_reader_timeout_s": 600,
}  # fmt: skip
BOUND = 2 * TOTAL + (8 << 20)  # bodies, connections, and what the process itself may vary by
MANY = 400  # connections, of 100 MB together


@pytest.fixture
def server() -> Iterator[Attacked]:
    with attacked(**OPTIONS) as one:
        yield one


def grown(server: Attacked, before: int) -> int:
    assert server.lives()
    assert server.health() == "HTTP/1.1 200 OK"
    return server.peak - before


@pytest.mark.parametrize("path", ["/health", "/scale", "/drain", "/cordon", "/load_model", "/v1/completions"])
def test_bodies_without_a_key_take_no_memory(server: Attacked, path: str) -> None:
    before = server.mark()
    with ExitStack() as stack, HealthWatch(server) as watch:
        for _ in range(MANY // 4):
            sock = server.connect(stack)
            sock.sendall(head(path, BODY))
            push(sock, BODY - 1)
        assert grown(server, before) < 8 << 20
    assert watch.failures == []


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_never_end_have_a_bound_in_sum(server: Attacked, chunked: bool) -> None:
    before = server.mark()
    with ExitStack() as stack:
        socks, answered = [], list[str]()
        for _ in range(MANY):
            sock = server.connect(stack)
            with suppress(ConnectionError):
                sock.sendall(head("/v1/completions", None if chunked else BODY, key="client"))
            answered.append(push(sock, BODY - 1, chunked=chunked))
            socks.append(sock)
        assert grown(server, before) < BOUND
        for number, sock in enumerate(socks):
            sock.settimeout(0.001)
            answered[number] = answered[number] or answer(sock).partition("\r\n")[0]
        assert set(answered) - {""} == {"HTTP/1.1 503 Service Unavailable"}
        assert answered.count("") <= TOTAL // BODY, "so many may still arrive"
    assert eventually(lambda: whole_body(server), 10), "what ended gives its room back"


def whole_body(server: Attacked) -> bool:
    """Tell whether the largest body is read and decoded. The answer is 400, since its prompt is too long."""
    with ExitStack() as stack:
        sock = server.connect(stack)
        sock.sendall(head("/v1/completions", BODY, key="client") + b'{"prompt":"' + b"a" * (BODY - 13) + b'"}')
        return answer(sock).startswith("HTTP/1.1 400")


@pytest.mark.long
@pytest.mark.parametrize("headers", [1, 250])
def test_heads_that_never_end_have_a_bound_in_sum(headers: int) -> None:
    line = b"X: " + b"a" * (65_000 // headers - 5) + b"\r\n"
    with attacked(fresh=True, **OPTIONS) as server, ExitStack() as stack:
        before = server.mark()
        for _ in range(FILES - 70):
            with suppress(ConnectionError):
                server.connect(stack).sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line * headers)
        assert grown(server, before) < BOUND


@pytest.mark.long
def test_a_body_that_is_slow_keeps_its_room_until_its_time_is_over() -> None:
    with attacked(**{**OPTIONS, "body_timeout_s": 1.0}) as server, ExitStack() as stack:
        socks = [server.connect(stack) for _ in range(MANY // 4)]
        for sock in socks:
            sock.sendall(head("/v1/completions", BODY, key="client"))
            push(sock, BODY - 1)
        assert {answer(sock).split()[1] for sock in socks} <= {"408", "503"}
        assert whole_body(server)
