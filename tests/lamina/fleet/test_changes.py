"""Changes of the memory workers, as far as the driver alone is concerned."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from test_supervise import Run

from lamina.fleet.elastic import Change, Elastic
from lamina.protocol.groups import Capacity

NOTHING = Capacity([], [], 0, False, [], [], [])


def test_a_change_that_cannot_begin_has_no_outcome_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has asked is told at once; told of again, it would count as the answer to whoever asks next."""
    run = Run()
    elastic = Elastic(run.config, run.members, run.cohort, run.world.clock)

    def no_more(role: str, index: int) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(run.cohort, "start_beside", no_more)
    more = structs.replace(run.config.topology, memory_workers=4)
    with pytest.raises(OSError, match="no more processes"):
        elastic.begin(Change(more, [], NOTHING))
    assert not elastic.under_way
    assert elastic.take_outcome() is None
