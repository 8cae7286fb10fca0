"""The driver's record of offloaded pages, made from all that memory workers report."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from simulated import ready

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import replace_options
from lamina.executor.kv_storage import KvStorage
from lamina.protocol.offload_messages import StoredPages


def test_workers_on_loan_store_nothing_and_get_no_secret_and_no_directory(tmp_path: Path) -> None:
    loans = {"borrow": "1GiB", "ledger": "h:1", "partition": "spill", "memory_workers": 4, "tensor_parallel_size": 2}
    offload = {"kv_store_dir": str(tmp_path / "store"), "kv_offloading_size": "1MiB"}
    storage = KvStorage(replace_options(EngineConfig(), {**loans, **offload}), "a")
    home, guest = (storage.config_for(index, 6, b"m") for index in (3, 5))
    assert home is not None
    assert guest is not None
    assert (home.workers, home.rank, home.keeps) == (4, 1, True), "guests take no part of the size"
    assert home.secret
    assert (guest.keeps, guest.rank, guest.total_bytes, guest.memory_bytes) == (False, 1, 0, 0)
    assert (guest.secret, guest.directory, guest.server) == (b"", "", "")


def test_a_size_above_what_the_disk_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes of its own segments count as free."""
    free, folder = shutil.disk_usage(tmp_path).free, tmp_path / "kv"
    folder.mkdir(mode=0o700)
    (folder / "segment-000001").write_bytes(bytes(64 << 20))
    said = list[bool]()
    for size in (free // 2, 2 * free):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lamina"):
            KvStorage(replace_options(EngineConfig(), {"kv_store_dir": str(folder), "kv_store_size": str(size)}), "a")
        said.append(f"--kv-offload size={size} is more than the " in caplog.text)
        assert not said[-1] or f"that the disk of dir={folder} has for it" in caplog.text
    assert said == [False, True]


def test_a_page_that_somebody_has_given_up_is_nobodys() -> None:
    """Memory worker 0 has reported what it could read of worker 1's pages, before worker 1 gave up a segment."""
    keeper = KvStorage(replace_options(EngineConfig(), {"kv_offloading_size": "1MiB"}), "a")
    said = [StoredPages(epoch=1, keys=[b"a", b"b"]), StoredPages(epoch=1, keys=[b"b", b"c"], evicted=[b"a", b"d"])]
    tier = keeper.complete_facts(ready(1), b"", said).storage
    assert tier is not None
    assert tier.pages == [[b"b"], [b"b", b"c"]]
