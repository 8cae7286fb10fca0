"""Sequences that go on together, a token at a time, each of which their caller chooses by the logits of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lamina.request import SamplingParams

from .engine import Engine
from .request import Request


class Lockstep:
    """A context manager: its end forgets the sequences. No step is begun before every sequence has its token, so this
    takes longer than drawing does: nothing is queued behind a running step.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        max_tokens: int,
        *,
        step: Callable[[], object],
        settle: Callable[[], object],
        use: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``max_tokens``: that each sequence may have behind its prompt. ``step``: a pass of the engine's loop;
        ``settle``: as the engine's. ``use``: entered for as long as the engine is touched. Raises ValueError for
        prompts that cannot be served.
        """
        self._engine, self._step, self._release_idle_blocks, self._use = engine, step, settle, use
        self._requests: list[Request] = []
        most = engine.config.batching.max_num_seqs
        if len(prompts) > most:
            raise ValueError(
                f"{len(prompts)} rows cannot go on together, at most {most} decode at once: pass fewer of them, or "
                f"start with max_num_seqs={len(prompts)}"
            )
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        with self._use():
            for prompt in prompts:
                engine.check(prompt, params)
                if len(prompt) + max_tokens > engine.worker_info.max_model_len:
                    raise ValueError(
                        f"{len(prompt)} tokens of a prompt, or of a negative prompt, and {max_tokens} new ones exceed "
                        f"{engine.worker_info.max_model_len}: shorten them, or start with a larger max_model_len"
                    )
            ids = [engine.add(prompt, params, external_sampling=True) for prompt in prompts]
            self._requests = [engine.request(request_id) for request_id in ids]

    def logits(self) -> list[bytes]:
        """Of every sequence behind its last token, fp32 by token, little-endian, once they have come.

        Raises ValueError where the sequences have no room together, or one has ended, WorkerError where a worker is
        lost.
        """
        with self._use():
            while not all(logits := [request.pending_logits() for request in self._requests]):
                self._check_unfinished()
                self._step()
                if self._engine.idle:
                    raise ValueError(
                        f"{len(self._requests)} rows have no room together: pass fewer of them, or shorter ones, or "
                        "start with more kv_memory or max_num_seqs (guidance_scale takes two for each row)"
                    )
            return logits

    def choose(self, tokens: Sequence[int]) -> None:
        """Set the next token of every sequence, after ``logits``. Raises ValueError for one that is no token, and if a
        sequence has ended.
        """
        with self._use():
            self._check_unfinished()
            vocab = self._engine.worker_info.vocab_size
            if wrong := [token for token in tokens if not 0 <= token < vocab]:
                raise ValueError(f"token id {wrong[0]} is out of vocabulary: it has {vocab} tokens")
            for request, token in zip(self._requests, tokens, strict=True):
                request.set_token(token)

    def _check_unfinished(self) -> None:
        for output in (request.output.outputs[0] for request in self._requests):
            if output.finish_reason is not None:
                raise ValueError(
                    f"a row has ended ({output.finish_reason}): {output.stop_reason or 'no token follows'}"
                )

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._use():
            for request in self._requests:
                self._engine.cancel(request.id)
            self._release_idle_blocks()
