"""A plugin of pytest: this process is on a machine of mlx5_stand_in.py, whose NICs move by themselves."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina.netstack.rdma import native_way
from lamina.netstack.rdma.ports import Gids, Port, ports

FAKE = ctypes.CDLL(None)  # what is preloaded
ROOT = Path(os.environ["SYSFS_PATH"]).parent


def _ports(*, gids: Callable[[str, int], Gids] | None = None) -> list[Port]:
    return ports(ROOT, gids)


native_way.ports = _ports  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def _nics() -> Iterator[None]:
    FAKE.fake_mlx5_serve(True)
    yield
    FAKE.fake_mlx5_serve(False)
