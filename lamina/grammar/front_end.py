"""Checks structured outputs before the engine gets them: they compile on threads of their own, within a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from threading import Lock

from lamina.protocol.control import Vocabulary
from lamina.request import SamplingParams
from lamina.request.structured_outputs import StructuredOutputsParams

from .compiler import GrammarCompiler, GrammarError, source_of
from .schema_place import place_of, plain_reason

LIMIT_S = 10.0  # for a grammar, once it begins to compile
QUEUE_S = 60.0  # before that
NUM_COMPILING = 2  # threads: a slow grammar does not keep others
MAX_KNOWN = 256  # grammars that are not compiled again


class GrammarFrontEnd:
    """Fills in ``StructuredOutputsParams.compiled``."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], limit_s: float = LIMIT_S) -> None:
        """``make_vocabulary``: called once, with the first grammar. It may raise ValueError."""
        self._make, self._limit_s = make_vocabulary, limit_s
        self._compiler: GrammarCompiler | None = None
        self._making = Lock()
        self._threads = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="lamina-grammars")
        self._check = lru_cache(MAX_KNOWN)(self.compile_source)

    def fill(self, params: SamplingParams) -> None:
        """Compile the structured outputs of ``params``. Raises ValueError if they are wrong, or take too long."""
        if (asked := params.structured_outputs) is not None:
            begun, made = self._begin(asked)
            try:
                begun.result(QUEUE_S)
                source = made.result(self._limit_s)
            except TimeoutError:
                raise self._too_long() from None
            params.structured_outputs = replace(asked, compiled=source)

    async def fill_async(self, params: SamplingParams) -> None:
        """Do as ``fill`` does, while other tasks run."""
        if (asked := params.structured_outputs) is not None:
            begun, made = self._begin(asked)
            try:
                async with asyncio.timeout(QUEUE_S):
                    await asyncio.wrap_future(begun)
                async with asyncio.timeout(self._limit_s):
                    source = await asyncio.wrap_future(made)
            except TimeoutError:
                raise self._too_long() from None
            params.structured_outputs = replace(asked, compiled=source)

    def _begin(self, asked: StructuredOutputsParams) -> tuple[Future[None], Future[str]]:
        """Return when it begins to compile, and what comes of it."""
        begun: Future[None] = Future()

        def work() -> str:
            if begun.set_running_or_notify_cancel():
                begun.set_result(None)
            try:
                return self._check(source_of(asked, self._own_compiler().specials))
            except GrammarError as e:
                place = place_of(str(e), json.loads(asked.json)) if isinstance(asked.json, str) else ""
                own = str(e)
                if asked.regex is not None:
                    own = own.replace("structured_outputs:", "structured_outputs.regex:", 1)
                raise GrammarError(plain_reason(own) + (f" (in {place})" if place else "")) from e

        return begun, self._threads.submit(work)

    def _own_compiler(self) -> GrammarCompiler:
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._make())
            return self._compiler

    def compile_source(self, source: str) -> str:
        """Compile what ``source_of`` returned, and return it. Raises GrammarError."""
        self._own_compiler().compile(source)
        return source

    def _too_long(self) -> ValueError:
        return ValueError(f"structured_outputs did not compile within {self._limit_s:g} s: send a simpler one")
