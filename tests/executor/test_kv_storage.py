"""The driver's record of offloaded pages, made from all that memory workers report."""

from __future__ import annotations

from simulated import ready

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import replace_options
from lamina.executor.kv_storage import KvStorage
from lamina.protocol.offload_messages import StoredPages


def test_a_page_that_somebody_has_given_up_is_nobodys() -> None:
    """Memory worker 0 has reported what it could read of worker 1's pages, before worker 1 gave up a segment."""
    keeper = KvStorage(replace_options(EngineConfig(), {"kv_offloading_size": "1MiB"}), "a")
    said = [StoredPages(epoch=1, keys=[b"a", b"b"]), StoredPages(epoch=1, keys=[b"b", b"c"], evicted=[b"a", b"d"])]
    tier = keeper.complete_facts(ready(1), b"", said).storage
    assert tier is not None
    assert tier.pages == [[b"b"], [b"b", b"c"]]
