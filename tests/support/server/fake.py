"""A server without an engine: the application in this process, over an engine client that answers from a script."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from shipped import MODEL, ROOT

from lamina.config.flat_options import make_config
from lamina.executor.chat_renderer import ChatRenderer, TemplateLimits
from lamina.models.tokenizer import load_tokenizer
from lamina.request import SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionCopy, SessionInfo, SessionName
from lamina.server.app import make_app, with_middleware
from lamina.server.call import Service
from lamina.server.engine_client.engine_restarts import EngineRestarts
from lamina.server.engine_client.engine_watchdog import EngineHandle
from lamina.server.engine_client.messages import (
    Delta,
    EngineReady,
    EngineState,
    PromptTimes,
    SessionsReply,
    SessionsRequest,
    StartEngine,
    encode_scores,
)
from lamina.server.engine_client.open_prompts import DeltaObserver
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.metrics.http_metrics import ServerMetrics
from lamina.server.server_config import ServerConfig

WORD = 300  # the token that every completion consists of
READY = EngineReady(
    vocab_size=2048, max_model_len=256, max_num_seqs=4, dtype="float32", block_size=32, num_blocks=[[64, 80]],
    holders=[[0, 1]],
    attention_calls_per_step=4, caches_prefixes=True,
    row_bytes={"q": 1024, "kv": 512, "o": 1024}, workers=["compute-0", "memory-0", "memory-1"],
)  # fmt: skip


class FakeClient:
    """Finishes every prompt at once with two tokens, or, with ``hold``, never."""

    def __init__(self) -> None:
        self.ready, self.config = READY, make_config({})
        self.state: EngineState | None = EngineState(running=1, waiting=2, free_blocks=[48], steps=10)
        self.counters: dict[str, dict[str, float]] = {
            "compute-0": {"wait_s": 0.5, "steps": 10.0, "rows": 20.0},
            "memory-0": {"attend_s": 0.25, "refused": 1.0, "bytes_sent": 7.0},
        }
        self.failure: str | None = None
        self.lost = asyncio.Event()
        self.seconds_without_progress = 0.0
        self.hold = False
        self.cached: int | None = None  # tokens of each prompt
        self.added: list[tuple[list[int], SamplingParams]] = []
        self.cache_options: list[CacheOptions] = []  # of what was added
        self.cancelled: list[int] = []
        self.resets = 0
        self.named: dict[SessionName, SessionInfo] = {}
        self.refusal = ""

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        replies: ReplyQueue,
        meter: DeltaObserver,
        *,
        key: int | None = None,
        cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS,
        name: str = "",
    ) -> int:
        assert key is None, "there is no journal"
        key = len(self.added)
        self.added.append((prompt, params))
        self.cache_options.append(cache_options)
        if (session := cache_options.session) is not None:
            had = self.named.get(session, SessionInfo(session.name, 0, 0, "pool"))
            self.named[session] = had._replace(turns=had.turns + 1, tokens=len(prompt))
        for index in range(0 if self.hold else params.n):
            for delta in self.deltas_of(key, index, params, last=index == params.n - 1):
                meter.on_delta(delta)
                replies.push(delta)
        return key

    async def query(self, question: SessionsRequest) -> SessionsReply:
        if question.drop is not None:
            found = self.named.pop(SessionName(question.tenant, question.drop), None)
            return SessionsReply(question.number, [] if found is None else [found])
        if question.copy is None and question.import_ is None:
            own = [facts for name, facts in self.named.items() if name.tenant == question.tenant]
            return SessionsReply(question.number, own)
        facts = self.named.get(SessionName(question.tenant, question.copy or ""))
        copy = facts and SessionCopy(identity=b"", name=facts.name, turns=facts.turns, salt=b"", tokens=b"")
        return SessionsReply(question.number, [], copy, self.refusal)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
        scores = [(WORD, -0.5, 1), *[(WORD + 1, -1.0, 1)] * (params.logprobs or 0)]
        logprobs = None if params.logprobs is None else [encode_scores(scores)]
        cached = self.cached if index == 0 else None
        first = Delta(key=key, index=index, token_ids=[WORD], text="ab", logprobs=logprobs, num_cached_tokens=cached)
        times = PromptTimes(0.001, 0.002, 0.003) if last else None
        end = Delta(key=key, index=index, token_ids=[WORD], text="cd", logprobs=logprobs and list(logprobs),
                    finish_reason="length", times=times)  # fmt: skip
        return [first, end]


def no_restarts() -> EngineRestarts:
    """No other engine replaces the first one."""
    config = make_config({"transport": "shm", "max_recoveries": 0})

    def launch(start: StartEngine) -> EngineHandle:
        raise AssertionError("another engine was started")

    return EngineRestarts(StartEngine(model="m", tokenizer="", config=config), launch)


RENDERER = ChatRenderer(TemplateLimits())  # of all services: a template process takes a second to start


def make_service(client: Any = None, renderer: ChatRenderer = RENDERER, **options: Any) -> Service:
    tokenizer = load_tokenizer(str(ROOT / MODEL))
    config = ServerConfig(**options)
    metrics = ServerMetrics("tiny", config.conductor_config.limits)
    return Service(config, ["tiny"], "path", client or FakeClient(), metrics, tokenizer, renderer)


def http_of(service: Service) -> httpx.AsyncClient:
    app = with_middleware(make_app(service), service)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
