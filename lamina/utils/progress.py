"""A progress bar on stderr for loading, as a callback of (stage, done, total)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

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


@contextlib.contextmanager
def counting_bar(wanted: bool | Callable[..., Any], total: int, text: str) -> Iterator[Callable[[], object]]:
    """Show a bar of ``total`` things, and yield a function that counts one. ``wanted``: True: on a terminal; or a
    function that makes the bar, called as tqdm is.
    """
    if not wanted or (wanted is True and not sys.stderr.isatty()):
        yield lambda: None
        return
    from tqdm import tqdm

    make = tqdm if isinstance(wanted, bool) else wanted
    with contextlib.closing(make(total=total, desc=text, dynamic_ncols=True)) as bar:
        yield bar.update
