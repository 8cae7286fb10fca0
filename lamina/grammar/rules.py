"""Grammars on a worker that draws tokens: compiled on a thread of their own, and followed by sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lamina.ops.sampling.token_mask import TokenMask, TokenRule
from lamina.protocol.control import Penalties, Vocabulary

from .compiler import GrammarCompiler, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from numpy.typing import NDArray

NUM_COMPILING = 2  # threads: a slow grammar does not keep others
MAX_COMPILED = 32  # grammars that a worker keeps
FEW = 64  # allowed tokens that ranks exchange by name
LIMIT_S = 20.0  # for a mask; the library's limits keep it far below


class GrammarMask:
    """The tokens that continue a text by its grammar; a TokenMask."""

    overrules_min_tokens = True

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        """``allowed``: for each token of the vocabulary."""
        count = int(np.count_nonzero(allowed))
        self.few_token_ids: list[int] | None = np.flatnonzero(allowed).tolist() if count <= FEW else None
        self._forbidden = torch.from_numpy(~allowed)

    def apply(self, logits: Tensor, first: int = 0) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place."""
        forbidden = self._forbidden[first : first + len(logits)].to(logits.device)
        logits[: len(forbidden)].masked_fill_(forbidden, float("-inf"))
        logits[len(forbidden) :] = float("-inf")  # beyond the vocabulary


class GrammarRule:
    """Follows one completion; a TokenRule. After the text's end it allows end tokens alone.

    A grammar that meets a limit of the library allows no token from then on, so the request ends by an error.
    """

    def __init__(self, compiled: Future[LLMatcher], masking: Executor, end_token_ids: Sequence[int]) -> None:
        """``compiled``: at the beginning of a text. ``masking``: one thread, which alone uses the matcher."""
        self._compiled, self._masking, self._ends = compiled, masking, list(end_token_ids)
        self.num_tokens = 0
        self._tokens = list[int]()  # those that the matcher has followed, to the first end token
        self._matcher: LLMatcher | None = None
        self._mask: Future[GrammarMask] | None = None

    def begin(self, num_known: int, tokens: Sequence[int]) -> None:
        """Begin to make the mask after ``tokens``, which follow the first ``num_known`` tokens of the completion."""
        self.num_tokens = num_known + len(tokens)
        self._mask = self._masking.submit(self._mask_after, num_known, list(tokens))

    def mask(self) -> TokenMask:
        """Return the mask that ``begin`` has begun. Raises TimeoutError."""
        assert self._mask is not None
        return self._mask.result(LIMIT_S)

    def _mask_after(self, num_known: int, tokens: list[int]) -> GrammarMask:
        size = 0
        try:
            matcher = self._matcher = self._matcher or self._compiled.result(LIMIT_S).deep_copy()
        except GrammarError:  # the front end has compiled it, with other limits of time
            return GrammarMask(np.zeros(size, dtype=bool))
        self._follow(matcher, num_known, tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        if self._tokens and self._tokens[-1] in self._ends:
            allowed[:] = False
            allowed[self._ends] = True
        elif matcher.is_error():
            allowed[:] = False
        else:
            allowed[self._ends] = allowed[self._ends[0]]
        return GrammarMask(allowed)

    def _follow(self, matcher: LLMatcher, num_known: int, tokens: list[int]) -> None:
        if num_known < len(self._tokens):
            self._tokens = self._tokens[:num_known]
            matcher.reset()
            matcher.consume_tokens([token for token in self._tokens if token not in self._ends])
        for token in tokens:
            if self._tokens and self._tokens[-1] in self._ends:
                return  # the rows after the end are discarded
            self._tokens.append(token)
            if token not in self._ends:
                matcher.consume_token(token)


class Grammars:
    """The grammars of one worker. They outlive epochs."""

    def __init__(self) -> None:
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="lamina-grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="lamina-masks")
        self._vocabulary: Vocabulary | None = None
        self._compiler: Future[GrammarCompiler] | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the last used one is last

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Use ``vocabulary`` for grammars that come after it."""
        if vocabulary != self._vocabulary:
            self._vocabulary = vocabulary
            self._compiled.clear()
            self._compiler = self._compiling.submit(GrammarCompiler, vocabulary)  # before any grammar

    def rules_of(self, penalties: Penalties) -> Iterable[TokenRule]:
        """Return the rule of a sequence's grammar, which begins to compile now; none without one. Raises ValueError
        without a vocabulary.
        """
        return (self.rule_of(penalties.grammar),) if penalties.grammar else ()

    def check(self, source: str) -> None:
        """Wait until a grammar has compiled. Raises GrammarError, and ValueError without a vocabulary."""
        self.rule_of(source)
        self._compiled[source].result(LIMIT_S)

    def rule_of(self, source: str) -> TokenRule:
        """Return a rule of a grammar, which begins to compile now. Raises ValueError without a vocabulary."""
        if self._compiler is None or self._vocabulary is None:
            raise ValueError("a request has a grammar, and this worker has no vocabulary")
        if source not in self._compiled:
            self._compiled[source] = self._compiling.submit(partial(_compile, self._compiler, source))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return GrammarRule(self._compiled[source], self._masking, self._vocabulary.end_token_ids)


def _compile(compiler: Future[GrammarCompiler], source: str) -> LLMatcher:
    return compiler.result(LIMIT_S).compile(source)  # another thread may still make it
