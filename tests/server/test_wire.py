"""HTTP as odd, old and hostile clients speak it: over real sockets, with the server in this process and no engine."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from running import certificate
from sockets import FOREVER, GOOD, Later, answer, post, run, serving
from test_flow import until

from lamina import __version__
from lamina.server.middleware.http_connection import MAX_HEADERS, MAX_WAITING

pytestmark = pytest.mark.timeout(60)
VERSION = json.dumps({"version": __version__}, separators=(",", ":")).encode()
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
CHUNKED = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "more"),
    [
        (b"GET /", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\nX: ", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\n", b"X: y\r\n" * 700),
        (b"GET /health HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"X: y\r\n" * 700),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"X: y\r\n" * 700),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"x" * 4096),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"1;", b"x" * 4096),
    ],
    ids=["path", "header", "headers", "trailers, answered", "trailers", "trailer", "extension"],
)  # fmt: skip
def test_heads_have_a_limit(before: bytes, more: bytes) -> None:
    """The limit counts bytes: at a gigabyte a second, a deadline alone is none."""

    async def work() -> None:
        async with serving(body_timeout_s=FOREVER) as place:
            _, writer = await place.connect(before)
            with suppress(ConnectionError):
                for _ in range(16384):  # 64 MiB
                    writer.write(more)
                    await writer.drain()
            await until(lambda: not place.connections)

    run(work())


def test_a_head_that_is_too_large_is_refused_by_name() -> None:
    async def work() -> None:
        async with serving() as place:
            status, _, text = (await place.ask(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 12000)).partition(b"\r\n")
            assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
            assert json.loads(text.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
            reader, writer = await place.connect()
            for _ in range(3):  # it is counted anew for each request
                writer.write(GET[:-2] + b"X: %b\r\n" % (b"y" * 145) * 200 + b"\r\n")
                assert (await answer(reader))[0] == "HTTP/1.1 200 OK"

    run(work())


@pytest.mark.parametrize("trailers", [False, True])
def test_headers_have_a_number_too(trailers: bool) -> None:
    """The shortest ones cost far more time than their bytes say."""
    before = b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"0\r\n" if trailers else GET[:-2]

    async def work() -> None:
        async with serving(body_timeout_s=FOREVER) as place:
            most = MAX_HEADERS - before.count(b": ")
            reader, writer = await place.connect(before + b"a:\r\n" * most + b"\r\n")
            assert (await answer(reader))[0].startswith("HTTP/1.1 4" if trailers else "HTTP/1.1 200 OK")
            writer.close()
            reader, writer = await place.connect(before + b"a:\r\n" * (most + 1) + b"\r\n")
            status, body = await answer(reader)
            assert status == "HTTP/1.1 431 Request Header Fields Too Large"
            assert json.loads(body)["error"]["message"] == "a request may have 256 headers: send fewer"

    run(work())


NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET\n\n",
    b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nA B: x\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    post(GOOD, headers="Transfer-Encoding: chunked\r\n"),
    post(GOOD, headers="Content-Length: 1\r\n"),
    post(GOOD, headers="Content-Length: -1\r\n"),
)


def test_what_is_no_http_is_refused_in_the_envelope() -> None:
    async def work() -> None:
        async with serving() as place:
            for data in NO_HTTP:
                head, _, body = (await place.ask(data)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400"), data
                assert json.loads(body)["error"]["code"] == "not_http"

    run(work())


@pytest.mark.parametrize("bad", [b"zz\r\n", b"-1\r\n", b"\r\n", b"1\r\nab\r\n", b"1" * 17 + b"\r\n"])
def test_a_malformed_chunk_is_refused_while_its_body_is_read(bad: bytes) -> None:
    async def work() -> None:
        async with serving(body_timeout_s=FOREVER) as place:
            reader, writer = await place.connect(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"1\r\n{\r\n")
            writer.write(b'1\r\n"\r\n' + bad)
            status, body = await answer(reader)
            assert status.startswith("HTTP/1.1 400")
            assert json.loads(body)["error"]["code"] == "not_http"
            assert await reader.read() == b""

    run(work())


def test_the_rest_of_a_request_that_was_refused_has_a_deadline() -> None:
    async def work() -> None:
        async with serving(header_timeout_s=0.3) as place:
            reader, _ = await place.connect(post(GOOD).replace(b"json", b"text")[:-1])
            assert (await answer(reader))[0].startswith("HTTP/1.1 415")
            assert await reader.read() == b""
            reader, writer = await place.connect(GET)
            await answer(reader)
            with pytest.raises(TimeoutError):  # between requests it may rest
                await asyncio.wait_for(reader.read(), 1.0)
            writer.close()

    run(work())


def test_who_does_not_read_is_cut_off() -> None:
    """Also where the answer is whole, or there are many: they would stay in memory, and count as requests under way."""

    async def work() -> None:
        async with serving(slow_reader_timeout_s=1.0) as place:
            reader, writer = await place.connect(GET.replace(b"version", b"openapi.json") * MAX_WAITING)
            for _ in range(13):  # slow, and alive
                await asyncio.sleep(0.1)
                await reader.read(1 << 14)
            assert place.connections == 1
            await until(lambda: not place.connections)
            writer.close()

    run(work())


def test_who_reads_slowly_is_served_however_much_the_kernel_takes() -> None:
    """The kernel asks for more bytes only once a third of its buffer is free, which takes this reader many seconds."""

    async def work() -> None:
        client = Later()
        async with serving(client, send_buffer=1 << 19, slow_reader_timeout_s=0.5) as place:
            reader, writer = await place.connect(post({**GOOD, "stream": True}))
            await until(lambda: len(client.added) == 1)
            client.grow("x" * (1 << 22))
            for _ in range(20):
                await asyncio.sleep(0.1)
                assert await reader.read(1 << 12)
            assert place.connections == 1
            await until(lambda: not place.connections)
            writer.close()

    run(work())


def test_a_stream_that_the_kernel_holds_whole_is_cut_off_as_well() -> None:
    """No byte of it waits in the server, which has more to send later."""

    async def work() -> None:
        client = Later()
        async with serving(client, send_buffer=1 << 19, slow_reader_timeout_s=0.5) as place:
            _, writer = await place.connect(post({**GOOD, "stream": True}))
            await until(lambda: len(client.added) == 1)
            writer.transport.pause_reading()
            client.grow("x" * (1 << 17))
            await until(lambda: client.cancelled == [0])
            assert not place.connections
            writer.close()

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_small_answer_that_nobody_reads_has_that_deadline_too(stream: bool) -> None:
    """Fewer bytes than an event loop holds before it says so: they would stay, and their connection, for ever."""

    async def work() -> None:
        client = Later()
        async with serving(client, slow_reader_timeout_s=0.5) as place:
            _, writer = await place.connect(post({**GOOD, "stream": stream}))
            await until(lambda: len(client.added) == 1)
            client.grow("x" * 40000)
            if not stream:
                client.finish()
            await until(lambda: not place.connections)
            await until(lambda: client.cancelled == [0] or not stream)
            writer.close()

    run(work())


def test_an_answer_over_tls_that_nobody_reads_has_that_deadline_too(tmp_path: Path) -> None:
    """The layer of TLS does not tell that all of it is waiting: the connection seems to rest."""

    async def work() -> None:
        client = Later()
        async with serving(client, slow_reader_timeout_s=0.5, **certificate(tmp_path)) as place:
            context = ssl._create_unverified_context()
            _, writer = await place.connect(tls=context)
            writer.write(post(GOOD))
            await until(lambda: len(client.added) == 1)
            writer.transport.pause_reading()
            client.grow("x" * (1 << 22))
            client.finish()
            await until(lambda: not place.connections)
            writer.close()

    run(work())


def test_a_stream_that_nobody_reads_ends_its_prompt() -> None:
    async def work() -> None:
        client = Later()
        async with serving(client, slow_reader_timeout_s=0.3) as place:
            _, writer = await place.connect(post({**GOOD, "stream": True}))
            await until(lambda: len(client.added) == 1)
            client.grow("x" * (1 << 20))
            await until(lambda: client.cancelled == [0])
            assert not place.service.queue_limit.completions
            writer.close()

    run(work())


def test_a_request_behind_one_that_runs_has_time() -> None:
    """The second and the third come while the first runs; of the third there is half until the others are answered."""

    async def work() -> None:
        client = Later()
        async with serving(client, header_timeout_s=0.3) as place:
            reader, writer = await place.connect(post(GOOD) + GET + GET[:20])
            await until(lambda: len(client.added) == 1)
            await asyncio.sleep(1.0)
            client.finish()
            assert [(await answer(reader))[0] for _ in range(2)] == ["HTTP/1.1 200 OK"] * 2
            writer.write(GET[20:])
            assert (await answer(reader))[0] == "HTTP/1.1 200 OK"
            writer.write(GET[:20])
            assert await reader.read() == b"", "from here on it has its deadline"

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_more_requests_behind_is_cancelled(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True

    async def work() -> None:
        client = Later()
        async with serving(client) as place:
            _, writer = await place.connect(post({**GOOD, "stream": stream}))
            await until(lambda: len(client.added) == 1)
            writer.write(GET + post(GOOD))
            await writer.drain()
            writer.close()
            await until(lambda: client.cancelled == [0])
            assert len(client.added) == 1

    run(work())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_many_requests_in_one_go_are_answered_in_order() -> None:
    async def work() -> None:
        async with serving() as place:
            count = 50
            reader, writer = await place.connect((post(GOOD) + GET) * count)
            for _ in range(count):
                assert json.loads((await answer(reader))[1])["usage"]["completion_tokens"] == 2
                assert (await answer(reader))[1] == VERSION
            writer.close()

    run(work())


@pytest.mark.parametrize("one", [GET, GET[:-2] + UPGRADE.encode() + b"\r\n"], ids=["plain", "offering"])
def test_one_read_brings_no_more_requests_than_may_wait(one: bytes) -> None:
    """Each costs the event loop time before anybody asks for a key. The first are answered, the next one is refused."""

    async def work() -> None:
        async with serving() as place:
            reader, writer = await place.connect()
            await until(lambda: place.connections == 1)
            (connection,) = place.server.server_state.connections
            connection.data_received(one * 5000)
            waiting = len(connection.pipeline)
            connection.data_received(one * 5000)
            assert len(connection.pipeline) == waiting == MAX_WAITING + 1
            for _ in range(1 + MAX_WAITING):
                assert (await answer(reader))[1] == VERSION
            status, body = await answer(reader)
            assert status == "HTTP/1.1 429 Too Many Requests"
            assert json.loads(body)["error"]["message"] == (
                "256 requests of this connection already wait: read their replies first"
            )
            assert await reader.read() == b""
            await until(lambda: not place.connections)
            writer.close()

    run(work())


def test_http_1_0_knows_no_chunks() -> None:
    async def work() -> None:
        async with serving() as place:
            head, _, body = (await place.ask(post({**GOOD, "stream": True}, version="1.0"))).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"content-length" not in head
            assert b"connection: close" in head
            events = body.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-2]]
            assert "".join(texts) == "abcd"
            head, _, body = (await place.ask(post(GOOD, version="1.0"))).partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}".encode() in head

    run(work())


@pytest.mark.parametrize("split", [False, True])
def test_an_upgrade_that_is_offered_is_passed_over(split: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Java's own client offers HTTP/2 with every first request."""
    logging.getLogger("uvicorn").propagate = True
    chunks = b"POST /v1/completions HTTP/1.1\r\n" + UPGRADE.encode() + CHUNKED
    body = json.dumps(GOOD).encode()
    requests = [
        post(GOOD, headers=UPGRADE),
        post(GOOD),
        chunks + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        post(GOOD, headers=UPGRADE.replace("h2c", "websocket").replace("Upgrade, ", "keep-alive, Upgrade,")),
    ]

    async def work() -> None:
        async with serving() as place:
            reader, writer = await place.connect()
            for data in requests:
                head, mark, rest = data.partition(b"\r\n\r\n")
                writer.write(head + mark if split else data)
                if split:
                    await asyncio.sleep(0.05)
                    writer.write(rest)
                status, found = await answer(reader)
                assert status == "HTTP/1.1 200 OK", found
            writer.write(b"".join(requests))
            for _ in requests:
                assert (await answer(reader))[0] == "HTTP/1.1 200 OK"
            writer.write(post(GOOD, headers=UPGRADE + "Connection: close\r\n"))
            assert (await answer(reader))[0] == "HTTP/1.1 200 OK"
            assert await reader.read() == b""

    run(work())
    assert not caplog.records


def test_a_client_may_wait_until_its_body_is_wanted() -> None:
    async def work() -> None:
        async with serving(max_body="1KiB") as place:
            head, mark, body = post(GOOD, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            reader, writer = await place.connect(head + mark)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await answer(reader))[0] == "HTTP/1.1 200 OK"
            head, mark, _ = post({"prompt": "x" * 2000}, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            reader, _ = await place.connect(head + mark)
            assert (await answer(reader))[0].startswith("HTTP/1.1 413"), "at once, and no body is asked for"

    run(work())


def test_requests_that_wait_for_a_stream_before_them_count_with_their_bodies() -> None:
    """Nothing reads them until the stream ends: 300 KB a connection were held and not counted."""
    body = b"x" * 60_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n"

    async def work() -> None:
        client = Later()
        async with serving(client, max_body="64KiB", body_total="4MiB") as place:
            writers = []
            for number in range(60):
                _, writer = await place.connect(post({**GOOD, "stream": True}))
                await until(lambda number=number: len(client.added) == number + 1)
                writer.write((head + body) * 4)
                writers.append(writer)
            await until(lambda: place.connections < 60)
            budget = place.service.bodies
            assert 0 < budget.used <= budget.limit
            assert place.connections * len(body) < budget.limit, "each of those that are left has one of them at least"
            for writer in writers:
                writer.close()
            await until(lambda: not place.connections and not place.service.active_calls)
            assert budget.used == 0

    run(work())


def test_a_body_that_finds_no_room_before_anything_takes_it_gets_503() -> None:
    async def work() -> None:
        async with serving(max_body="64KiB", body_total="4MiB", body_timeout_s=FOREVER) as place:
            taken = place.service.bodies.hold()
            assert taken.resize(place.service.bodies.limit)
            reader, _ = await place.connect(post({"prompt": "x" * 60_000}))
            status, body = await answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (
                "HTTP/1.1 503 Service Unavailable", "no_room_for_body"
            )  # fmt: skip
            taken.close()

    run(work())
