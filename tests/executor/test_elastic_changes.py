"""Changes of the memory workers, as far as the driver alone is concerned."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from test_supervisor import Run

from lamina.executor.elastic import MemoryResizer, ResizePlan
from lamina.protocol.capacity import Capacity

NOTHING = Capacity([], [], 0, False, [], [], [])


def test_a_change_that_cannot_begin_has_no_outcome_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that asked gets its error at once; a second report would count as the answer to the next caller."""
    run = Run()
    elastic = MemoryResizer(run.config, run.members, run.cohort, run.world.clock)

    def no_more(role: str, index: int) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(run.cohort, "start_extra", no_more)
    more = structs.replace(run.config.topology, memory_workers=4)
    with pytest.raises(OSError, match="no more processes"):
        elastic.begin(ResizePlan(more, [], NOTHING))
    assert not elastic.in_progress
    assert elastic.take_outcome() is None
