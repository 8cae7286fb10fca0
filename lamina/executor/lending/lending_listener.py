"""Links of the debt ledger and of creditors: encrypted streams between peers that have proven the cluster's key and a
name.

Each client sends the version of its protocol first. A message's sender name must be the one that its link has proven.
Frames are small.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from lamina.executor.hosts.cluster_file import look_up
from lamina.executor.launchers.remote_links import ControlListener, connect, host_port
from lamina.lending.lending_messages import VERSION, LendingHello, LendingWelcome
from lamina.netstack import ChannelAborted, ChannelError, ChannelTimeout, HandshakeError
from lamina.netstack.contract.cluster_key import KEY_FILE, cluster_key
from lamina.protocol.control import ControlLink, LinkClosedError
from lamina.protocol.encrypted_socket import EncryptedSocket

log = logging.getLogger(__name__)
LEDGER_NAME = "ledger"
MOST_BYTES = 1 << 20
MOST_LINKS = 4096
TURN_S = 0.5
GREETING_S = 5.0
REACH_S = 2.0
SEND_S = 2.0
Place = tuple[str, int]


def key_of(what: str) -> bytes:
    """Return the cluster's key, which all creditors and debtors share. Raises ValueError if there is none."""
    key = cluster_key()
    if key is None:
        raise ValueError(f"{what} needs the cluster's key: openssl rand -hex 32, chmod 600, and name it by {KEY_FILE}")
    return key


def parse_address(text: str, name: str) -> Place:
    """Return HOST:PORT with the host looked up. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{name} must be HOST:PORT, such as 10.0.0.1:7100, not {text!r}")
    return look_up(host.removeprefix("[").removesuffix("]"), name, alone=True), int(port)


def open_link(place: Place, key: bytes, messages: Any, *, name: str, peer: str, what: str) -> ControlLink:
    """Connect to the ledger or a creditor, and receive its welcome. ``what``: the peer, in words. Raises OSError if it
    cannot be reached, ValueError if it refuses this process for good.
    """
    at = host_port(*place)
    try:
        sock = connect(*place, key, REACH_S, name=name, peer=peer)
    except HandshakeError as error:
        raise ValueError(f"{what} at {at} refuses this process: {error}: is the file of {KEY_FILE} its own?") from None
    except (OSError, ChannelTimeout) as error:
        raise OSError(f"there is no {what} at {at}: {getattr(error, 'strerror', '') or error}") from None
    link = ControlLink(sock, messages, MOST_BYTES)
    link.limit_sends(SEND_S)
    try:
        link.send(LendingHello())
        welcome = link.recv(GREETING_S)
    except (TimeoutError, LinkClosedError) as error:
        link.close()
        raise OSError(f"{what} at {at} does not reply: {error}") from None
    if not isinstance(welcome, LendingWelcome) or welcome.error:
        link.close()
        why = welcome.error if isinstance(welcome, LendingWelcome) else "it is no ledger or creditor"
        raise ValueError(f"{what} at {at}: {why}")
    return link


class LendingListener:
    """Accepts links, each served by a thread until it ends. ``attend(name, link)``: serves an accepted link.
    ``claim(name, sock, keys)``: returns whether it has taken the raw connection for another purpose.
    """

    def __init__(
        self,
        place: Place,
        key: bytes,
        name: str,
        messages: Any,
        attend: Callable[[str, ControlLink], None],
        claim: Callable[[str, Any, bytes], bool] = lambda name, sock, keys: False,
    ) -> None:
        """Listen. Raises OSError."""
        self._messages, self._attend, self._claim = messages, attend, claim
        self._listener = ControlListener(place[0], key, name, "", port=place[1], links=MOST_LINKS)
        self.address = host_port(place[0], self._listener.port)
        self._over = threading.Event()
        self._links: set[ControlLink] = set()
        self._thread = threading.Thread(target=self._accept, name=f"lamina-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listener and all links. Idempotent."""
        self._over.set()
        self._listener.close()
        for link in list(self._links):
            link.close()
        self._thread.join(TURN_S)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                name, sock, keys = self._listener.accept_any(TURN_S)
            except ChannelTimeout as error:
                if "refused" in str(error):
                    log.warning("%s", error)
                continue
            except ChannelAborted:
                return
            except ChannelError as error:  # such as too few descriptors
                log.warning("%s", error)
                self._over.wait(TURN_S)
                continue
            try:
                self._admit(name, sock, keys)
            except (OSError, RuntimeError) as error:  # no more processes or threads; later ones may succeed
                log.warning("%s is refused: %s", name, error)
                sock.close()

    def _admit(self, name: str, sock: Any, keys: bytes) -> None:
        """Serve a new connection. Raises OSError, RuntimeError."""
        if self._claim(name, sock, keys):
            return
        link = ControlLink(EncryptedSocket(sock.detach(), keys), self._messages, MOST_BYTES)
        try:
            threading.Thread(target=self._serve, args=(name, link), name=f"lamina-{name}", daemon=True).start()
        except RuntimeError:
            link.close()
            raise

    def _serve(self, name: str, link: ControlLink) -> None:
        self._links.add(link)
        try:
            link.limit_sends(SEND_S)
            hello = link.recv(GREETING_S)
            if not isinstance(hello, LendingHello):
                return
            if hello.version != VERSION:
                error = f"it uses version {VERSION} of the lending protocol, {name} version {hello.version}"
                link.send(LendingWelcome(error=f"{error}: install the same Lamina"))
                return
            link.send(LendingWelcome())
            self._attend(name, link)
        except (TimeoutError, LinkClosedError):
            pass
        finally:
            self._links.discard(link)
            link.close()
