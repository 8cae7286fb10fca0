"""What the driver knows of pages beside the pools, of all that memory workers tell it."""

from __future__ import annotations

from simulated import ready

from lamina.config import changed
from lamina.fleet.tiers import TierKeeper
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.tiers import StoredPages


def test_a_page_that_somebody_has_given_up_is_nobodys() -> None:
    """Memory worker 0 has told of what it could read of worker 1's, before that gave up a segment."""
    keeper = TierKeeper(changed(EngineConfig(), {"kv_offloading_size": "1MiB"}), "a")
    said = [StoredPages(view=1, keys=[b"a", b"b"]), StoredPages(view=1, keys=[b"b", b"c"], gone=[b"a", b"d"])]
    tier = keeper.completed(ready(1), b"", said).tier
    assert tier is not None
    assert tier.pages == [[b"b"], [b"b", b"c"]]
