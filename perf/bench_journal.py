"""The cost of a server's --journal: seconds until a request is on the disk, and seconds of the event loop for each
step.

Requests are accepted so many at a time, as they come from clients. As the floor of the disk, the same bytes are also
written and synced by hand, one by one. A step brings one token to each of so many streams. Prints a table and JSON
lines; --write appends those to perf/results/bench_journal.jsonl.

    python perf/bench_journal.py --dir /var/tmp --write
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import Any

import msgspec
from common import cpu_pressure, parser_of, record, spread

from lamina import SamplingParams
from lamina.server.engine_client.messages import Delta
from lamina.server.journal.journal import Journal
from lamina.server.journal.journal_records import AcceptedRecord, JournalPrompt
from lamina.server.journal.segment import frame_record
from lamina.server.request.accepted_request import new_accepted_request
from lamina.server.request.openai_protocol import Sampling


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dir", default=".", help="on the disk that is measured")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    results: dict[str, Any] = {"accept_s": {}, "step_s": {}}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        journal = Journal(os.path.join(folder, "j"), "none/none", 1 << 30)
        results["sync_s"] = spread(by_hand(folder, frame_record(request(journal, args.prompt)), args.rounds))
        print(f"the same bytes by hand, one by one: {show(results['sync_s'])}")
        for count in (1, 8, 64):
            each = asyncio.run(accepts(journal, args.prompt, count, args.rounds))
            results["accept_s"][str(count)] = spread(each)
            print(f"{count:3} requests at a time:              {show(results['accept_s'][str(count)])}")
        for count in (1, 32, 256):
            each = asyncio.run(steps(journal, count, args.steps))
            results["step_s"][str(count)] = spread(each)
            print(f"a step of {count:3} streams:               {show(results['step_s'][str(count)])}")
        journal.close()
    results["cpu_pressure"] = cpu_pressure()
    print(record("bench_journal", vars(args) | {"dir": "given"}, results, write=args.write))


def show(seconds: dict[str, float]) -> str:
    """In milliseconds."""
    return f"{1e3 * seconds['median']:8.3f} ms, p90 {1e3 * seconds['p90']:8.3f} ms"


def request(journal: Journal, tokens: int) -> AcceptedRecord:
    """With a prompt of so many tokens, of 4 characters each."""
    (key,) = journal.new_keys(1)
    asked = new_accepted_request("chatcmpl", "tiny", SamplingParams(max_tokens=64), Sampling.model_validate({}), b"")
    prompt = JournalPrompt(key, list(range(1000, 1000 + tokens)), "word" * tokens, 1)
    return msgspec.structs.replace(asked, prompts=[prompt])


def by_hand(folder: str, data: bytes, rounds: int) -> list[float]:
    """Write and sync, again and again."""
    fd, seconds = os.open(os.path.join(folder, "plain"), os.O_WRONLY | os.O_CREAT), []
    for _ in range(rounds):
        begun = time.perf_counter()
        os.write(fd, data)
        os.fdatasync(fd)
        seconds.append(time.perf_counter() - begun)
    os.close(fd)
    return seconds


async def accepts(journal: Journal, tokens: int, count: int, rounds: int) -> list[float]:
    """Seconds that each request waits."""
    seconds: list[float] = []

    async def one() -> None:
        begun = time.perf_counter()
        entry = await journal.accept(request(journal, tokens))
        seconds.append(time.perf_counter() - begun)
        journal.drop(entry.accepted.id)

    for _ in range(rounds):
        await asyncio.gather(*(one() for _ in range(count)))
    return seconds


async def steps(journal: Journal, count: int, rounds: int) -> list[float]:
    """Seconds of ``add_deltas`` for a token of each stream."""
    entries = [await journal.accept(request(journal, 16)) for _ in range(count)]
    seconds = []
    for token in range(rounds):
        deltas = [Delta(key=entry.keys[0], index=0, token_ids=[token], text="word") for entry in entries]
        begun = time.perf_counter()
        journal.add_deltas(deltas)
        seconds.append(time.perf_counter() - begun)
    for entry in entries:
        journal.drop(entry.accepted.id)
    return seconds


if __name__ == "__main__":
    main()
