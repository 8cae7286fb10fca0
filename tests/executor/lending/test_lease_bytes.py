"""A guest takes no more memory than was lent, and nothing else, whatever its debtor asks for.

Covers: lamina/workers/memory/lease_limits.py.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from lamina.config.engine_config import DeviceOptions, KVOptions
from lamina.config.partition import by_head
from lamina.env import LEASE_BYTES
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.control import Connect, ControlLink, Failed, MemoryReady, StartMemory
from lamina.protocol.offload_messages import OffloadConfig
from lamina.protocol.step_plan import BindRequest, LayerShape
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.lease_limits import MAX_CHANNELS, MAX_INBOX_BYTES, listener_terms
from lamina.workers.memory.main import serve_memory
from lamina.workers.memory.memory_worker import MemoryWorker

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEASE_BYTES, str(MIB))


def bind(kv_bytes: int) -> BindRequest:
    return BindRequest(
        worker=0,
        partition=by_head([1], [1.0]),
        layers=[LayerShape(2, 1, 16, 16, AttentionSpec(scale=0.25).encode())],
        dtype="float32",
        kv=KVOptions(block_size=16, attention="reference"),
        kv_bytes=kv_bytes,
        max_rows=8,
        max_model_len=64,
    )


def test_no_more_than_was_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, cpu = MemoryWorker(), torch.device("cpu")
    assert KvStore(bind(MIB), cpu).nbytes <= MIB
    worker.prepare(bind(MIB))
    for take in (lambda x: KvStore(x, cpu), worker.prepare):
        with pytest.raises(ValueError, match=f"{MIB + 1} bytes are requested of a memory worker that was lent with"):
            take(bind(MIB + 1))
    monkeypatch.setenv(LEASE_BYTES, "0")
    worker.prepare(bind(2 * MIB))
    worker.prepare(None)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("directory", ["", "folder"])
def test_nothing_beside_the_pool(directory: str, keeps: bool, tmp_path: Any) -> None:
    """Also of a debtor that says that it keeps no pages, and names the host's memory or one of its directories."""
    options: dict[str, Any] = {"total_bytes": 64 * MIB, "workers": 1, "policy": "lru", "identity": b"m", "keeps": keeps}
    place = {"backend": "file", "directory": str(tmp_path / directory)} if directory else {"backend": "host"}
    tier = OffloadConfig(**options, **place)
    with pytest.raises(ValueError, match="on loan is requested to store pages outside of the memory that was lent"):
        MemoryWorker().open_store(Connect(epoch=1, storage=tier), bind(MIB))
    assert not list(tmp_path.iterdir())


def test_no_device() -> None:
    driver, worker = socket.socketpair()
    link = ControlLink(driver, MemoryReady | Failed)
    devices = DeviceOptions(memory_device="cuda")
    link.send(StartMemory(scheme="shm", address="", key=b"k" * 32, threads=1, devices=devices))
    # A worker's main thread keeps SIGTERM for itself, and this one starts other tests' processes.
    serving = threading.Thread(target=serve_memory, args=(worker,), daemon=True)
    serving.start()
    answer = link.recv(5.0)
    assert isinstance(answer, Failed)
    assert "--lending borrow.max does not go with --memory-device cuda, because " in answer.text
    link.close()
    serving.join(5.0)
    assert not serving.is_alive()


def test_channels_have_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (listener_terms("g").channels, listener_terms("g").inbox_bytes) == (MAX_CHANNELS, MAX_INBOX_BYTES)
    monkeypatch.setenv(LEASE_BYTES, "0")
    assert listener_terms("m").inbox_bytes > MAX_INBOX_BYTES
