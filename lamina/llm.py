"""``lamina.LLM``: a model, its two pools and its tokenizer behind one object."""

from __future__ import annotations

import copy
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from . import netstack
from .config import make_config
from .engine.engine import Engine
from .fleet.choose_transport import nearest
from .fleet.pools import Pools
from .models.checkpoint import peek_config
from .models.tokens import Detokenizer, apply_chat_template, load_beside, token_ids
from .progress import progress_bar
from .prompts import Prompt, conversation_list, params_list, prompt_list
from .request import RequestOutput, SamplingParams

Conversation = Sequence[dict[str, Any]]


class LLM:
    """Decodes a Hugging Face causal LM with its attention and KV cache on memory workers.

    ``model`` is a directory, a hub id, or a ``torch.nn.Module`` (which then computes in this process and is left as it
    was). Options are the fields of ``EngineConfig``. Use it as a context manager, or call ``close``: worker processes
    live as long as the object.

        with LLM("path/to/model", memory_workers=2) as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

    Raises ValueError, in one line that names the option and the fix, for anything a user can put right; WorkerError
    when a worker process is lost.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, progress: bool = False, **options: Any) -> None:
        """``tokenizer``: a Hugging Face tokenizer, a path, or None for the model's own (a module has none).

        ``progress``: show a bar on stderr while workers start and load.
        """
        config, _ = nearest(make_config(options))
        model = _checked_model(model)
        if isinstance(model, str):
            peek_config(model, trust_remote_code=config.trust_remote_code)
        with progress_bar(progress) as on_progress:
            source = model if tokenizer is None else tokenizer
            here = not isinstance(model, str) or netstack.open(config.scheme, key=bytes(32)).in_process
            remote, limit_s = config.trust_remote_code, config.start_timeout_s
            loading = load_beside(source, trust_remote_code=remote, here=here, limit_s=limit_s)
            self.pools = Pools(model, config, on_progress)
            try:
                self._tokenizer = loading.result(limit_s)
            except BaseException:
                self.pools.close()
                raise
            self.engine = Engine(self.pools, config, trace=self.pools.tracer.recorder)
        # By request: outputs that its iterator has not taken yet.
        self._grown: dict[int, deque[RequestOutput]] = {}
        self._finalizer = weakref.finalize(self, self.pools.close)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, or None."""
        return self._tokenizer

    def get_tokenizer(self) -> Any:
        """``tokenizer``, by vLLM's name."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts (text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}); results in their
        order, each finished.

        One SamplingParams serves all prompts, a list gives each its own. Ctrl-C ends the workers. One thread at a time
        uses an LLM.
        """
        order = self._add_all(prompts, sampling_params)
        finished: dict[int, RequestOutput] = {}
        for output in self._run(order):
            if output.finished:
                finished[output.request_id] = output
        return [finished[request_id] for request_id in order]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like ``generate``, but yields a copy of a RequestOutput each time it has grown. Text never shrinks again.

        Closing the iterator early cancels what is unfinished.
        """
        return (copy.deepcopy(output) for output in self._run(self._add_all(prompts, sampling_params)))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of {"role": ..., "content": ...}, put into the model's own template.

        Raises ValueError for a model without a chat template and for messages that the template refuses.
        """
        if self._tokenizer is None:
            raise ValueError("chat needs a tokenizer: pass tokenizer=")
        conversations = conversation_list(messages)
        return self.generate([apply_chat_template(self._tokenizer, c) for c in conversations], sampling_params)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of every worker since its start: seconds by activity, steps, rows, bytes. Keys like "memory-0"."""
        self._check_open()
        return self.pools.stats()

    def close(self) -> None:
        """End the workers and give everything back. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[int]:
        self._check_open()
        batch = prompt_list(prompts)
        each = params_list(len(batch), params)
        encoded = [self._encode(p) for p in batch]
        for prompt, p in zip(encoded, each, strict=True):
            self._check(prompt, p)
        return [self._add(text, ids, p) for text, ids, p in zip(batch, encoded, each, strict=True)]

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        self.engine.check(prompt, params)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= or use stop_token_ids")

    def _add(self, prompt: str | list[int], ids: list[int], params: SamplingParams) -> int:
        text = prompt if isinstance(prompt, str) else None
        make_pieces = None
        if self._tokenizer is not None:
            skip = params.skip_special_tokens
            make_pieces = lambda: Detokenizer(self._tokenizer, ids, skip_special_tokens=skip)  # noqa: E731
        return self.engine.add(ids, params, text=text, make_pieces=make_pieces)

    def _run(self, request_ids: list[int]) -> Iterator[RequestOutput]:
        """Outputs of these requests as they grow; those of others wait for their own iterators."""
        wanted = set(request_ids)
        self._grown |= {request_id: deque() for request_id in request_ids}
        try:
            while wanted:
                for output in self._take(wanted):
                    if output.finished:
                        wanted.discard(output.request_id)
                    yield output
        finally:
            for request_id in request_ids:
                self._grown.pop(request_id, None)
            for request_id in wanted:
                self.engine.cancel(request_id)
            if not self.pools.closed:
                self.engine.settle()

    def _take(self, wanted: set[int]) -> list[RequestOutput]:
        waiting = [self._grown[i].popleft() for i in sorted(wanted) if self._grown[i]]
        if waiting:
            return waiting
        self._check_open()
        try:
            outputs = self.engine.step()
        except BaseException:
            self.close()  # a step may be half read
            raise
        for output in outputs:
            if output.request_id not in wanted and output.request_id in self._grown:
                self._grown[output.request_id].append(copy.deepcopy(output))
        return [o for o in outputs if o.request_id in wanted]

    def _check_open(self) -> None:
        if self.pools.closed:
            raise ValueError("this LLM is closed: create a new one")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ValueError("text prompts need a tokenizer: pass tokenizer= or prompts as token ids")
        return token_ids(self._tokenizer, prompt)


def _checked_model(model: Any) -> Any:
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str):
        if not model:
            raise ValueError("model is empty: give a directory, a hub id or a torch.nn.Module")
        return model
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a directory, a hub id or a torch.nn.Module, not {type(model).__name__}")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("model has weights that are not on the CPU: call model.to('cpu') first")
    return model
