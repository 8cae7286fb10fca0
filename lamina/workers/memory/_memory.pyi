class RoundStep:
    """A step of a Loop."""

class Loop:
    """A memory worker's round without Python: csrc/memory/loop.h. One thread uses it.

    ``kernels`` and ``channels``: what has ``calls()``, capsules of csrc/attention/calls.h and csrc/netstack/calls.h.
    ``reserve_s``: how long a slot is waited for.
    ``traces``: see Recorder.native_buffer.
    ``table``: 64-bit numbers, as ``native_layers`` writes them. Raises ValueError where they make no sense.
    """

    def __new__(
        cls, kernels: object, channels: tuple[object, ...], table: bytes, reserve_s: float, traces: object
    ) -> Loop: ...
    def step(self, prepared: tuple[object, ...], table: bytes, tags: bytes) -> RoundStep:
        """``prepared``: of each group, four Steps of the kernels or None; ``tags``: of Q, K and V, and O of layer 0,
        24 bytes each. Raises ValueError where rows lie outside the messages.
        """

    def begin(self, steps: tuple[RoundStep, ...]) -> None:
        """The next round is theirs. They stay until the one behind it."""

    def run(self, patience_s: float, overdue_s: float, limit: int) -> int:
        """Go on until the round is done (0), until nothing has come for ``poll_timeout_s``, the next turn begins behind
        ``overdue_s`` (< 0: never) or is turn ``limit`` (1), or until a message came that is not the one that is due
        (2): the channel's next ``wait_signal`` has it. The GIL is released. Raises what the channels' own calls do.
        """

    def at(self) -> tuple[int, int]:
        """The turn in the round, layer * steps + step; and whether K and V are due (1) or Q (0)."""

    def counts(self) -> tuple[int, float, float, float, float, int, int]:
        """Turns, seconds of attention, of writing, of scoring and of waiting, bytes received and sent, all since the
        last call.
        """

    def spans(self) -> bytes:
        """Since the last call; see lamina.observe.trace.native_spans. The number is that of a step in its round."""
