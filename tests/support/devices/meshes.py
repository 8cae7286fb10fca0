"""Ranks as threads of this process, over the loopback transport."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lamina import netstack
from lamina.ops.collective.mesh import MeshCollective, connect_mesh

T = TypeVar("T")
WAIT_S = 30.0


def on_all(
    size: int, work: Callable[[MeshCollective], T], *, scheme: str = "loopback", timeout_s: float = WAIT_S
) -> list[T]:
    """Returns the results of ``work`` on each of ``size`` ranks, in their order. Raises the first rank's exception."""
    fabrics = [netstack.open(scheme, key=b"k" * 32) for _ in range(size)]
    names = [f"rank {rank}" for rank in range(size)]
    listeners = [f.listen(reception=netstack.ListenTerms(name=name)) for f, name in zip(fabrics, names, strict=True)]
    urls = [listener.url for listener in listeners]

    def one(rank: int) -> T:
        try:
            mesh = connect_mesh(
                fabrics[rank], listeners[rank], urls, names, rank, start_timeout_s=WAIT_S, step_timeout_s=timeout_s
            )
            return work(mesh)
        except BaseException:
            fabrics[rank].close()  # the others need not wait
            raise

    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(one, rank) for rank in range(size)]
        return [f.result(0.0) for f in futures]
    finally:
        for fabric in fabrics:
            fabric.close()
