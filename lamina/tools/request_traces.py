"""Request traces: when requests came, and the lengths of them and their replies. Azure's CSV and Mooncake's
JSON lines.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple

_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}
EXAMPLE = "example"  # in place of a file: requests that come with Lamina
_EXAMPLE_FILE = Path(__file__).parent / "plan" / "data" / "example_trace.csv"
FORMATS = f"CSV with the columns {','.join(_AZURE)}, or JSON lines with timestamp (ms), input_length, output_length"
TRACE_HELP = f"a file of requests: {FORMATS} and perhaps hash_ids, or .gz of these; or `{EXAMPLE}`, which Lamina ships"
_MOST_MS = 1e15  # of a timestamp: some 30,000 years
HASHED = 512  # tokens of a block of hash_ids


class TracedRequest(NamedTuple):
    """A request: seconds from the first one, tokens of its prompt and of its reply. ``blocks``: ids of the prompt's
    blocks of HASHED tokens, the last one shorter; equal if they and all blocks before them are equal. Empty if the
    trace has none.
    """

    at_s: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestTrace:
    """``requests`` by arrival. ``dropped``: the number of requests that were too long."""

    name: str
    requests: tuple[TracedRequest, ...]
    dropped: int = 0

    @property
    def is_surrogate(self) -> bool:
        """True if the trace was made to resemble one that is not here; its file's name shows it."""
        return "SURROGATE" in self.name.upper()

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(r.prompt for r in self.requests) / len(self.requests)

    @property
    def mean_answer(self) -> float:
        """Mean tokens of a reply."""
        return sum(r.answer for r in self.requests) / len(self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and reply together."""
        return max(r.prompt + r.answer for r in self.requests)

    def stored(self, window: int = 0) -> float:
        """Return the tokens that attention of a running sequence sees on average: each request counts as often as it
        has steps.
        """
        total = sum(_seen(r, window) for r in self.requests)
        return total / sum(r.answer for r in self.requests)

    def pairs(self, window: int = 0) -> float:
        """Return the pairs of a token of a request's prompt and one that it attends, on average."""
        return sum(_pairs(r.prompt, window) for r in self.requests) / len(self.requests)

    @property
    def rate(self) -> float:
        """Requests per second; 0 if all came at once."""
        took = self.requests[-1].at_s
        return (len(self.requests) - 1) / took if took else 0.0

    def at_rate(self, rate: float) -> RequestTrace:
        """Return the trace with so many requests per second. Raises ValueError if all came at once."""
        if not self.rate:
            raise ValueError(f"--rate: all requests of --trace {self.name} came at one time, which no rate stretches")
        factor = self.rate / rate
        return replace(self, requests=tuple(r._replace(at_s=r.at_s * factor) for r in self.requests))

    def within(self, most: float) -> RequestTrace:
        """Return the trace without requests of more than ``most`` tokens, which no pool of that size can hold."""
        kept = tuple(r for r in self.requests if r.prompt + r.answer <= most)
        return replace(self, requests=kept, dropped=self.dropped + len(self.requests) - len(kept))

    def beyond(self, most: float) -> RequestTrace:
        """Return the other requests: those of more than ``most`` tokens."""
        return replace(self, requests=tuple(r for r in self.requests if r.prompt + r.answer > most))

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(r.answer for r in self.requests)

    def repeated(self, count: int) -> RequestTrace:
        """Return ``count`` requests: all of them again and again, in their order."""
        return replace(self, requests=tuple(islice(cycle(self.requests), count)))

    def scaled(self, factor: float) -> RequestTrace:
        """Return the trace with prompts multiplied in length; replies stay."""
        return replace(self, requests=tuple(r._replace(prompt=max(1, round(r.prompt * factor))) for r in self.requests))

    def first(self, count: int | None) -> RequestTrace:
        """Return the first ``count`` requests; None: all of them."""
        return replace(self, requests=self.requests[:count])


def read_trace(path: str) -> RequestTrace:
    """Read a trace; EXAMPLE: the one that Lamina ships. Raises ValueError that names --trace and the line, for a bad
    file or a missing one.
    """
    if path == EXAMPLE and not Path(path).exists():
        path = str(_EXAMPLE_FILE)
    name = Path(path).name
    try:
        opened = gzip.open(path, "rt", newline="") if path.endswith(".gz") else open(path, newline="")  # noqa: SIM115
    except OSError as error:
        hint = f"; `--trace {EXAMPLE}` is a file that Lamina ships" if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"--trace {path}: {error.strerror}{hint}") from None
    with opened as file:
        try:
            requests = tuple(_rebased(_lines(file, f"--trace {path}"), f"--trace {path}"))
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, csv.Error, EOFError) as error:
            raise ValueError(f"--trace {path} cannot be read: {error}") from None
    if not requests:
        raise ValueError(f"--trace {path} has no requests")
    return RequestTrace(name, requests)


def spread_arrivals(trace: RequestTrace, seed: int) -> RequestTrace:
    """Return the trace with random arrivals within a tick, where several requests have the time of one tick of its
    clock.
    """
    rng, times = random.Random(seed), sorted({r.at_s for r in trace.requests})
    tick = min((b - a for a, b in pairwise(times)), default=0.0)
    several = Counter(r.at_s for r in trace.requests)
    moved = (r._replace(at_s=r.at_s + rng.random() * tick) if several[r.at_s] > 1 else r for r in trace.requests)
    return replace(trace, requests=tuple(sorted(moved, key=lambda r: r.at_s)))


def _seen(request: TracedRequest, window: int) -> float:
    """Return the sum of the tokens that all steps of the request attend."""
    first, steps = request.prompt, request.answer
    if not window or first + steps <= window:
        return first * steps + steps * steps / 2
    growing = max(0, window - first)
    return first * growing + growing * growing / 2 + window * (steps - growing)


def _pairs(prompt: int, window: int) -> float:
    """Return the sum of the tokens that a prompt's tokens attend, themselves included."""
    growing = min(prompt, window or prompt)
    return growing * (growing + 1) / 2 + (prompt - growing) * window


def _rebased(requests: Iterable[tuple[int, TracedRequest]], where: str) -> Iterator[TracedRequest]:
    start = before = -math.inf
    for number, request in requests:
        start = request.at_s if start == -math.inf else start
        if request.at_s < before:
            raise ValueError(f"{where}, line {number}: it came before the request above it: sort the file by time")
        if request.prompt < 1 or request.answer < 1:
            raise ValueError(
                f"{where}, line {number}: {request.prompt} and {request.answer} tokens: both must be above 0"
            )
        before = request.at_s
        yield request._replace(at_s=request.at_s - start)


def _lines(file: Iterable[str], where: str) -> Iterator[tuple[int, TracedRequest]]:
    for number, line in enumerate(file, 1):
        text = line.strip()
        if not text:
            continue
        if number == 1 and not text.startswith("{"):
            if text.split(",") != _AZURE:
                raise ValueError(f"{where}, line 1: {text[:60]!r} is not the first line of a trace: {FORMATS}")
            yield from _azure(file, where)
            return
        yield number, _mooncake(text, f"{where}, line {number}")


def _azure(rest: Iterable[str], where: str) -> Iterator[tuple[int, TracedRequest]]:
    for number, row in enumerate(csv.reader(rest), 2):
        if not row:
            continue
        try:
            when, prompt, answer = row
            at = datetime.fromisoformat(when[:26]).replace(tzinfo=None)
            yield number, TracedRequest((at - datetime(1970, 1, 1)).total_seconds(), int(prompt), int(answer))
        except ValueError:
            raise ValueError(f"{where}, line {number}: {','.join(row)[:60]!r} is not a time and two counts") from None


def _mooncake(text: str, where: str) -> TracedRequest:
    try:
        entry = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(entry, dict) or not _MOONCAKE - {"hash_ids"} <= entry.keys() <= _MOONCAKE:
        raise ValueError(f"{where}: fields must be {', '.join(sorted(_MOONCAKE))}")
    for name in ("input_length", "output_length"):
        if not isinstance(entry[name], int) or isinstance(entry[name], bool):
            raise ValueError(f"{where}: {name} must be a whole number, not {entry[name]!r}")
    if not isinstance(entry["timestamp"], int | float) or not abs(entry["timestamp"]) < _MOST_MS:
        raise ValueError(f"{where}: timestamp must be milliseconds, not {entry['timestamp']!r}")
    prompt, hashes = entry["input_length"], entry.get("hash_ids")
    if hashes is not None and (not isinstance(hashes, list) or len(hashes) != -(-prompt // HASHED)):
        raise ValueError(f"{where}: hash_ids must have one id for each {HASHED} tokens of input_length")
    if hashes is not None and not all(type(x) is int and 0 <= x < 1 << 63 for x in hashes):
        raise ValueError(f"{where}: hash_ids must be whole numbers of 0 to 2^63 - 1")
    return TracedRequest(entry["timestamp"] / 1000, prompt, entry["output_length"], tuple(hashes or ()))
