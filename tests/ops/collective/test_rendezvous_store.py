"""The store in which process groups find the other ranks: over the mesh alone, in time, and nothing of it is left."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from meshes import WAIT_S, on_all

from lamina.netstack import ChannelError, ChannelTimeout, PeerFault
from lamina.ops.collective import RankLocation, nccl
from lamina.ops.collective.mesh import MeshCollective
from lamina.ops.collective.rendezvous_store import MeshStore


def test_all_have_what_one_sets_and_the_mesh_is_for_tensors_again() -> None:
    def work(mesh: MeshCollective) -> tuple[list[bytes], bool, int]:
        store = MeshStore(mesh, WAIT_S)
        store.set(f"of {mesh.rank}", bytes([mesh.rank]) * 200)
        if mesh.rank == 0:
            store.set("id", "word")
        found = [store.get(f"of {r}") for r in range(3)]
        store.wait(["id"])
        store.close()
        store.set("later", b"for itself alone")
        return [*found, store.get("id")], store.check(["later", "of 2"]), int(mesh.all_reduce(torch.tensor([1])))

    wanted = [bytes([r]) * 200 for r in range(3)] + [b"word"]
    assert on_all(3, work) == [(wanted, True, 3)] * 3


def test_a_rank_that_sets_and_never_asks_is_heard() -> None:
    """Rank 0 does so with NCCL."""

    def work(mesh: MeshCollective) -> bytes:
        store = MeshStore(mesh, WAIT_S)
        if mesh.rank == 0:
            store.set("0", b"unique")
        found = b"" if mesh.rank == 0 else store.get("0")
        store.close()
        return found

    assert on_all(3, work) == [b"", b"unique", b"unique"]


def test_a_library_that_waits_for_a_rank_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects eagerly, and has no deadline of its own."""
    monkeypatch.setattr(nccl, "OVERTIME_S", 0.0)
    over = threading.Event()

    def waits(mesh: MeshCollective) -> None:
        with pytest.raises(ChannelTimeout, match=rf"rank {mesh.rank}: its connections to other ranks did not open"):
            nccl.open_group(mesh, RankLocation(torch.device("cpu"), 0.2, WAIT_S), lambda store: over.wait(WAIT_S))

    start = time.monotonic()
    try:
        on_all(2, waits)
        assert time.monotonic() - start < WAIT_S / 2
    finally:
        over.set()


def test_a_key_that_nobody_tells_is_not_waited_for_for_ever() -> None:
    def silent(mesh: MeshCollective) -> None:
        store = MeshStore(mesh, 0.2)
        with pytest.raises(ChannelTimeout, match=r"rank \d: .*ranks \[\d\]"):
            store.get("nothing")

    def through(mesh: MeshCollective) -> None:
        store = MeshStore(mesh, WAIT_S)
        store.close()
        with pytest.raises(PeerFault, match="no rank sets 'nothing'"):
            store.wait(["nothing"])

    on_all(2, silent)
    on_all(2, through)


@pytest.mark.parametrize("letter", [b"x", b"\xff\xff\xff\xffkey", b"\x04\0\0\0key"])
def test_what_is_no_key_and_value_is_refused(letter: bytes) -> None:
    def work(mesh: MeshCollective) -> None:
        if mesh.rank == 0:
            mesh.send_letter(letter)
            mesh.receive_letter({1}, WAIT_S)  # until the other one is through
        else:
            with pytest.raises(PeerFault, match="rank 0 sends . B that are no key"):
                MeshStore(mesh, WAIT_S).get("key")
            mesh.send_letter(b"")

    on_all(2, work)


def test_keys_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.ops.collective.rendezvous_store.MAX_KEYS", 1)

    def work(mesh: MeshCollective) -> None:
        store = MeshStore(mesh, WAIT_S)
        if mesh.rank == 0:
            store.set("a", b"")
            store.set("b", b"")
        else:
            with pytest.raises(PeerFault, match="no key and value"):
                store.get("b")

    on_all(2, work)


def test_a_rank_that_goes_on_without_the_others_is_found_out() -> None:
    def work(mesh: MeshCollective) -> None:
        if mesh.rank == 0:
            mesh.broadcast(torch.tensor([1]))
            mesh.receive_letter({1}, WAIT_S)
        else:
            with pytest.raises(PeerFault, match="out of step"):
                MeshStore(mesh, WAIT_S).get("key")
            mesh.send_letter(b"")

    on_all(2, work)


def test_a_rank_that_fails_meanwhile_ends_the_others() -> None:
    def work(mesh: MeshCollective) -> bytes:
        if mesh.rank == 1:
            raise RuntimeError("of its own")
        return MeshStore(mesh, WAIT_S).get("key")

    with pytest.raises(ChannelError):
        on_all(2, work)
