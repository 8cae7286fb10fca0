"""The worker processes of a driver, by what ps shows of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

WARM = "lamina.workers.zygote"  # it stays for the next engine


def workers_of(driver: int) -> Iterator[tuple[int, str]]:
    """Number and MODULE [ARGUMENT...] of each worker process of ``driver``, and of its warm process; not those of other
    drivers that it has started, as a fixture may have.
    """
    for task in Path(f"/proc/{driver}/task").iterdir():
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
                _, found, rest = command.partition("lamina.workers")
                if found and Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    yield child, found + rest
                if found:
                    yield from workers_of(child)
            except OSError:  # it has ended
                continue
