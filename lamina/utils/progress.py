"""A progress bar on stderr for loading, as a callback of (stage, done, total)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
OnProgress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar(enabled: bool) -> Iterator[OnProgress]:
    """Yield a callback that shows one bar per stage; it does nothing if ``enabled`` is False."""
    if not enabled:
        yield lambda stage, done, total: None
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def end_last() -> None:
        """Complete the last stage's bar: it has ended when the next one begins, or all have."""
        for bar in list(bars.values())[-1:]:
            bar.update(bar.total - bar.n)
            bar.close()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            end_last()
            bars[stage] = tqdm(total=total, desc=stage, bar_format="{desc:<22} {bar:30} {n_fmt}/{total_fmt} {elapsed}")
        bars[stage].total = total
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
        end_last()
    finally:
        for bar in bars.values():
            bar.close()


def counted(things: Iterable[T], make: bool | Callable[..., Any], total: int, text: str) -> Iterator[T]:
    """Yield ``things``, of which a bar counts ``total``. ``make``: True: on a terminal; or a function that makes the
    bar, called as tqdm is.
    """
    if make is True and not sys.stderr.isatty():
        yield from things
        return
    from tqdm import tqdm

    make = tqdm if isinstance(make, bool) else make
    with contextlib.closing(make(total=total, desc=text, dynamic_ncols=True)) as bar:
        for thing in things:
            yield thing
            bar.update()
