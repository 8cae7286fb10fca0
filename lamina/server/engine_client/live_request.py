"""A prompt in the engine, and what its server has received of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from lamina.request import CompletionOutput, Logprob, RequestOutput, logprobs_of

from .messages import AddPrompt, Delta, PromptTimes, encode_scores


class ActivePrompt:
    """A prompt in the engine, and how much of its completions was sent to the server."""

    def __init__(self, add: AddPrompt, request_id: int) -> None:
        self.key = add.key
        self.request_id = request_id
        self._params, resumed = add.params, add.resumed
        self._tokens = {x.index: len(x.token_ids) for x in resumed}
        self._chars = {x.index: x.num_chars for x in resumed}
        self._ended = {x.index for x in resumed if x.is_finished}

    def deltas(self, output: RequestOutput) -> list[Delta]:
        deltas = [d for o in output.outputs if (d := self._delta(o))]
        if output.finished and deltas:
            deltas[-1].times = _times(output)
        if deltas and deltas[0].index == 0 and self._first(deltas[0]):
            deltas[0].num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                deltas[0].prompt_logprobs = _scores(output.prompt_logprobs, self._params.prompt_logprobs)
        return deltas

    def _first(self, delta: Delta) -> bool:
        return self._tokens[delta.index] == len(delta.token_ids)

    def _delta(self, output: CompletionOutput) -> Delta | None:
        i, had, shown = output.index, self._tokens.get(output.index, 0), self._chars.get(output.index, 0)
        if i in self._ended or (len(output.token_ids) == had and output.finish_reason is None):
            return None
        self._tokens[i], self._chars[i] = len(output.token_ids), len(output.text)
        if output.finish_reason is not None:
            self._ended.add(i)
        return Delta(
            key=self.key,
            index=i,
            token_ids=output.token_ids[had:],
            text=output.text[shown:],
            logprobs=None if output.logprobs is None else _scores(output.logprobs[had:], self._params.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            blame=output.blame,
            kv_rebuilt=output.kv_rebuilt,
            refusal=output.refusal,
        )


def _times(output: RequestOutput) -> PromptTimes:
    t = output.times
    first = t.first_token_s or t.arrival_s
    scheduled = t.scheduled_s or first
    decode = (t.last_token_s or first) - first
    return PromptTimes(scheduled - t.arrival_s, first - scheduled, decode, output.num_preemptions)


def _scores(entries: Sequence[dict[int, Logprob] | None], count: int | None) -> list[Raw]:
    return [encode_scores(None if entry is None else logprobs_of(entry, count or 0)) for entry in entries]
