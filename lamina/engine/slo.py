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

    def refusal(self, sequences: Several[Sequence], *, has_token: bool) -> Refusal | None:
        if has_token:
            return self._admission.check_decode_admission(sequences[0])
        return self._admission.check_admission(sequences, self._scheduler.max_sequences_of)
