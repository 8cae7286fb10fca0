"""The nouns of a generation: parameters of a request, and its outputs. No torch here."""

from __future__ import annotations

from .outputs import Blame as Blame
from .outputs import CompletionOutput as CompletionOutput
from .outputs import Logprob as Logprob
from .outputs import Metric as Metric
from .outputs import OverloadedError as OverloadedError
from .outputs import Refusal as Refusal
from .outputs import RequestOutput as RequestOutput
from .outputs import RequestTimes as RequestTimes
from .outputs import Score as Score
from .outputs import Told as Told
from .outputs import scored as scored
from .outputs import words_of as words_of
from .params import FILTERS as FILTERS
from .params import SamplingParams as SamplingParams
