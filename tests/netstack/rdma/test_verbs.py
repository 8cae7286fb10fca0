"""The parts of the verbs transport that need no device: cards, and clear messages about what is missing.

Covers: netstack/bootstrap/card_exchange.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from wiring import ROOT

from lamina import netstack
from lamina.netstack import Geometry, HandshakeError
from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Steps
from lamina.netstack.rdma import native_backend

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
        "try: import lamina.netstack.rdma.device\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "python3-pyverbs" in run.stdout


def test_a_build_without_headers_says_in_one_line_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = re.search(r'kUnbuilt =\s+"(.*)";', (ROOT / "csrc/netstack/verbs/native.h").read_text())
    assert fault
    monkeypatch.setattr(native_backend, "verbs_fault", lambda: fault[1])
    with pytest.raises(ImportError, match="verbs' cannot be used here: .*apt-get install libibverbs-dev") as error:
        netstack.open("verbs", key=SECRET)
    assert "\n" not in str(error.value)
