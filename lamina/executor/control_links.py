"""How the driver comes by the control links to its workers, and waits for news of them. A simulation has its own."""

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
        """Let a send wait so many seconds at most while the worker takes nothing of it."""
        ...

    def send(self, message: Any) -> None:
        """Raises LinkClosedError, LinkStalledError."""
        ...

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError, LinkClosedError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Links(Protocol):
    """Opens links, and waits for them."""

    def open(self, handle: WorkerHandle) -> Link:
        """The link to a worker that was started."""
        ...

    def wait(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """The links that have sent something, or have ended; none once the time has passed. Without links: just wait.

        Raises ValueError where one was closed here.
        """
        ...


class ControlLinks:
    """Links over the sockets of handles."""

    def open(self, handle: WorkerHandle) -> ControlLink:
        """The control link of a worker that was started."""
        return ControlLink(handle.sock, FROM_WORKERS)

    def wait(self, links: Sequence[Any], timeout_s: float) -> list[Any]:
        """The links that have sent something, or have ended; none once the time has passed."""
        poller = select.poll()
        for link in links:
            poller.register(link, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        return [link for link in links if link.fileno() in ready]
