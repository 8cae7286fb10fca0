"""The promises of loopback beyond the contract: its listeners by name, and that all is closed."""

from __future__ import annotations

import gc

import pytest
from wiring import KEY

from lamina.netstack import ChannelError
from lamina.netstack.host.loopback_host import LoopbackFabric


def test_the_network_forgets_listeners_that_are_closed_or_dropped() -> None:
    fabric = LoopbackFabric(KEY)
    listener = fabric.listen("here")
    fabric.listen("there").close()
    fabric.listen("there").close()
    with pytest.raises(ChannelError, match="here"):
        fabric.listen("here")
    del listener
    gc.collect()
    fabric.listen("here")


def test_a_fabric_closes_all_that_is_open_also_where_one_of_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = LoopbackFabric(KEY)
    listeners = [fabric.listen(name) for name in ("one", "two", "three")]
    right = type(listeners[0]).close

    def close(self: object) -> None:
        right(self)  # type: ignore[arg-type]
        raise OSError("a device is gone")

    monkeypatch.setattr(type(listeners[0]), "close", close)
    with pytest.raises(OSError, match="a device is gone"):
        fabric.close()
    assert len([LoopbackFabric(KEY).listen(name) for name in ("one", "two", "three")]) == len(listeners)
