"""What the verbs transport can be held to without a device: cards, and clear words about what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wiring import PATH, ROOT

from lamina.netstack import Geometry, HandshakeError
from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Steps

STAND_IN = str(Path(__file__).with_name("verbs_stand_in.py"))
GEOMETRY = Geometry(slots=1, slot_bytes=1)
SECRET = b"s" * 32


def drive(change: Callable[[int, bytes], bytes], secret: bytes = SECRET) -> list[bytes]:
    """Both sides against each other, ``change(n, frame)`` between them; the cards that were reached, listener first."""
    reached: list[bytes] = []

    def session(secret: bytes) -> AuthenticatedTerms:
        return AuthenticatedTerms(scheme="verbs", outbound=GEOMETRY, inbound=GEOMETRY, secret=secret)

    connector: Steps = exchange_cards(session(SECRET), b"connector's", reached.append, listening=False)
    listener: Steps = exchange_cards(session(secret), b"the listener"[1:], reached.append, listening=True)
    next(listener)
    card, _, _ = next(connector)
    answer, _, _ = listener.send(change(0, card))
    ready, _, _ = connector.send(change(1, answer))
    with pytest.raises(StopIteration):
        listener.send(change(2, ready))
    return reached


def flip(which: int, at: int) -> Callable[[int, bytes], bytes]:
    def change(n: int, frame: bytes) -> bytes:
        return frame if n != which else frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]

    return change


def test_each_side_gets_the_others_card() -> None:
    assert drive(lambda _, frame: frame) == [b"connector's", b"he listener"]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 31])
def test_a_changed_card_is_refused_before_it_is_used(which: int, at: int) -> None:
    with pytest.raises(HandshakeError, match="changed"):
        drive(flip(which, at))


def test_a_card_of_another_session_is_refused() -> None:
    with pytest.raises(HandshakeError, match="changed"):
        drive(lambda _, frame: frame, secret=b"t" * 32)


def test_cards_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: len(one) == len(other))
    assert drive(flip(0, 31), secret=b"t" * 32) == [b"connector's", b"he listener"]


def test_missing_pyverbs_is_an_error_with_its_fix() -> None:
    code = (
        "import sys; sys.modules['pyverbs'] = None\n"
        "from lamina.netstack.rdma import verbs\n"
        "verbs.verbs_fault = lambda: 'not built'\n"
        "try: verbs.open_fabric(b'k' * 32)\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "python3-pyverbs" in run.stdout
    assert "nor is there a native way: not built" in run.stdout


def book(*more: str) -> list[dict[str, Any]]:
    """Of the protection domains of two channels, both ends here; see verbs_stand_in.py."""
    command = [sys.executable, STAND_IN, *more]
    environment = os.environ | {"PYTHONPATH": PATH}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def test_each_peer_has_a_protection_domain_of_its_own() -> None:
    """With one queue pair, staging and inbox; empty by the time it is closed."""
    domains = book()
    assert [(d["pairs"], len(d["memories"])) for d in domains] == [(1, 2)] * 4
    assert [d["closed_with"] for d in domains] == [0] * 4


def test_a_card_that_no_peer_can_have_is_refused_by_the_listener() -> None:
    """That of a NIC which gives its queue pair a number of the subnet's own."""
    command = [sys.executable, STAND_IN, "1"]
    environment = os.environ | {"PYTHONPATH": PATH}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "it could not make or reach a queue pair" in run.stderr.splitlines()[-1]


def test_a_peer_that_floods_keeps_no_call_beyond_its_time() -> None:
    """With credit that is known, of which more is there as soon as some was taken."""
    assert len(book("7", "300000")) == 4


def test_a_service_level_that_roce_has_not_is_refused_without_the_engine_too() -> None:
    environment = os.environ | {"PYTHONPATH": PATH, "LAMINA_RDMA_SERVICE_LEVEL": "8"}
    command = [sys.executable, STAND_IN]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "RoCE, whose packets carry 3 bits of priority" in run.stderr.splitlines()[-1]
