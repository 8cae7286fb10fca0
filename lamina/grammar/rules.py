"""Grammars on a worker that draws tokens: compiled on a thread of their own, and followed by sequences."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lamina.ops.sampling.token_mask import TokenMask, TokenRule, forbid
from lamina.protocol.control import Penalties, Vocabulary

from .compiler import GrammarCompiler, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from numpy.typing import NDArray

NUM_COMPILING = 2  # threads: a slow grammar does not keep others
MAX_COMPILED = 32  # grammars that a worker keeps
FEW = 64  # allowed tokens that ranks exchange by name
BLOCK = 1024  # bits of a mask come in so many; see SampleSpec
LIMIT_S = 20.0  # for a mask; the library's limits keep it far below


class GrammarMask:
    """The tokens that continue a text by its grammar; a TokenMask."""

    overrules_min_tokens = True

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        """``bits``: as ``allowed`` of SampleSpec."""
        self.bits = torch.from_numpy(bits)

    @cached_property
    def few_token_ids(self) -> list[int] | None:
        """The allowed tokens, if there are only a few."""
        allowed = np.unpackbits(self.bits.numpy(), bitorder="little")
        return np.flatnonzero(allowed).tolist() if np.count_nonzero(allowed) <= FEW else None

    def apply(self, logits: Tensor, first: int = 0) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place."""
        forbid(logits, self.bits, first)


class MaskThread:
    """Makes masks, one after another, on a thread of its own. It is woken once for the rows of a step, as waking it
    costs as much as a mask.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-masks")
        self._due = deque[tuple[Future[GrammarMask], Callable[[], GrammarMask]]]()

    def begin(self, make: Callable[[], GrammarMask]) -> Future[GrammarMask]:
        """Return the mask to come of ``make``. Calls come from one thread."""
        made = Future[GrammarMask]()
        self._due.append((made, make))
        if len(self._due) == 1:  # else the thread has not taken the one before, and looks again after it
            self._thread.submit(self._make_all)
        return made

    def _make_all(self) -> None:
        while self._due:
            made, make = self._due.popleft()
            try:
                made.set_result(make())
            except Exception as e:  # noqa: BLE001 - who waits for the mask raises it
                made.set_exception(e)


class GrammarRule:
    """Follows one completion; a TokenRule. After the text's end it allows end tokens alone.

    A grammar that meets a limit of the library allows no token from then on, so the request ends by an error.
    """

    def __init__(self, compiled: Future[LLMatcher], masking: MaskThread, vocabulary: Vocabulary) -> None:
        """``compiled``: at the beginning of a text. ``masking``: alone uses the matcher."""
        self._compiled, self._masking = compiled, masking
        self._size, self._ends = len(vocabulary.tokens), vocabulary.end_token_ids
        self.num_tokens = 0
        self._tokens = list[int]()  # those that the matcher has followed, to the first end token
        self._matcher: LLMatcher | None = None
        self._mask: Future[GrammarMask] | None = None

    def begin(self, num_known: int, tokens: Sequence[int]) -> None:
        """Begin to make the mask after ``tokens``, which follow the first ``num_known`` tokens of the completion."""
        self.num_tokens = num_known + len(tokens)
        self._mask = self._masking.begin(partial(self._mask_after, num_known, list(tokens)))

    def mask(self) -> TokenMask:
        """Return the mask that ``begin`` has begun. Raises TimeoutError."""
        assert self._mask is not None
        return self._mask.result(LIMIT_S)

    def _mask_after(self, num_known: int, tokens: list[int]) -> GrammarMask:
        bits = np.zeros(-(-self._size // BLOCK) * BLOCK // 8, dtype=np.uint8)
        try:
            matcher = self._matcher = self._matcher or self._compiled.result(LIMIT_S).deep_copy()
        except GrammarError:  # the front end has compiled it, with other limits of time
            return GrammarMask(bits)
        self._follow(matcher, num_known, tokens)
        may_end = bool(self._tokens) and self._tokens[-1] in self._ends
        if not may_end:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, -(-self._size // 32) * 4)
            if matcher.is_error():
                bits[:] = 0
            place, bit = divmod(self._ends[0], 8)
            may_end = bool(bits[place] >> bit & 1)
        for place, bit in (divmod(token, 8) for token in self._ends):
            bits[place] = bits[place] & (0xFF ^ 1 << bit) | may_end << bit
        return GrammarMask(bits)

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
        self._masking = MaskThread()
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
        return GrammarRule(self._compiled[source], self._masking, self._vocabulary)


def _compile(compiler: Future[GrammarCompiler], source: str) -> LLMatcher:
    return compiler.result(LIMIT_S).compile(source)  # another thread may still make it
