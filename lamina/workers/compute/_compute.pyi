from torch import Tensor

from lamina.ops.attention.merge import Partial

class StepMessages:
    """The messages of a step, of one Pool."""

class Pool:
    """All memory workers as one, without Python: csrc/compute/pool.h. One thread uses it.

    ``channels``: what has ``calls()``, capsules of csrc/netstack/calls.h. ``alike``: of each layer, the first one whose
    shares are of the same form; int64. Sends and receives raise what the channels' own calls do, also where nothing
    comes for ``timeout_s``. ``traces``: see Recorder.native_buffer.
    """

    def __new__(cls, channels: tuple[object, ...], alike: bytes, timeout_s: float, traces: object) -> Pool: ...
    def step(self, table: bytes, tags: bytes) -> StepMessages:
        """``table``: 64-bit numbers, as ``native_pool`` writes them; ``tags``: of Q, K and V, and O of layer 0, 24
        bytes each. Raises ValueError where copies lie outside the messages.
        """

    def select(self, step: StepMessages) -> None:
        """The messages that follow belong to it."""

    def send(self) -> object:
        """A capsule of csrc/rows/send.h, which does not keep the pool."""

    def receive(self, layer: int, first: int, out: Tensor, parts: list[Partial], /) -> int:
        """O of the links from ``first`` on: final results to ``out``, as many rows as the step, others to ``parts``.
        The number of links where all have come; else that of the link whose next ``wait_signal`` has another message
        than the one that is due.
        """

    def send_s(self) -> float:
        """Seconds of sending, since the start."""

    def spans(self) -> bytes:
        """Since the last call; see lamina.observe.trace.native_spans. The number is that of a link."""
