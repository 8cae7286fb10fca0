"""Recorded request traces: when a request came, the lengths of its prompt and reply, and the prefixes that
it shared.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

BLOCK_TOKENS = 512  # tokens of one hash id
TICK_S = 3.0  # arrivals in Mooncake's recorded traces are rounded to it
_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}


@dataclass(frozen=True)
class TraceRow:
    """A request of a trace. ``arrival_s`` counts from the first one. ``blocks`` are hash ids of 512 tokens each: equal
    ids mean equal tokens after equal prefixes. Azure's traces have none.
    """

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def read_azure(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Read Azure's LLM inference traces of 2023 (CSV). Raises ValueError that names the line."""
    rows = csv.reader(lines)
    header = next(rows, [])
    if header != _AZURE:
        raise ValueError(f"line 1: the columns must be {','.join(_AZURE)}, not {','.join(header)[:80]!r}")
    for number, row in enumerate(rows, 2):
        try:
            stamp, input_len, output_len = row
            day, _, fraction = stamp.partition(".")
            seconds = datetime.fromisoformat(f"{day}+00:00").timestamp() + float(f"0.{fraction or 0}")
            yield TraceRow(seconds, int(input_len), int(output_len))
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from e


def read_mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Read Mooncake's traces (JSON lines, milliseconds). Raises ValueError that names the line."""
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict) or set(fields) != _MOONCAKE:
                raise ValueError(f"the fields must be {', '.join(sorted(_MOONCAKE))}")
            row = TraceRow(
                fields["timestamp"] / 1000, fields["input_length"], fields["output_length"], tuple(fields["hash_ids"])
            )
            if len(row.blocks) != -(-row.input_len // BLOCK_TOKENS):
                raise ValueError(f"{len(row.blocks)} hash ids for {row.input_len} tokens")
        except (ValueError, TypeError) as e:
            raise ValueError(f"line {number}: {e}") from e
        yield row


READERS = {"azure": read_azure, "mooncake": read_mooncake}


def load_trace(kind: str, path: str, *, limit: int = 0, seed: int = 0, spread: bool = True) -> list[TraceRow]:
    """Return the rows of a file, or of a gzip file, by arrival; the first arrives at 0.

    ``limit``: at most so many rows, 0 = all. ``spread``: move arrivals that are rounded to ticks to random times in
    their tick. Raises ValueError for rows out of order and lengths below 1; OSError.
    """
    if kind not in READERS:
        raise ValueError(f"--trace {kind!r}: known kinds are {', '.join(READERS)}")
    open_text = gzip.open if Path(path).suffix == ".gz" else open
    rows: list[TraceRow] = []
    with open_text(path, "rt") as lines:
        try:
            for row in READERS[kind](lines):
                _check(row, rows[-1] if rows else row)
                rows.append(row)
                if len(rows) == limit:
                    break
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from e
    if not rows:
        raise ValueError(f"{path}: no rows")
    if spread and kind == "mooncake":
        rng = random.Random(f"{seed}/ticks")
        rows = [replace(r, arrival_s=r.arrival_s + rng.uniform(0, TICK_S)) for r in rows]
        rows.sort(key=lambda r: r.arrival_s)
    return [replace(r, arrival_s=r.arrival_s - rows[0].arrival_s) for r in rows]


def rows_that_fit(rows: list[TraceRow], max_tokens: int) -> tuple[list[TraceRow], int]:
    """Return the rows whose prompt and reply together fit into ``max_tokens``, and the number of rows that do not."""
    kept = [r for r in rows if r.input_len + r.output_len <= max_tokens]
    return kept, len(rows) - len(kept)


def _check(row: TraceRow, before: TraceRow) -> None:
    if row.input_len < 1 or row.output_len < 1:
        raise ValueError(f"lengths must be at least 1: {row.input_len}, {row.output_len}")
    if row.arrival_s < before.arrival_s:
        raise ValueError(f"arrivals must not go back: {row.arrival_s:g} s comes after {before.arrival_s:g} s")
