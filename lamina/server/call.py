"""One HTTP request in the engine: its prompts, their deltas, the memory that they take, and its end in every case."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from lamina.config.flag_groups import flag_name
from lamina.executor.chat_renderer import ChatRenderer
from lamina.executor.long_texts import LongTexts
from lamina.facts.host_memory import memory_bytes
from lamina.grammar.front_end import GrammarFrontEnd
from lamina.grammar.vocabulary import vocabulary_of
from lamina.request import ErrorOrigin
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionName
from lamina.scheduler.sessions.session_turns import SessionTurns

from .body_pace import BodyPace
from .engine_client.engine_client import EngineClient, EngineGoneError
from .engine_client.messages import Delta
from .engine_client.open_prompts import PromptRefusedError
from .engine_client.reply_queue import ReplyQueue
from .errors import ApiError, engine_error, engine_gone, slo_error
from .fair_line import FairLine
from .journal.journal import Journal
from .journal.journal_entry import JournalEntry
from .journal.journal_records import AcceptedRecord
from .memory_budget import MemoryBudget
from .memory_limits import least_total
from .metrics.engine_metrics import EngineMetrics
from .metrics.http_metrics import PromptMeter, ServerMetrics
from .queue_limit import QueueLimit, QueueTicket
from .reasoning_parsers import missing_marks
from .request.intake import TextLines
from .request.prompt_processing import Prompt, PromptProcessor
from .request.sampling_request import PARAMS
from .request.unsupported_fields import UnknownFields
from .response.openai_logprobs import TokenNumbers, TokenTexts
from .response.openai_shapes import usage_of
from .server_config import ServerConfig
from .tool_parsers import parser_of_template

RECOVERING = "recovering"  # a worker was lost and is being replaced; its requests continue after that
WITHOUT_MARKS = (
    "--reasoning-parser %s: neither the chat template nor the vocabulary has %s. If the model does not reason, leave "
    "the flag out: its answers, also to tool_choice required, may be taken for reasoning"
)
WITHOUT_TOOLS = (
    "a request has tools, but the model's chat template leaves them out. Set another one (--chat-template): the model "
    "knows only the form of a call that tool_choice required makes it write"
)
logger = logging.getLogger(__name__)
DRAINING = "draining"  # set by the operator, who may undo it


@dataclass(frozen=True)
class SessionTurn:
    """A running turn of a session."""

    turns: SessionTurns
    name: SessionName


class Service:
    """Everything that the routes share. ``run.py`` makes one for each server."""

    def __init__(
        self,
        config: ServerConfig,
        names: list[str],
        root: str,
        client: EngineClient,
        metrics: ServerMetrics,
        tokenizer: Any,
        renderer: ChatRenderer,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        journal: Journal | None = None,
    ) -> None:
        """``names``: those that clients may use for the model; ``root``: its own. ``defaults``: of SamplingParams, from
        the model's files. ``metrics``: those that ``client`` tells of its steps. ``renderer``: of the tokenizer's chat
        template.
        """
        self.config, self.names, self.root, self.client, self.metrics = config, names, root, client, metrics
        self.defaults, self.journal = defaults, journal
        self.created = int(time.time())
        self.tool_parser = _tool_parser_of(config, tokenizer)
        self.shows_tools = "tools" in _template_of(tokenizer)
        self._has_warned_of_tools = False
        name = config.reasoning_parser
        if name and (lacking := missing_marks(name, _template_of(tokenizer), tokenizer.get_vocab())):
            logger.warning(WITHOUT_MARKS, name, lacking)
        long_texts = LongTexts(tokenizer, config.tokenizer_timeout_s, flag_name("tokenizer_timeout_s"))
        form = config.chat_template_content_format
        self.prompt_processor = PromptProcessor(tokenizer, client.ready, renderer, long_texts, form)
        self.token_texts = TokenTexts(tokenizer)
        ready = client.ready
        self.grammars = GrammarFrontEnd(partial(vocabulary_of, tokenizer, ready.vocab_size, ready.end_token_ids))
        self.engine_metrics = EngineMetrics(client, self.metrics.labels)
        self.metrics.registry.register(self.engine_metrics)
        self.metrics.show("journal_unwritable", lambda: self.journal_error is not None)
        self.unknown_fields = UnknownFields(allowed=config.allow_unknown_fields)
        self.queue_limit = QueueLimit(
            client.ready.max_num_seqs,
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            self.metrics.on_rejected,
            len(config.api_keys) or 1,
        )
        limits = config.memory_limits(memory_bytes())
        keys, spare = len(config.api_keys) or 1, limits.body_total - least_total(config.max_body_bytes)
        self.bodies = MemoryBudget(limits.body_total, keys, max(0, min(limits.body_total // 2, spare)))
        self.body_pace = BodyPace(keys)
        self.answers = MemoryBudget(limits.answer_total, keys, limits.answer_total // 2)
        self.decode_executor = ThreadPoolExecutor(1, thread_name_prefix="lamina-bodies")
        self.encoder = ThreadPoolExecutor(1, thread_name_prefix="lamina-answers")
        self.decoding = FairLine()  # held while a body is decoded on ``decode_executor``
        self.text_lines = TextLines()
        self.session_turns = SessionTurns()
        self.active_calls = set[Call]()

    def texts_of(self, record: AcceptedRecord) -> TokenTexts:
        """Return how the log-probabilities of a request name tokens: by text, or by number."""
        return TokenNumbers(self.token_texts.tokenizer) if record.tokens_as_ids else self.token_texts

    @property
    def journal_error(self) -> str | None:
        """The reason why the journal cannot be written; None if it can, or if there is none."""
        return self.journal.error if self.journal is not None else None

    @property
    def unhealthy_reason(self) -> str | None:
        """The reason why this server should get no requests; None if it should."""
        if self.queue_limit.is_draining:
            return "shutting down"
        if self.queue_limit.is_closed:
            return DRAINING
        if self.client.failure is not None:
            return self.client.failure
        if self.client.state is not None and self.client.state.recovering:
            return RECOVERING
        if self.client.seconds_without_progress > self.config.health_timeout_s:
            return f"the engine has made no progress for {self.client.seconds_without_progress:.1f} s"
        return None

    def note_tools(self) -> None:
        """Log once that a request has tools that the model's chat template leaves out."""
        if not self.shows_tools and not self._has_warned_of_tools:
            self._has_warned_of_tools = True
            logger.warning(WITHOUT_TOOLS)

    def check_model(self, name: str | None) -> str:
        """Return the name that the client used, or the server's first name. Raises ApiError 404 for an unknown one."""
        if name is not None and name not in self.names:
            text = f"the model {name[:128]!r} does not exist; this server has {self.names[0]!r}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return name or self.names[0]


def _template_of(tokenizer: Any) -> str:
    """Return the text of a chat template, or of all of them; "" for none."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def _tool_parser_of(config: ServerConfig, tokenizer: Any) -> str | None:
    """Return the name of the parser of the model's own tool calls; None if none is known."""
    if config.tool_call_parser != "auto":
        return config.tool_call_parser
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return parser_of_template(template) if isinstance(template, str) else None


class Call:
    """Iterate over it for pairs (number of the prompt, delta) until all completions have ended. Close it then, or
    earlier.
    """

    def __init__(
        self,
        service: Service,
        record: AcceptedRecord,
        prompts: list[Prompt],
        ticket: QueueTicket,
        arrival_s: float,
        *,
        cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS,
        entry: JournalEntry | None = None,
        turn: SessionTurn | None = None,
    ) -> None:
        """``ticket``: the queue's ticket for all completions; the call closes it. ``entry``: the request's entry in the
        journal, if there is one. ``turn``: the session's turn, which ends with the call. Raises ApiError if there is no
        space for so many tokens, or no engine.
        """
        self.record = record
        self.prompts = prompts
        self.completion_tokens = 0
        self.cached_tokens = 0  # cached tokens of the prompts
        self._service, self._entry, self._cache_options, self._turn = service, entry, cache_options, turn
        self._ended_well = True  # False once a completion has ended other than by "stop" or "length"
        self._is_left_to_next_server = False  # True: the journal keeps the request for the next server
        self._replies = ReplyQueue()
        self._open = len(prompts) * record.params.n
        self._waiting: set[int] = set()  # keys of prompts without a first token
        self._numbers: dict[int, int] = {}
        if service.client.failure is not None:
            raise engine_gone(service.client.failure)
        self._ticket = ticket
        ticket.set_prompt_tokens(self.prompt_tokens)
        self.meters = [PromptMeter(service.metrics, arrival_s, len(p.ids), record.params) for p in prompts]
        service.active_calls.add(self)
        try:
            self._add_all()
        except BaseException:
            self.close()
            raise

    def _add_all(self) -> None:
        for number, (prompt, meter) in enumerate(zip(self.prompts, self.meters, strict=True)):
            entry = self._entry
            params, known = self.record.params, None
            if entry is not None:
                params, known = entry.params_of(number), entry.keys[number]
            key = self._service.client.add(
                prompt.ids, params, self._replies, meter, key=known,
                cache_options=self._cache_options, name=self.record.log_name,
            )  # fmt: skip
            self._numbers[key] = number
            self._waiting.add(key)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p.ids) for p in self.prompts)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        always = self._service.config.enable_prompt_tokens_details
        return usage_of(self.prompt_tokens, self.completion_tokens, self.cached_tokens, details_always=always)

    async def batches(self, keep_alive_s: float = 0.0) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield the deltas since the last batch, or an empty list after ``keep_alive_s`` seconds of silence. Raises
        ApiError.
        """
        while self._open:
            try:
                async with asyncio.timeout(keep_alive_s or None):
                    deltas = await self._replies.get()
            except TimeoutError:
                yield []
                continue
            except (PromptRefusedError, EngineGoneError) as e:
                raise self._failed(e) from e
            yield [(self._numbers[d.key], self._count_delta(d)) for d in deltas]

    async def wait_first_token(self) -> None:
        """Wait for the first token. Raises ApiError if none comes, or if the request is refused after its prefill."""
        try:
            deltas = await self._replies.wait_any()
        except (PromptRefusedError, EngineGoneError) as e:
            raise self._failed(e) from e
        for delta in deltas:
            self._check_late(delta)

    def _failed(self, error: PromptRefusedError | EngineGoneError) -> ApiError:
        if isinstance(error, EngineGoneError):
            self._is_left_to_next_server = True
            return engine_gone(error)
        if error.refusal is not None:
            self._service.metrics.on_rejected(error.refusal.reason)
            return slo_error(str(error), error.refusal)
        return engine_error(str(error), error.blame, PARAMS)

    def _check_late(self, delta: Delta) -> None:
        if delta.refusal is not None:
            self._service.metrics.on_rejected(f"{delta.refusal.reason}_after_prefill")
            raise slo_error(str(delta.stop_reason), delta.refusal)
        if delta.blame is ErrorOrigin.LOAD:
            raise engine_error(str(delta.stop_reason), delta.blame, PARAMS)

    def _count_delta(self, delta: Delta) -> Delta:
        self.completion_tokens += 0 if self.record.only_prompt else len(delta.token_ids)
        self.cached_tokens += delta.num_cached_tokens or 0
        if delta.key in self._waiting:
            self._waiting.discard(delta.key)
            self._ticket.on_first_token(len(self.prompts[self._numbers[delta.key]].ids))
        if delta.finish_reason is not None:
            self._open -= 1
            self._ticket.on_completion_finished()
            self._ended_well = self._ended_well and delta.finish_reason in ("stop", "length")
        self._check_late(delta)
        if delta.finish_reason == "error":
            raise engine_error(str(delta.stop_reason), delta.blame, PARAMS)
        return delta

    def abort(self, error: ApiError) -> None:
        """End the call from outside: its reader gets ``error``. A journal keeps the request for the next server."""
        self._is_left_to_next_server = True
        self._replies.fail(error)
        self._cancel()

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        if self in self._service.active_calls:
            self._service.active_calls.discard(self)
            if self._turn is not None:
                self._turn.turns.end(self._turn.name, answered=not self._open and self._ended_well)
            if self._open:
                self._service.metrics.on_finished("abort")
            self._cancel()
            if self._entry is not None and self._service.journal is not None and not self._is_left_to_next_server:
                self._service.journal.drop(self._entry.accepted.id)
            self._ticket.close()

    def _cancel(self) -> None:
        for key in self._numbers:
            self._service.client.cancel(key)

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the request's log line: the beginning of the reply's id, counts and times,
        but no text.
        """
        firsts = [m.first_s for m in self.meters if m.first_s is not None]
        first = {"ttft_s": round(min(firsts), 4)} if firsts else {}
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {"answer_id": self.record.log_name, **counts, **first}
