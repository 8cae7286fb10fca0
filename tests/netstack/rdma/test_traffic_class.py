"""Traffic class and service level of queue pairs: set by the environment, and received by the kernel."""

from __future__ import annotations

import pytest
from wiring import KEY, connect, open_or_skip

from lamina import netstack
from lamina.netstack import Geometry
from lamina.netstack.rdma.traffic_class import (
    PARTITION,
    SERVICE_LEVEL,
    TIMEOUT,
    TRAFFIC_CLASS,
    NetworkService,
    check_level,
    service,
)


def test_both_are_read_and_absent_is_zero() -> None:
    assert service({}) == service({TRAFFIC_CLASS: "", SERVICE_LEVEL: " "}) == NetworkService(0, 0)
    assert service({TRAFFIC_CLASS: "255", SERVICE_LEVEL: "15"}) == NetworkService(255, 15)
    assert service({TRAFFIC_CLASS: "106"}) == NetworkService(traffic_class=106)


@pytest.mark.parametrize("text", ["256", "-1", "0x1a", "1.5", "\u00b2", "9" * 5000])
def test_a_traffic_class_that_no_packet_can_have_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{TRAFFIC_CLASS} is a number from 0 to 255, such as 106"):
        service({TRAFFIC_CLASS: text})


def test_on_roce_a_service_level_has_three_bits() -> None:
    """Whose top bit would be lost on the way, so that packets are of another class."""
    check_level(7, "mlx5_0:1", "Ethernet")
    check_level(15, "mlx5_0:1", "InfiniBand")
    with pytest.raises(ValueError, match=f"mlx5_0:1 is RoCE, .*: {SERVICE_LEVEL} is 0 to 7 there, not 8$"):
        check_level(8, "mlx5_0:1", "Ethernet")


def test_a_service_level_has_four_bits() -> None:
    with pytest.raises(ValueError, match=f"{SERVICE_LEVEL} is a number from 0 to 15, .*not '16'"):
        service({SERVICE_LEVEL: "16"})


@pytest.mark.parametrize("text", ["0", "32", "67ms"])
def test_a_timeout_is_an_exponent_and_never_for_ever(text: str) -> None:
    assert [service({TIMEOUT: each}).timeout for each in ("", "1", "31")] == [14, 1, 31]
    with pytest.raises(ValueError, match=rf"{TIMEOUT} is a number from 1 to 31, such as 14, .* 67 ms .*not '{text}'"):
        service({TIMEOUT: text})


@pytest.mark.parametrize("text", ["1", "0x", "0x0", "0x8000", "0x10001", "-0x1", "0xg"])
def test_a_partition_that_has_no_members_is_refused(text: str) -> None:
    assert service({PARTITION: " 0x8001 "}) == NetworkService(partition=0x8001)
    with pytest.raises(ValueError, match=f"{PARTITION} is a key of a partition, such as 0x8001; not '{text}'"):
        service({PARTITION: text})


@pytest.mark.rdma
def test_messages_of_a_traffic_class_and_a_service_level_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes of queue pairs are held in verbs_native_checks.py."""
    monkeypatch.setenv(TRAFFIC_CLASS, "106")
    monkeypatch.setenv(SERVICE_LEVEL, "3")
    fabric = open_or_skip("verbs")
    ends = connect(fabric, geometry=Geometry(slots=1, slot_bytes=64))
    slot = ends[0].reserve(5)
    slot.data[:] = b"hello"
    ends[0].put_signal(slot, b"")
    assert ends[1].wait_signal(timeout_s=20.0).data == b"hello"
    fabric.close()


@pytest.mark.rdma
def test_the_partition_is_one_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-RoCE has the default one alone, 0xffff."""
    monkeypatch.setenv(PARTITION, "0x7fff")
    open_or_skip("verbs").close()
    monkeypatch.setenv(PARTITION, "0x8001")
    with pytest.raises(ImportError, match="in no partition 0x8001 .*it is in 0xffff"):
        netstack.open("verbs", key=KEY)


@pytest.mark.rdma
def test_a_malformed_one_ends_the_transport_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    open_or_skip("verbs").close()
    monkeypatch.setenv(TRAFFIC_CLASS, "lots")
    with pytest.raises(ImportError, match=f"transport 'verbs': {TRAFFIC_CLASS} is a number .*not 'lots'"):
        netstack.open("verbs", key=KEY)
