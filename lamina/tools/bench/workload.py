"""The requests of a benchmark and their times: random prompts, prompts of a file, or a recorded trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamina.config.conflicts import need_text
from lamina.tools.request_traces import HASHED, RequestTrace

DATASETS = ("random", "sharegpt", "custom")


@dataclass(frozen=True)
class LoadRequest:
    """One request to come: ``text`` if given, else ``input_len`` tokens from ``tokens_of``. ``output_len`` 0 = as many
    tokens as ``answer`` has.
    """

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    text: str | None = None
    answer: str = ""


def random_requests(count: int, input_len: int, output_len: int, *, range_ratio: float, seed: int) -> list[LoadRequest]:
    """Return ``count`` requests whose lengths are uniform within +- ``range_ratio`` of the given ones."""
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"--random-range-ratio must lie in [0, 1), not {range_ratio}")
    rng = random.Random(f"{seed}/lengths")

    def around(length: int) -> int:
        low = int(length * (1 - range_ratio))
        return max(1, rng.randint(low, max(low, int(length * (1 + range_ratio)))))

    return [LoadRequest(0.0, around(input_len), around(output_len)) for _ in range(count)]


def file_requests(kind: str, path: str, count: int, output_len: int, *, seed: int) -> list[LoadRequest]:
    """Return requests drawn from a file. "custom": JSON lines with prompt and perhaps output_tokens. "sharegpt": a JSON
    list of conversations; the first turn is the prompt, the second one's length is the output's. ``output_len`` above 0
    is used for all. Raises ValueError, OSError.
    """
    if not path:
        raise ValueError(need_text("bench serve --dataset-name", ["bench serve --dataset-path"]))
    text = Path(path).read_text()
    try:
        rows = list(_custom(text) if kind == "custom" else _sharegpt(json.loads(text)))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"--dataset-path {path}: not of the kind {kind}: {type(e).__name__}: {e}") from e
    if not rows:
        raise ValueError(f"--dataset-path {path}: no prompts")
    rng = random.Random(f"{seed}/choice")
    rng.shuffle(rows)
    asks = [rows[i % len(rows)] for i in range(count)]
    return [replace(a, output_len=output_len) for a in asks] if output_len else asks


def _custom(text: str) -> Iterator[LoadRequest]:
    for line in filter(str.strip, text.splitlines()):
        row = json.loads(line)
        yield LoadRequest(0.0, 0, int(row.get("output_tokens", 256)), text=str(row["prompt"]))


def _sharegpt(rows: list[Any]) -> Iterator[LoadRequest]:
    for row in rows:
        turns = row.get("conversations", [])
        if len(turns) >= 2:
            yield LoadRequest(0.0, 0, 0, text=str(turns[0]["value"]), answer=str(turns[1]["value"]))


def trace_requests(trace: RequestTrace, speed_up: float) -> list[LoadRequest]:
    """Return a trace's requests, ``speed_up`` times as fast as they came."""
    if speed_up <= 0:
        raise ValueError(f"--speed-up must be positive, not {speed_up}")
    return [LoadRequest(r.at_s / speed_up, r.prompt, r.answer, r.blocks) for r in trace.requests]


def at_rate(asks: list[LoadRequest], rate: float, seed: int) -> list[LoadRequest]:
    """Return the same requests, arriving as a Poisson process of ``rate`` a second; all at once for infinity."""
    if not rate > 0:
        raise ValueError(f"--request-rate must be positive, or inf, not {rate}")
    if rate == float("inf"):
        return asks
    rng, now, timed = random.Random(f"{seed}/arrivals"), 0.0, []
    for ask in asks:
        timed.append(replace(ask, arrival_s=now))
        now += rng.expovariate(rate)
    return timed


def tokens_of(ask: LoadRequest, number: int, pool: list[int], seed: int) -> list[int]:
    """Return ``input_len`` tokens of ``pool``. Blocks with equal ids give equal tokens, all other blocks differ."""
    if not ask.blocks:
        return random.Random(f"{seed}/{number}").choices(pool, k=ask.input_len)
    tokens: list[int] = []
    for block in ask.blocks:
        tokens += random.Random(f"{seed}/block/{block}").choices(pool, k=HASHED)
    return tokens[: ask.input_len]
