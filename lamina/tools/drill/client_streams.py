"""The streams of a drill: requests of all kinds, and a record of each reply."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

TEXT = "def class return for in range import numpy self list of the value if else not None print sum max"
NUM_PAGES_PROMPTS, PAGES_OF = (2, 40), (140, 260)  # words of a prompt, and of one that has a page or two
# All but the last have a seed if they draw: so each has one right reply. For the last one the journal has the seed.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 1, "logprobs": 2},
    {"temperature": 0.8, "seed": 2, "n": 2, "presence_penalty": 0.4},
    {"temperature": 0.7, "seed": 3, "stop": ["return", "xyz"], "min_tokens": 8},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 1.0, "ignore_eos": True, "logprobs": 0},
)


@dataclass
class StreamRecord:
    """The contents of one stream: text, tokens with log-probabilities and the reason of the end, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: int = 0  # of all choices, by the stream's own usage
    error: str = "it never began"
    times: list[float] = field(default_factory=list)  # of its events
    id: str = ""  # of its reply

    def pause_after(self, moment: float, until: float = inf) -> float | None:
        """Return the longest pause of the stream that began before ``until``, if the stream had not ended by
        ``moment``.
        """
        times = [t for t in self.times if t > moment]
        if not times:
            return None
        before = [moment, *times[:-1]]
        return max(now - last for last, now in zip(before, times, strict=True) if last < until)


def seeds_of(journal: Path) -> dict[str, int]:
    """Return the seeds of all requests in a server's journal, by the ids of their replies. The server draws one if a
    client gave none.
    """
    from lamina.server.journal.journal_records import AcceptedRecord
    from lamina.server.journal.segment import SegmentContents

    records = [r for path in sorted(journal.glob("segment-*")) for r in SegmentContents(path).records]
    return {r.id: r.prompts[0].seed for r in records if isinstance(r, AcceptedRecord)}


def has_one_answer(body: dict[str, Any]) -> bool:
    """Return True if a request gets the same tokens each time."""
    return "seed" in body or not body["temperature"]


def bodies_of(
    count: int, tokens: int, rng: random.Random, words: tuple[int, int] = NUM_PAGES_PROMPTS
) -> list[dict[str, Any]]:
    """Return requests of all kinds, in turn. ``words``: least and most words of a prompt."""
    more = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": tokens,
    }
    vocabulary = TEXT.split()
    prompts = [" ".join(rng.choices(vocabulary, k=rng.randint(*words))) for _ in range(count)]
    return [{"prompt": prompt, **KINDS[i % len(KINDS)], **more} for i, prompt in enumerate(prompts)]


def read_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    timeout_s: float,
    hit: Callable[[], object] | None,
    after_s: float,
    records: list[StreamRecord] | None = None,
) -> list[StreamRecord]:
    """Read all streams at once, each to its end, into ``records``, which other threads may read meanwhile. ``hit`` is
    called after ``after_s``; its errors are raised.
    """
    records = [StreamRecord() for _ in bodies] if records is None else records
    try:
        return asyncio.run(_read_all(url, bodies, timeout_s, hit, after_s, records))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _read_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    timeout_s: float,
    hit: Callable[[], object] | None,
    after_s: float,
    records: list[StreamRecord],
) -> list[StreamRecord]:
    from lamina.tools.bench.openai_client import open_client

    async with open_client(url, "", timeout_s) as http, asyncio.TaskGroup() as group:
        if hit is not None:
            group.create_task(_call(hit, after_s))
        for body, one in zip(bodies, records, strict=True):
            group.create_task(_read(http, body, one))
    return records


async def _call(hit: Callable[[], object], after_s: float) -> None:
    await asyncio.sleep(after_s)
    await asyncio.to_thread(hit)  # it may wait for its moment


async def _read(http: Any, body: dict[str, Any], record: StreamRecord) -> None:
    import aiohttp

    from lamina.tools.bench.openai_client import events

    try:
        async with http.post("v1/completions", json=body) as response:
            record.error = "" if response.status == 200 else f"status {response.status}"
            async for data in events(response):
                _take(record, data)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"
    if not record.error and len(record.reasons) != body.get("n", 1):
        record.error = "it ended without a reason"


def _take(record: StreamRecord, data: bytes) -> None:
    import msgspec

    chunk = msgspec.json.decode(data)
    record.id = chunk.get("id", record.id)
    if "error" in chunk:
        record.error = str(chunk["error"])
    for choice in chunk.get("choices") or ():
        record.times.append(time.perf_counter())
        index, logprobs = choice["index"], choice.get("logprobs")
        record.texts[index] = record.texts.get(index, "") + choice["text"]
        record.ids.setdefault(index, []).extend(choice["token_ids"])
        if logprobs:
            pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
            record.scores.setdefault(index, []).extend(pairs)
        if choice.get("finish_reason"):
            record.reasons[index] = choice["finish_reason"]
    if usage := chunk.get("usage"):
        record.tokens = usage["completion_tokens"]
