"""Kills a worker of a store with SIGKILL, again and again: python killed_workers.py DIRECTORY ROUNDS SEED.

Each round forks a worker that writes, reads and drops pages, and reports each call before and after it. It is killed at
a random moment; then this process opens the store and compares. Prints how many calls were cut off, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, PageGoneError, StorageConfig
from lamina.kv.storage.file import FileStorage

PAGES = 12
LONGEST_S = 0.02  # of a worker's life after its first call
Said = tuple[str, int, int]  # what, page, version


def fragments(number: int, version: int) -> dict[PageFragment, bytes]:
    """Makes fragments of one size, so that a page's versions could be mixed up."""
    return {PageFragment(0, head): bytes([number, version % 256, head]) * 20_000 for head in range(3)}


def page(number: int) -> Page:
    return Page(bytes([number]) * 32, number, PAGE, b"t" * 16, Provenance("prompt"))


def opened(directory: str) -> FileStorage:
    return FileStorage(StorageConfig(8 << 20, b"i" * 32, directory=directory, secret=b"s" * 32, server="one"))


def found(medium: FileStorage, number: int) -> int | None:
    """The version of a page; None where it is not there. Raises AssertionError where it is none at all."""
    into = {fragment: bytearray(len(data)) for fragment, data in fragments(number, 0).items()}
    try:
        medium.read(page(number).key, into)
    except PageGoneError:
        return None
    except FragmentLostError as e:
        raise AssertionError("the index knew what was not there") from e
    version = into[PageFragment(0, 0)][1]
    assert {a: bytes(d) for a, d in into.items()} == fragments(number, version), "a page of two versions"
    return version


def work(directory: str, out: int, seed: int) -> None:
    """The worker: until it is killed."""
    choice, medium, version = random.Random(seed), opened(directory), seed * 37
    while True:
        number, version = choice.randrange(PAGES), version + 1
        what = choice.choice("wwrd")
        os.write(out, f"{what} {number} {version % 256}\n".encode())
        if what == "w":
            medium.reserve(180_000)
            medium.write(page(number), fragments(number, version))
        elif what == "d":
            medium.delete([page(number).key])
        else:
            found(medium, number)
        os.write(out, f"{what.upper()} {number} {version % 256}\n".encode())


def killed(directory: str, seed: int) -> list[Said]:
    """Returns the reports of a worker in its life."""
    inlet, out = os.pipe()
    worker = os.fork()
    if not worker:
        try:
            work(directory, out, seed)
        finally:
            os._exit(1)
    os.close(out)
    with os.fdopen(inlet, "rb") as file:
        first = file.readline()
        end = time.perf_counter() + random.Random(seed).uniform(0.0, LONGEST_S)
        while time.perf_counter() < end:
            pass
        os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        lines = (first + file.read()).decode().splitlines()
    assert os.WTERMSIG(status) == signal.SIGKILL, f"it ended by itself: {status}"
    return [(what, int(number), int(version)) for what, number, version in map(str.split, lines)]


def compare(directory: str, said: list[Said], known: dict[int, int]) -> bool:
    """Compares the store with the reports: all is there, and of a call that was cut off all or nothing.

    Returns whether one was.
    """
    may_be: dict[int, set[int | None]] = {}
    for what, number, version in said:
        if what in "WD":
            known.pop(number, None)
            known |= {number: version} if what == "W" else {}
    what, number, version = said[-1]
    if what in "wd":
        may_be[number] = {known.get(number), version if what == "w" else None}
    medium = opened(directory)
    for each in range(PAGES):
        is_there = found(medium, each)
        assert is_there in may_be.get(each, {known.get(each)}), (each, is_there, said[-1], known.get(each))
        known.pop(each, None)
        known |= {} if is_there is None else {each: is_there}
    medium.close()
    return what in "wrd"


def main() -> None:
    directory, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    known: dict[int, int] = {}
    cut: dict[str, int] = {}
    for number in range(rounds):
        said = killed(directory, seed + number)
        if compare(directory, said, known):
            cut[said[-1][0]] = cut.get(said[-1][0], 0) + 1
    medium = opened(directory)
    there = {name for name in os.listdir(directory) if name.startswith("segment-")}
    indexed = {f"segment-{number:06d}" for number in medium.page_index.segments()}
    names = {name.partition("-")[0] for name in os.listdir(directory)}
    medium.close()
    assert there == indexed
    assert names == {"index.db", "key", "lock", "segment"}
    assert sum(file.stat().st_size for file in Path(directory).glob("segment-*")) <= 8 << 20
    print(json.dumps({"rounds": rounds, "cut off": cut}))


if __name__ == "__main__":
    main()
