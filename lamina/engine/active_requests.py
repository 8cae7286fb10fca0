"""The unfinished requests of an engine, and which of them have something new for their readers."""

from __future__ import annotations

from collections.abc import Iterator

from lamina.protocol.executor import Clock
from lamina.request import RequestOutput
from lamina.scheduler.sequence import Sequence

from .request import Request


class ActiveRequests:
    """A request is here from its arrival until ``take_outputs`` has returned it finished, or it is cancelled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = dict[int, Request]()
        self._grown = dict[int, Request]()  # since the last ``take_outputs``

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def __getitem__(self, request_id: int) -> Request:
        return self._all[request_id]

    def of(self, sequence: Sequence) -> Request | None:
        """The request of a sequence; None for one that has left, and for a hidden sequence."""
        return self._all.get(sequence.request_id)

    def add(self, request: Request) -> None:
        """Take a request in. One that is finished already is among the next outputs."""
        self._all[request.id] = request
        if request.output.finished:
            self.mark_grown(request)

    def mark_grown(self, request: Request) -> None:
        """It has got a token, or has ended."""
        self._grown[request.id] = request

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request, which leaves at once. Returns its output; None for a number that is not here."""
        self._grown.pop(request_id, None)
        request = self._all.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            request.end_sequence(sequence, "abort")
        request.output.times.finished_s = self._clock()
        return request.output

    def take_outputs(self) -> list[RequestOutput]:
        """Return what has grown, the first to grow first. Finished requests leave."""
        if not self._grown:
            return []
        now, outputs = self._clock(), list[RequestOutput]()
        for request_id, request in self._grown.items():
            finished = request.output.finished
            request.output.times.mark(now, finished=finished)
            if finished:
                request.output.num_preemptions = sum(s.num_preemptions for s in request.sequences)
                del self._all[request_id]
            outputs.append(request.output)
        self._grown = {}
        return outputs
