"""Lockstep decoding: the caller chooses the next token of every sequence from the logits of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lamina.request import SamplingParams

from .engine import Engine
from .request import Request


class Lockstep:
    """A context manager, whose end drops the sequences.

    Each step waits for the caller's tokens, so no step is queued ahead, and this is slower than the engine's sampling.
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
        """``max_tokens``: the limit for each sequence, after its prompt. ``step``: runs a pass of the engine's loop.

        ``settle``: ``Engine.release_idle_blocks``. ``use``: a context that is held while the engine is used. Raises
        ValueError for prompts that cannot be served.
        """
        self._engine, self._step, self._release_idle_blocks, self._use = engine, step, settle, use
        self._requests: list[Request] = []
        most = engine.config.batching.max_num_seqs
        if len(prompts) > most:
            raise ValueError(
                f"{len(prompts)} rows cannot decode together, at most {most} can: pass fewer of them, or "
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
        """Wait for the logits after the last token of each sequence: fp32, one for each token, little-endian.

        Raises ValueError if the sequences have no room together, or one has ended, and WorkerError.
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
        """Set the next token of every sequence, after ``logits``.

        Raises ValueError for an unknown token id, and if a sequence has ended.
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
