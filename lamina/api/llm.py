"""``lamina.LLM``: an object for offline inference that owns a model, its two pools and its tokenizer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from msgspec import structs

from lamina.config.option import parse_size
from lamina.engine.engine import Engine
from lamina.engine.lockstep import Lockstep
from lamina.engine.streams import EngineRequest, RequestOutputCollector
from lamina.executor.chat_renderer import MEMORY, TIMEOUT_S, ChatRenderer, TemplateLimits
from lamina.executor.worker_executor import WorkerExecutor
from lamina.request import Metric, RequestOutput, SamplingParams
from lamina.request.unsupported_options import check_arguments, unsupported_attribute
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionInfo, SessionName
from lamina.scheduler.sessions.session_turns import messages_transcript, prompt_transcript
from lamina.scheduler.sessions.token_ranges import parse_ranges
from lamina.utils.progress import counted

from .frontend import Frontend, Prompt, conversation_list, metrics_of, params_list, priority_list, prompt_list
from .keyword_errors import keyword_errors

Conversation = Sequence[dict[str, Any]]


class LLM:
    """Decodes a Hugging Face causal LM with its attention and KV cache on memory workers.

    ``model`` is a directory, a hub id, or a ``torch.nn.Module`` (which then computes in this process and stays
    unchanged). Options are the fields of the structs in ``config``. Use it as a context manager, or call ``close``:
    worker processes live as long as the object.

        with LLM("path/to/model", memory_workers=2) as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

    One thread at a time may use it: a second one gets a RuntimeError. ``AsyncLLM`` is for many callers at once. Raises
    ValueError, in one line that names the option and the fix, for any error of the user's; WorkerError when a worker
    process is lost.
    """

    engine_class: ClassVar[type[Engine]] = Engine
    names_flags: ClassVar[bool] = False  # whether errors of a start name flags, or keywords

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        progress: bool = False,
        template_timeout_s: float = TIMEOUT_S,
        template_memory: str | int = MEMORY,
        **options: Any,
    ) -> None:
        """``tokenizer``: a Hugging Face tokenizer, a path, or None for the model's own (a module has none).
        ``progress``: show a bar on stderr while workers start and load; else stages of 3 s or more are logged.
        ``generation_config``: the source of sampling defaults: "auto" = the model's generation_config.json, "none", or
        a directory that has one. ``max_logprobs``: the most log-probabilities that a request may get, 20 by default;
        -1 = the whole vocabulary. ``template_timeout_s``, ``template_memory``: the most seconds and bytes (a number, or
        text such as "512MiB") that a chat template may take for a conversation.
        """
        memory = parse_size(template_memory, "template_memory")
        self.renderer = ChatRenderer(TemplateLimits(timeout_s=template_timeout_s, memory=memory))
        with nullcontext() if self.names_flags else keyword_errors():
            self.front = Frontend(model, tokenizer, progress, options, self.engine_class)
        self.pools, self.engine = self.front.pools, self.front.engine
        self._using = threading.Lock()
        # Collectors of streams that the garbage collector has freed, on any thread.
        self._dropped: deque[RequestOutputCollector] = deque()
        self._finalizer = weakref.finalize(self, _close, self.pools, self.renderer)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, or None."""
        return self.front.tokenizer

    def get_tokenizer(self) -> Any:
        """Return ``tokenizer``, by vLLM's name."""
        return self.front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for prompts without their own: from the model's generation_config.json, as in
        vLLM.
        """
        return self.front.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        session_id: str | None = None,
        kv_discard: Sequence[tuple[int, int]] = (),
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts (text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}); returns their finished
        outputs in order.

        One SamplingParams serves all prompts, a list gives each its own; None: ``get_default_sampling_params``. Ctrl-C
        ends the workers. ``use_tqdm``: show a bar of finished prompts on stderr if that is a terminal; or a callable
        that makes the bar, called as tqdm. ``priority``: with scheduling_policy "priority", prompts with a lower number
        come first; otherwise any number but 0 is refused.

        ``session_id``: the one prompt is the next turn of that session (docs/sessions.md). Raises SessionBusyError
        while another turn runs, ValueError if the prompt does not begin with the prompt of the turn before.
        ``kv_discard``: first and stop of token ranges that the one prompt, and its session, lose for good; only if
        contexts may be truncated. ``others``: arguments of vLLM's, accepted if they request nothing.
        """
        if others:
            check_arguments("LLM.generate", others)
        batch = prompt_list(prompts)
        priorities = priority_list(len(batch), priority)
        return self._generate(batch, sampling_params, use_tqdm, _cache_options(session_id, kv_discard), priorities)

    def _generate(
        self,
        batch: list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        cache_options: CacheOptions,
        priorities: list[int],
        messages: Conversation | None = None,
    ) -> list[RequestOutput]:
        asked = self._asked(batch, sampling_params, cache_options, messages)
        asked = [
            replace(a, cache_options=structs.replace(a.cache_options, priority=p))
            for a, p in zip(asked, priorities, strict=True)
        ]
        with self._stream(asked, finished_only=True) as stream:
            shown = counted(stream, use_tqdm, len(batch), "Processed prompts") if use_tqdm else stream
            finished = {output.request_id: output for output in shown}
        return [finished[request_id] for request_id in stream.request_ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Stream:
        """Like ``generate``, but yield a RequestOutput each time it has grown. It holds everything so far and never
        changes. Text never shrinks.

        This call queues the requests. They also progress while another iterator is read; a slow reader gets one output
        with all growth. Closing the iterator, or dropping it, cancels unfinished requests.
        """
        return self._stream(self._asked(prompt_list(prompts), sampling_params), finished_only=False)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        session_id: str | None = None,
        kv_discard: Sequence[tuple[int, int]] = (),
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete a conversation, or several: lists of {"role": ..., "content": ...}, put into the model's own
        template, or into ``chat_template`` (Jinja), in the form of contents that it reads; see ``render_chat``.

        ``continue_final_message``: continue the last message; needs ``add_generation_prompt`` False. ``tools``: written
        as the template does; the model's reply stays text. ``chat_template_kwargs``: variables of the template.
        ``session_id``: see ``generate``; pass all messages with each turn. ``kv_discard``, ``others``: as for
        ``generate``. Raises ValueError for a model without a chat template and for messages that the template refuses.
        """
        check_arguments("LLM.chat", others)
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer: pass tokenizer=")
        conversations = conversation_list(messages)
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=False: pass that, too")
        options = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        options["content_format"] = chat_template_content_format
        if continue_final_message:
            options["continue_final_message"] = True
        options |= {k: v for k, v in (("chat_template", chat_template), ("tools", tools)) if v is not None}
        render = self.renderer.render
        prompts: list[str | list[int]] = [render(self.tokenizer, c, **options) for c in conversations]
        priorities, cache_options = priority_list(len(prompts), priority), _cache_options(session_id, kv_discard)
        return self._generate(prompts, sampling_params, use_tqdm, cache_options, priorities, conversations[0])

    def lockstep(self, prompts: Sequence[list[int]], max_tokens: int) -> Lockstep:
        """Decode prompts whose next tokens the caller chooses, one token of each at a time, from the logits of all.
        Raises ValueError for prompts that cannot be served, alone or together.
        """
        self._check_open()
        return Lockstep(self.engine, prompts, max_tokens, step=self._step, settle=self._settle, use=self._use)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return counters of every worker since its start: seconds by activity, steps, rows, bytes. Keys like
        "memory-0".
        """
        self._check_open()
        return self.pools.stats()

    def get_metrics(self) -> list[Metric]:
        """Return metrics by vLLM's names ("vllm:..."). They count completions that run and wait, preemptions, and
        tokens searched and found in the prefix cache. Also the share of KV blocks in use, 0 to 1, in the fullest layer
        group.
        """
        self._check_open()
        return metrics_of(self.engine)

    def reset_prefix_cache(self) -> None:
        """Stop using KV of finished requests: prompts are computed whole until later requests have left their KV."""
        self._check_open()
        with self._use():
            self.engine.reset_prefix_cache()

    def sessions(self) -> list[SessionInfo]:
        """Return facts of all sessions: name, turns, tokens of KV after the last turn, and the tier that has them."""
        self._check_open()
        return self.front.streams.sessions()

    def drop_session(self, session_id: str) -> bool:
        """Forget a session and free its KV, in storage too, except pages that other sequences share. Returns False if
        there is no such session. Raises SessionBusyError while a turn of it runs.
        """
        self._check_open()
        with self._use():
            dropped = self.front.streams.drop_session(session_id)
            self._settle()
        return dropped

    def close(self) -> None:
        """End the workers and free all resources. Idempotent."""
        self._finalizer()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(unsupported_attribute(name))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _asked(
        self,
        batch: list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS,
        messages: Conversation | None = None,
    ) -> list[EngineRequest]:
        self._check_open()
        if cache_options != DEFAULT_CACHE_OPTIONS and len(batch) != 1:
            raise ValueError(f"session_id and kv_discard go with one prompt, not {len(batch)}: call it for each")
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = params_list(len(batch), given)
        asked = [self.front.engine_request(p, params) for p, params in zip(batch, each, strict=True)]
        if cache_options != DEFAULT_CACHE_OPTIONS:
            transcript = prompt_transcript(batch[0]) if messages is None else messages_transcript(messages)
            asked = [replace(asked[0], cache_options=cache_options, transcript=transcript)]
        return asked

    def _stream(self, requests: list[EngineRequest], *, finished_only: bool) -> Stream:
        collector = RequestOutputCollector(len(requests), finished_only=finished_only)
        with self._use():
            self.front.streams.add(requests, collector)
        return Stream(self, collector)

    def _next(self, collector: RequestOutputCollector) -> RequestOutput | None:
        """Return the next grown output; None at the end."""
        with self._use():
            while (output := collector.get_nowait()) is None and collector.is_unfinished:
                self._step()
                if self.engine.idle and collector.is_unfinished:
                    raise ValueError(
                        "a request does not fit next to rows whose tokens are being chosen: continue those first, or "
                        "start with more max_num_seqs or kv_memory"
                    )
        return output

    def _step(self) -> None:
        self._check_open()
        self._cancel_dropped()
        self._advance(self.front.streams.step)

    def _settle(self) -> None:
        if not self.pools.is_closed:
            self._advance(self.engine.release_idle_blocks)

    def _drop(self, collector: RequestOutputCollector) -> None:
        with self._use():
            self._dropped.append(collector)

    def _collect(self, collector: RequestOutputCollector) -> None:
        """Do ``_drop`` for a garbage collector, which may run on any thread, at any point."""
        self._dropped.append(collector)
        with suppress(RuntimeError, ValueError), self._use():  # if in use, the end of that use drops it
            pass

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Let one thread, and one call, use this LLM at a time."""
        if not self._using.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is in use by another thread: one at a time may use it; take lamina.AsyncLLM for many"
            )
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """End a use. If no request is left, finish the steps in flight."""
        try:
            if self._dropped:
                self._cancel_dropped()
                self._settle()
        finally:
            self._using.release()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self.front.streams.drop(self._dropped.popleft())

    def _advance(self, go_on: Callable[[], object]) -> None:
        try:
            go_on()
        except BaseException:
            self.close()  # a step may be half read
            raise

    def _check_open(self) -> None:
        if self.pools.is_closed:
            raise ValueError("this LLM is closed: create a new one")


class CommandLLM(LLM):
    """The LLM of a command: errors of its start name flags."""

    names_flags = True


def _close(pools: WorkerExecutor, renderer: ChatRenderer) -> None:
    renderer.close()
    pools.close()


def _cache_options(session_id: str | None, kv_discard: Sequence[tuple[int, int]]) -> CacheOptions:
    """Return the cache options for the one prompt of a call."""
    session = None if session_id is None else SessionName(b"", session_id)
    return CacheOptions(session=session, discard_ranges=parse_ranges(kv_discard) if kv_discard else ())


class Stream(Iterator[RequestOutput]):
    """The outputs of some requests as they grow; see ``LLM.stream``. Also a context manager."""

    def __init__(self, llm: LLM, collector: RequestOutputCollector) -> None:
        self._llm = llm
        self.collector = collector

    @property
    def request_ids(self) -> list[str]:
        """The ids of the stream's requests, in the order of their prompts."""
        return list(map(str, self.collector.request_ids))

    def __next__(self) -> RequestOutput:
        if self.collector.dropped:
            raise StopIteration
        output = self._llm._next(self.collector)
        if output is None:
            self.close()
            raise StopIteration
        return output

    def close(self) -> None:
        """Cancel unfinished requests. Idempotent."""
        if not self.collector.dropped:
            self._llm._drop(self.collector)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.collector.dropped:
            self._llm._collect(self.collector)
