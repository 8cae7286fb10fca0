"""Sampling: a pure function from logits, tokens so far, parameters, seed and index to tokens, row by row.

All replicas and ranks draw the same token, bit for bit, whatever the other requests of the batch, the threads and the
instruction set. So the arithmetic is fixed here, for csrc/sampling and for torch:

- A logit x of a row whose largest is b has the *level* round((x - b) * f): operations of fp32, to even; f is 2^24 /
  (temperature * ln 2) in fp32. Levels are counted in 2^-24 of a doubling; at -42 doublings and below they are all one.
- Its *mass* is 2^40 * 2^(level / 2^24), rounded to an integer. The power is a polynomial of degree 5, each product and
  each sum rounded to fp32: within 3e-7 of the true one. Below 2^-41 of the best token a mass is 0. Sums of masses are
  exact, so no order of summation shows.
- Tokens have a *rank*: by logit, and among equals the lower id first. Each filter keeps the tokens up to some rank.
  top_k keeps the first k, min_p those whose level is at least round(2^24 log2(min_p)). top_p keeps the fewest whose
  masses reach ceil(top_p * the mass of all), where "all" are the tokens that the filters before it in ``order`` leave.
- Where a spec has ``allowed`` tokens, the logits of all others count as minus infinity.
- Among the tokens that every filter keeps, u times their mass, rounded down, is a place in that mass, which the tokens
  fill in the order of their ids. u = k * 2^-53 comes from Philox 4x64 with key = seed and counter = index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .sampling_settings import SamplerSettings


class SampleSpec(NamedTuple):
    """A token to draw from row ``row`` of some logits."""

    row: int
    settings: SamplerSettings
    seed: int  # 0 .. 2^64 - 1
    counter: int  # the index of the output token; likewise
    # None: all. Else uint8 [n], n a multiple of 128, on the CPU: bit t % 8 of number t // 8 is 1 if token t is allowed.
    # Tokens beyond are not.
    allowed: Tensor | None = None


class Backend(Protocol):
    """An implementation of the arithmetic above; all obey one contract (tests/contract/test_sampling.py)."""

    def sample(self, logits: Tensor, asks: list[SampleSpec]) -> list[int]:
        """Draw a token for each of ``asks`` from logits [rows, V], fp32, bf16 or fp16; -1 if its row's largest logit is
        NaN or infinite.
        """
        ...

    def top_tokens(self, logits: Tensor, count: int) -> Tensor:
        """Return, for logits [rows, V], the tokens of the first ``count`` ranks, int64 [rows, count]; NaN ranks
        first.
        """
        ...
