"""Admission by SLO, as a feature of the engine: requests that would come too late are refused."""

from __future__ import annotations

from collections.abc import Sequence as Several

from lamina.request import Refusal
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import SloAdmission

from .feature import EngineFeature


class SloGate(EngineFeature):
    """Asks ``SloAdmission`` at the points where a request can be refused."""

    def __init__(self, admission: SloAdmission, scheduler: Scheduler) -> None:
        self._admission, self._scheduler = admission, scheduler

    def on_arrival(self, sequences: Several[Sequence], *, accepted: bool) -> None:
        for sequence in sequences:
            sequence.is_accepted = accepted
        self._admission.check_admission(sequences, self._scheduler.max_sequences_of, accepted=accepted)

    def on_first_rows(self, sequence: Sequence) -> None:
        self._admission.on_inline_prefill_started(sequence)

    def on_first_token(self, sequence: Sequence) -> Refusal | None:
        return self._admission.check_decode_admission(sequence)
