"""Sends requests to an OpenAI-compatible server and records the time of every chunk of the reply."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSED = (429, 503, 529)  # an overloaded server
MAX_LINE_BYTES = 2 << 20
_decode = msgspec.json.Decoder().decode


@dataclass
class Answer:
    """The result of a request. Times in seconds; ``status`` 0 = no reply at all, and ``error`` is the reason."""

    start_s: float
    status: int = 0
    error: str = ""
    first_s: float = 0.0  # when the first token came
    last_s: float = 0.0  # when the last token came
    end_s: float = 0.0  # when the reply ended, in any way
    gaps_s: list[float] = field(default_factory=list)  # between chunks
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def refused(self) -> bool:
        return self.status in REFUSED

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: until the last token."""
        return self.last_s - self.start_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first one; 0 if there is none."""
        more = self.output_tokens - 1
        return (self.last_s - self.first_s) / more if more > 0 else 0.0


@dataclass(frozen=True)
class TimedRequest:
    """A body to send ``arrival_s`` seconds after the start."""

    arrival_s: float
    body: dict[str, Any]


def open_client(base_url: str, api_key: str, timeout_s: float) -> aiohttp.ClientSession:
    """Open a client; call it in a running event loop. ``timeout_s``: of silence, in any phase of a request. Routes are
    passed without their leading slash, as ``base_url`` may have a path. There is no limit on connections.
    """
    return aiohttp.ClientSession(
        base_url.rstrip("/") + "/",
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=MAX_LINE_BYTES // 2,
    )


def body_of(endpoint: str, model: str, prompt: str | list[int], output_len: int, **more: Any) -> dict[str, Any]:
    """Return a streaming request of either endpoint; a chat needs text."""
    content: dict[str, Any] = {"prompt": prompt, "max_tokens": output_len}
    if endpoint == CHAT:
        content = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
    return {"model": model, **content, "stream": True, "stream_options": {"include_usage": True}, **more}


async def send_request(http: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Answer:
    """Send one streaming request and read its reply to the end. Never raises for a server's failure."""
    answer = Answer(time.perf_counter())
    try:
        async with http.post(endpoint.lstrip("/"), json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = (await response.read())[:500].decode(errors="replace") or "no body"
            else:
                async for data in events(response):
                    _book(answer, data)
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as e:  # msgspec's are ValueErrors
        answer.error = f"{type(e).__name__}: {e}"
    answer.end_s = time.perf_counter()
    if answer.ok and not answer.output_tokens:
        answer.error = "the stream ended without any token or without usage"
    return answer


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of the reply's server-sent events, except the last one. Raises ValueError for a line above
    MAX_LINE_BYTES.
    """
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield line[6:]


def _book(answer: Answer, data: bytes) -> None:
    now, chunk = time.perf_counter(), _decode(data)
    if "error" in chunk:
        answer.error = str(chunk["error"])
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        if text is None or (delta is not None and "role" in delta and not text):
            continue  # the first chunk of a chat is not a token
        answer.text += text
        if answer.first_s:
            answer.gaps_s.append(now - answer.last_s)
        else:
            answer.first_s = now
        answer.last_s = now
    if usage := chunk.get("usage"):
        answer.input_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def send_all(
    http: aiohttp.ClientSession,
    endpoint: str,
    requests: Sequence[TimedRequest],
    max_concurrency: int = 0,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Send all requests at their times; return the results in their order. ``max_concurrency`` above 0: later requests
    wait until earlier ones end; their time counts from when they are sent.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(body: dict[str, Any]) -> Answer:
        async with gate:
            answer = await send_request(http, endpoint, body)
        on_answer(answer)
        return answer

    start, tasks = time.perf_counter(), []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
            tasks.append(group.create_task(one(request.body)))
    return [t.result() for t in tasks]
