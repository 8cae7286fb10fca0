"""A run on a server's engine, in a process of its own, which is killed during the run; another one continues."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from lamina.config.engine_config import EngineConfig
from lamina.engine.request import decoded_logprobs
from lamina.request import CompletionOutput, RequestOutput, RequestTimes, SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.engine_restarts import EngineRestarts
from lamina.server.engine_client.engine_watchdog import EngineHandle
from lamina.server.engine_client.launch import launch_engine
from lamina.server.engine_client.messages import Delta, StartEngine, decode_scores
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue


def generate_served(
    model: str, config: EngineConfig, prompts: Sequence[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Run the prompts as ``LLM.generate``, on a server without HTTP, whose engine is killed once as many as run at once
    have a token. Raises ValueError for bad input or if the last token came before, EngineGoneError if no other engine
    continues.
    """
    return asyncio.run(_DyingEngine(model, config, params).run(prompts))


class _DyingEngine:
    """A server's client of its engine, and the outputs of its readers."""

    def __init__(self, model: str, config: EngineConfig, params: SamplingParams) -> None:
        self._start = StartEngine(model=model, tokenizer="", config=config, log_level="warning")
        self._params, self._at_once = params, config.batching.max_num_seqs
        self._engines: list[EngineHandle] = []
        self._told: list[CompletionOutput] = []
        self._struck = False

    async def run(self, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        restarts = EngineRestarts(self._start, self._launch)
        try:
            client = await EngineClient.connect(self._launch(self._start), lambda progress: None, restarts)
        except BaseException:
            self._engines[-1].join(0.0)
            raise
        try:
            self._told = [CompletionOutput(0, logprobs=[]) for _ in prompts]
            async with asyncio.TaskGroup() as group:
                for prompt, output in zip(prompts, self._told, strict=True):
                    feed = ReplyQueue()
                    client.add(prompt, self._params, feed, self)
                    group.create_task(self._read(feed, output))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise ValueError(str(error)) if isinstance(error, PromptRefusedError) else error from None
        finally:
            await client.close()
        if len(self._engines) < 2:
            raise ValueError("sequences ended before the engine died: raise --max-tokens")
        pairs = enumerate(zip(prompts, self._told, strict=True))
        return [RequestOutput(i, None, prompt, [output], RequestTimes(0.0)) for i, (prompt, output) in pairs]

    def on_delta(self, delta: Delta) -> None:
        """Observe a delta; nothing is measured here."""

    def _launch(self, start: StartEngine) -> EngineHandle:
        self._engines.append(launch_engine(start))
        return self._engines[-1]

    async def _read(self, feed: ReplyQueue, output: CompletionOutput) -> None:
        while output.finish_reason is None:
            for delta in await feed.get():
                output.token_ids += delta.token_ids
                output.logprobs = [
                    *(output.logprobs or []),
                    *(decoded_logprobs(decode_scores(x) or [], [], None) for x in delta.logprobs or []),
                ]
                output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            self._strike()

    def _strike(self) -> None:
        begun = sum(bool(each.token_ids) for each in self._told)
        if not self._struck and begun >= min(self._at_once, len(self._told)):
            self._struck = True
            with suppress(ProcessLookupError):
                os.kill(self._engines[0].pid, signal.SIGKILL)
