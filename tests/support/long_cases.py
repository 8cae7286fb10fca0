"""``@pytest.mark.long(but=["a", "b"])``: all cases of a test are long but those with these ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

# Of each test whose mark says so, by name: the ids, and the cases that there are.
BUT = pytest.StashKey[dict[str, tuple[set[str], set[str]]]]()


def spare_cases(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Takes the mark from the cases that it leaves out, before anything is selected by marks."""
    there = config.stash.setdefault(BUT, {})
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is None or not isinstance(item, pytest.Function) or not mark.kwargs:
            continue
        ids, cases = there.setdefault(item.nodeid.partition("[")[0], (set(mark.kwargs["but"]), set()))
        cases.add(item.callspec.id)
        if item.callspec.id in ids:
            item.own_markers = [own for own in item.own_markers if own.name != "long"]
