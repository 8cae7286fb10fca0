"""The arithmetic of lamina.ops.sampling by csrc/sampling, with the best instructions of the CPU, on several threads."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from . import SampleSpec
from ._sampling import Engine

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ASK = struct.Struct("=QQQQfiIIQQ")
_GREEDY, _TOP_K_FIRST, _MIN_P_FIRST, _SOME_ALLOWED = 1, 2, 4, 8


class NativeSampling:
    """The sampling Backend of ``csrc/sampling``. Tensors are on the CPU, of fp32, bf16 or fp16."""

    def __init__(self, threads: int, variant: str = "") -> None:
        """Raises ValueError if the CPU lacks ``variant``."""
        self._engine = Engine(threads, variant)

    def sample(self, logits: Tensor, asks: list[SampleSpec]) -> list[int]:
        """Draw a token for each of ``asks`` from logits [rows, V]; -1 if a row's largest logit is NaN or infinite.
        Raises ValueError for a row that does not exist, and for allowed tokens that are no whole blocks.
        """
        logits = _in_rows(logits)
        packed = b"".join(map(_packed, asks))
        rows, size = logits.shape
        return self._engine.draw(logits.data_ptr(), TYPES[logits.dtype], rows, size, logits.stride(0), packed)

    def top_tokens(self, logits: Tensor, count: int) -> Tensor:
        """Return, for logits [rows, V], the tokens of the first ``count`` ranks, int64 [rows, count]; NaN ranks
        first.
        """
        logits = _in_rows(logits)
        rows, size = logits.shape
        ids = torch.empty(rows, count, dtype=torch.int64)
        kind, stride = TYPES[logits.dtype], logits.stride(0)
        self._engine.best(logits.data_ptr(), kind, rows, size, stride, count, ids.data_ptr())
        return ids


def _in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1] else logits.contiguous()


def _packed(ask: SampleSpec) -> bytes:
    row, settings, seed, index, allowed = ask
    greedy, factor, top_k, share, cut, top_k_first, min_p_first = settings
    flags = greedy * _GREEDY | top_k_first * _TOP_K_FIRST | min_p_first * _MIN_P_FIRST
    if allowed is None:
        return _ASK.pack(top_k, share, seed, index, factor, cut, row, flags, 0, 0)
    bits = allowed.data_ptr(), 8 * len(allowed)
    return _ASK.pack(top_k, share, seed, index, factor, cut, row, flags | _SOME_ALLOWED, *bits)
