"""Control links to workers, as the driver opens them and waits for messages. A simulation replaces them."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, Protocol

from lamina.protocol.control import (
    ChannelLost,
    ClockTime,
    ComputeReady,
    ControlLink,
    Failed,
    Loaded,
    MemoryReady,
    Progress,
    Quiesced,
    Rate,
    Stats,
    StepDone,
    Trace,
)
from lamina.protocol.migration_ops import StripesCopied
from lamina.protocol.offload_messages import LoadReady, StoredPages, TransferDone
from lamina.protocol.reshard import ReshardDone, StorePrepared, TerminationNotice
from lamina.protocol.sparse_ops import BlockScoresReport

from .launchers import WorkerHandle

FROM_WORKERS = (
    MemoryReady | Loaded | ComputeReady | Progress | StepDone | Stats | ClockTime | Rate | Trace
    | Quiesced | ChannelLost | Failed | StoredPages | TransferDone | LoadReady | BlockScoresReport | StorePrepared
    | ReshardDone
    | TerminationNotice | StripesCopied
)  # fmt: skip


class Link(Protocol):
    """The driver's end of the control link to one worker; see ControlLink."""

    def limit_sends(self, seconds: float) -> None:
        """Limit, in seconds, how long a send waits while the worker receives nothing."""
        ...

    def send(self, message: Any) -> None:
        """Send one message. Raises LinkClosedError, LinkStalledError."""
        ...

    def recv(self, timeout_s: float | None = None) -> Any:
        """Return the next message. Raises TimeoutError, LinkClosedError."""
        ...

    def close(self) -> None:
        """End the link. Idempotent."""
        ...


class Links(Protocol):
    """Opens links, and waits for messages on them."""

    def open(self, handle: WorkerHandle) -> Link:
        """Return the link to a started worker."""
        ...

    def wait(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links on which messages, or the end, have arrived; none once the time has passed. Without links:
        just wait.

        Raises ValueError if a link was closed here.
        """
        ...


class ControlLinks:
    """Links over the sockets of worker handles."""

    def open(self, handle: WorkerHandle) -> ControlLink:
        """Return the control link of a started worker."""
        return ControlLink(handle.sock, FROM_WORKERS)

    def wait(self, links: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the links on which messages, or the end, have arrived; none once the time has passed."""
        poller = select.poll()
        for link in links:
            poller.register(link, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        return [link for link in links if link.fileno() in ready]
