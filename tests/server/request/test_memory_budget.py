"""One budget of memory for all bodies: nothing that a client does takes more of it, or keeps some of it.

Covers: lamina/server/completion_routes.py, lamina/server/memory_limits.py, lamina/server/request/request_bodies.py.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake import FakeClient, http_of, make_service
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from msgspec.structs import replace
from starlette.types import Message
from test_flow import until
from test_layers import JSON, ask, error_of, run

from lamina.config.flag_groups import GROUP_OF
from lamina.facts.host_memory import memory_bytes
from lamina.server import completion_routes
from lamina.server.app import make_app, with_middleware
from lamina.server.memory_budget import Holding, MemoryBudget
from lamina.server.memory_limits import SPARE, decoding_bytes, least_total, memory_limits
from lamina.server.request import request_bodies
from lamina.server.server_config import ServerConfig

LIMIT = 1000


class Holders(RuleBasedStateMachine):
    """The size that each holding should have is kept in a dictionary."""

    holdings: Bundle[Holding] = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(LIMIT)
        self.sizes: dict[Holding, int] = {}

    @rule(target=holdings)
    def begin(self) -> Holding:
        holding = self.budget.hold()
        self.sizes[holding] = 0
        return holding

    @rule(holding=holdings, size=st.integers(0, LIMIT + 10), leave=st.integers(0, LIMIT))
    def resize(self, holding: Holding, size: int, leave: int) -> None:
        others = sum(self.sizes.values()) - self.sizes[holding]
        fits = size <= self.sizes[holding] or others + size <= LIMIT - leave
        assert holding.resize(size, leave) is fits
        if fits:
            self.sizes[holding] = size

    @rule(holding=consumes(holdings), late=st.integers(0, 10))
    def end(self, holding: Holding, late: int) -> None:
        holding.close()
        del self.sizes[holding]
        assert holding.resize(late) is (late == 0), "nothing is held after the end"

    @invariant()
    def the_sum_is_kept_and_never_above_the_limit(self) -> None:
        assert self.budget.used == sum(self.sizes.values()) <= LIMIT

    def teardown(self) -> None:
        for holding in self.sizes:
            holding.close()
        assert self.budget.used == 0


TestHolders = Holders.TestCase

ENDS = ("whole", "leaves", "fails", "too large", "late")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9000), max_size=8), st.sampled_from(ENDS)), min_size=1, max_size=12
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_whatever_bodies_do_the_budget_is_never_exceeded_and_empty_at_the_end(
    bodies: list[tuple[list[int], str]], order: Any
) -> None:
    """Parts of all bodies arrive in any order; a body ends, its client leaves, its reply fails, or it never ends."""
    seen, service = list[int](), make_service(max_body="16KB", body_timeout_s=0.05)
    budget = service.bodies = MemoryBudget(20_000)
    app = with_middleware(make_app(service), service)

    async def one(parts: list[int], end: str) -> None:
        sizes = iter(parts)

        async def receive() -> Message:
            for _ in range(order.randrange(3)):
                await asyncio.sleep(0)
            seen.append(budget.used)
            if (size := next(sizes, None)) is not None:
                return {"type": "http.request", "body": b"x" * size, "more_body": True}
            if end == "late":
                await asyncio.sleep(60)
            if end == "leaves":
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": b"x" * (17_000 if end == "too large" else 1), "more_body": False}

        async def send(message: Message) -> None:
            seen.append(budget.used)
            if end == "fails":
                raise KeyError("the connection")

        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}
        with suppress(KeyError):
            await app(scope, receive, send)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(*body) for body in bodies))

    run(all_of_them())
    assert max(seen, default=0) <= budget.limit
    assert budget.used == 0


MIB = 1 << 20
SMALL = {"max_body": "1MiB", "body_total": "70MiB", "max_num_queued_reqs": 100_000}


def prompt(tokens: int) -> bytes:
    return b'{"prompt":[' + b",".join([b"1999"] * tokens) + b'],"max_tokens":2}'


def test_prompts_that_wait_are_counted_until_their_requests_end() -> None:
    client = FakeClient()
    client.hold = True
    service = make_service(client, **SMALL)
    lists = b'{"prompt":[' + b",".join([b"[" + b"1999," * 249 + b"7]"] * 200) + b'],"max_tokens":2}'
    tokens = 250 * 200

    async def work() -> None:
        async with http_of(service) as http:
            asked = [asyncio.create_task(http.post("/v1/completions", content=lists, headers=JSON)) for _ in range(4)]
            await until(lambda: len(service.active_calls) == 4)
            assert service.bodies.used >= 4 * tokens * 80, "in the server, and in its engine"
            more = [asyncio.create_task(http.post("/v1/completions", content=lists, headers=JSON)) for _ in range(20)]
            await until(lambda: any(one.done() for one in more))
            refused = next(one.result() for one in more if one.done())
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert error_of(refused)["code"] == "no_room_for_body"
            assert "--limits body-total=" in error_of(refused)["message"]
            assert service.bodies.used <= service.bodies.limit
            small = await http.post("/tokenize", json={"prompt": "x"})
            assert small.status_code == 200, "small ones have room that large ones leave"
            for one in (*asked, *more):
                one.cancel()
            await asyncio.gather(*asked, *more, return_exceptions=True)
            await until(lambda: not service.active_calls)

    run(work())
    assert service.bodies.used == 0
    assert 'reason="bodies"' in ask("GET", "/metrics", service).text


def test_a_body_that_was_refused_for_lack_of_room_was_not_read() -> None:
    service = make_service(**SMALL)
    taken, read = service.bodies.hold(), list[int]()
    assert taken.resize(service.bodies.limit - 1000)

    async def parts() -> Any:
        for _ in range(16):
            read.append(1)
            yield b" " * 1000

    headers = {**JSON, "content-length": "16000"}
    response = ask("POST", "/tokenize", service, content=parts(), headers=headers)
    assert (response.status_code, read) == (503, [])
    response = ask("POST", "/tokenize", service, content=parts(), headers=JSON)
    assert response.status_code == 503
    assert len(read) <= 2, "chunks count as they arrive"
    taken.close()
    assert service.bodies.used == 0
    assert ask("POST", "/tokenize", service, json={"prompt": "x"}).status_code == 200


def test_a_text_that_takes_more_than_all_memory_for_bodies_is_refused_by_its_size() -> None:
    client = FakeClient()
    client.ready = replace(client.ready, max_model_len=MIB)
    service = make_service(client, **SMALL)
    response = ask("POST", "/tokenize", service, json={"prompt": "a " * 400_000})
    assert response.status_code == 413
    assert error_of(response)["message"].startswith("the text takes")
    assert service.bodies.used == 0


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/load_model", "/reset_prefix_cache", "/none"])
def test_no_body_is_read_where_none_is_taken(path: str) -> None:
    service, read = make_service(server_dev_mode=True), list[int]()

    async def forever() -> Any:
        while True:
            read.append(1)
            yield b"x" * 1000

    for method in ("POST", "GET", "DELETE"):
        response = ask(method, path, service, content=forever(), headers=JSON)
        assert response.status_code in (200, 404, 405), (method, path)
    assert read == []


@pytest.mark.parametrize("path", ["/scale", "/drain", "/cordon", "/v1/completions", "/v1/sessions/import"])
def test_keys_are_checked_before_a_body_is_read(path: str) -> None:
    service, read = make_service(api_key="client", admin_key="operator"), list[int]()

    async def body() -> Any:
        read.append(1)
        yield b"{}"

    wrong = "client" if path in ("/scale", "/drain", "/cordon") else "operator"
    for headers in (JSON, {**JSON, "authorization": f"Bearer {wrong}"}):
        response = ask("POST", path, service, content=body(), headers=headers)
        assert (response.status_code, read) == (401, [])


@pytest.mark.parametrize("field", ["stop", "messages.x", "messages.content.x"])
def test_nested_fields_are_bounded_in_sum(field: str) -> None:
    """Each of them is decoded at 44 times its size: 6 MB of them took 270 MB."""
    nest = b"[" + b",".join([b"[" * 60 + b"]" * 60] * 500) + b"]"
    extra = b'"x":' + nest
    if field == "stop":
        names = ("stop", "logit_bias", "user", "bad_words", "kv_discard", "stop_token_ids")
        body = b'{"prompt":"a",' + b",".join(b'"%s":%s' % (name.encode(), nest) for name in names) + b"}"
    elif field == "messages.x":
        message = b'{"role":"user","content":"a",' + extra + b"}"
        body = b'{"messages":[' + b",".join([message] * 9) + b"]}"
    else:
        part = b'{"type":"text","text":"a",' + extra + b"}"
        body = b'{"messages":[{"role":"user","content":[' + b",".join([part] * 9) + b"]}]}"
    path = "/v1/completions" if field == "stop" else "/v1/chat/completions"
    response = ask("POST", path, make_service(allow_unknown_fields=True), content=body, headers=JSON)
    assert response.status_code == 400
    assert "bytes in fields that are no text" in error_of(response)["message"]


def test_limits_have_defaults_of_the_memory_that_there_is() -> None:
    limits = memory_limits("", "", 64 << 30, 8 * MIB)
    assert limits == (4 << 30, 8 << 30)
    small = memory_limits("", "", 0, 8 * MIB)
    assert small.body_total * 7 // 8 >= decoding_bytes(8 * MIB), "the largest body fits at least"
    assert memory_limits("2GiB", "1GiB", 0, MIB) == (2 << 30, 1 << 30)


def test_a_budget_of_a_server_follows_its_flag() -> None:
    assert make_service(body_total="300MiB").bodies.limit == 300 << 20


def test_large_bodies_leave_room_for_small_ones() -> None:
    service = make_service(**SMALL)
    taken = service.bodies.hold()
    assert taken.resize(service.bodies.limit - service.bodies.limit // 8)
    large = ask("POST", "/tokenize", service, json={"prompt": "a" * 20_000})
    assert large.status_code == 503
    assert ask("POST", "/tokenize", service, json={"prompt": "a" * 200}).status_code == 200


def test_an_error_names_what_is_wrong_with_limits() -> None:
    for text, words in (
        ("bodies=1GiB", "--limits bodies: there is no such key; did you mean body? its keys are body, body-total, "),
        ("body-total", "--limits body-total has no value"),
        ("body-total=much", "--limits body-total= must be a size such as 512MiB or 4GiB"),
        ("body-total=1GiB,body-total=1GiB", "--limits body-total= is given twice"),
        ("body-total=50MiB", "raise it, or lower --limits body="),
    ):
        with pytest.raises(ValueError) as error:
            ServerConfig(**GROUP_OF["body_total"].parse(text))
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        ("0::/\n", {}, 8 << 30),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(3 << 30), "memory.max": "max"}, 3 << 30),
        ("0::/a\n", {"memory.max": str(2 << 30)}, 2 << 30),
        ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": str(1 << 30)}, 1 << 30),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 8 << 30),
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": str(1 << 30)}, 8 << 30),
    ],
)
def test_the_memory_is_that_of_the_host_or_of_a_control_group_with_less(
    tmp_path: Path, groups: str, files: dict[str, str], memory: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\n")
    (tmp_path / "self/cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert memory_bytes(tmp_path, tmp_path / "groups") == memory


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("defect", ["_parse", "Call", "response_shape", "EventStream"])
def test_a_defect_in_a_route_keeps_no_memory_no_place_in_the_queue_and_no_request_of_the_engine(
    defect: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("a defect")

    client = FakeClient()
    service = make_service(client)
    monkeypatch.setattr(request_bodies if defect == "_parse" else completion_routes, defect, fails)
    response = ask("POST", "/v1/completions", service, json={"prompt": "x", "max_tokens": 2, "stream": stream})
    assert response.status_code == (200 if defect == "EventStream" and not stream else 500)
    assert (service.bodies.used, service.answers.used) == (0, 0)
    assert (service.queue_limit.completions, service.queue_limit.tokens) == (0, 0)
    assert not service.active_calls


@pytest.mark.parametrize("tenants", [2, 5])
def test_a_tenant_leaves_others_their_shares_of_a_budget(tenants: int) -> None:
    budget, keys = MemoryBudget(LIMIT, tenants, LIMIT // 2), [bytes([n + 1]) * 32 for n in range(tenants)]
    share = LIMIT // 2 // tenants
    greedy, stranger = budget.hold(keys[0]), budget.hold()
    assert budget.most(tenant=keys[0]) == LIMIT - (tenants - 1) * share
    assert not greedy.resize(budget.most(tenant=keys[0]) + 1)
    assert greedy.resize(budget.most(tenant=keys[0]))
    assert not stranger.resize(1), "what belongs to no key has no share"
    others = [budget.hold(key) for key in keys[1:]]
    assert all(other.resize(share) for other in others)
    assert not any(other.resize(share + 1) for other in others)
    others[0].close()
    assert not greedy.resize(greedy.size + 1), "it is still the other's"
    greedy.close()
    assert stranger.resize(1)
    assert budget.used == 1 + (tenants - 2) * share


def test_with_one_key_or_none_there_are_no_shares() -> None:
    for tenant in (b"", b"k" * 32):
        assert MemoryBudget(LIMIT, 1, LIMIT // 2).hold(tenant).resize(LIMIT)


def test_bodies_of_one_key_leave_room_for_anothers() -> None:
    """The first key's bodies never end; the second key's largest body is read all the same."""
    service = make_service(api_key="first,second", max_body="64KiB", body_total="4MiB")
    assert service.bodies.most(tenant=b"x" * 32) < service.bodies.limit
    least = service.bodies.most(service.bodies.limit // SPARE, b"x" * 32)
    assert least >= decoding_bytes(64 << 10), "a body that is allowed fits alone"


def test_the_smallest_total_still_fits_a_body_of_each_key() -> None:
    for keys in range(1, 9):
        names = ",".join(f"k{n}" for n in range(keys))
        service = make_service(api_key=names, max_body="64KiB", body_total=str(least_total(64 << 10)))
        assert service.bodies.most(service.bodies.limit // SPARE, b"x" * 32) >= decoding_bytes(64 << 10)
