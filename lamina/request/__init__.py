"""A request's parameters and its outputs. No torch here."""

from __future__ import annotations

from .outputs import CompletionOutput as CompletionOutput
from .outputs import ErrorOrigin as ErrorOrigin
from .outputs import Logprob as Logprob
from .outputs import Metric as Metric
from .outputs import OverloadedError as OverloadedError
from .outputs import Refusal as Refusal
from .outputs import RequestOutput as RequestOutput
from .outputs import RequestTimes as RequestTimes
from .outputs import ResumedCompletion as ResumedCompletion
from .outputs import Score as Score
from .outputs import logprobs_of as logprobs_of
from .outputs import refusal_text as refusal_text
from .sampling_params import FILTERS as FILTERS
from .sampling_params import SamplingParams as SamplingParams
from .structured_outputs import StructuredOutputsParams as StructuredOutputsParams
