"""Checks structured outputs before the engine gets them: they compile on a thread of their own, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from lamina.protocol.control import Vocabulary
from lamina.request import SamplingParams
from lamina.request.structured_outputs import StructuredOutputsParams

from .compiler import GrammarCompiler, source_of

LIMIT_S = 10.0
MAX_KNOWN = 256  # grammars that are not compiled again


class GrammarFrontEnd:
    """Fills in ``StructuredOutputsParams.compiled``."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limit_s: float = LIMIT_S) -> None:
        """``make_vocabulary``: called once, with the first grammar. It may raise ValueError."""
        self._make, self._limit_s = make_vocabulary, limit_s
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-grammars")
        self._check = lru_cache(MAX_KNOWN)(self._compile)

    def fill(self, params: SamplingParams) -> None:
        """Compile the structured outputs of ``params``. Raises ValueError if they are wrong, or take too long."""
        if (asked := params.structured_outputs) is not None:
            try:
                source = self._begin(asked).result(self._limit_s)
            except TimeoutError:
                raise self._too_long() from None
            params.structured_outputs = replace(asked, compiled=source)

    async def fill_async(self, params: SamplingParams) -> None:
        """Do as ``fill`` does, while other tasks run."""
        if (asked := params.structured_outputs) is not None:
            try:
                async with asyncio.timeout(self._limit_s):
                    source = await asyncio.wrap_future(self._begin(asked))
            except TimeoutError:
                raise self._too_long() from None
            params.structured_outputs = replace(asked, compiled=source)

    def _begin(self, asked: StructuredOutputsParams) -> Future[str]:
        return self._thread.submit(lambda: self._check(source_of(asked, self._own_compiler().specials)))

    def _own_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._make())
        return self._compiler

    def _compile(self, source: str) -> str:
        self._own_compiler().compile(source)
        return source

    def _too_long(self) -> ValueError:
        return ValueError(f"structured_outputs did not compile within {self._limit_s:g} s: send a simpler one")
