"""Active requests: their outputs, their sequences, and the text of each completion that may be shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Protocol

from lamina.models.tokenizer import MAX_PENDING_BYTES, find_stop, num_held_back
from lamina.protocol.control import ALL_TOKENS_BANNED, SampledToken
from lamina.protocol.executor import Clock
from lamina.request import (
    ErrorOrigin,
    Logprob,
    Refusal,
    RequestOutput,
    ResumedCompletion,
    SamplingParams,
    Score,
    refusal_text,
)
from lamina.scheduler.sequence import Sequence

log = logging.getLogger(__name__)
_FIRST_MARK = 0xD800  # surrogates are in no text
NOT_FINITE = "the largest logit is not a finite number: weights or activations are broken, or too large for --dtype"

DecodeToken = Callable[[int, Several[int]], str]  # the text of a token after others


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text; models.tokenizer.Detokenizer is one."""

    def push(self, token_ids: Several[int]) -> str:
        """Add tokens. Returns the new text that later tokens cannot change."""
        ...

    def finish(self) -> str:
        """End the text. Returns what was held back."""
        ...

    def special_tokens(self, texts: Several[str]) -> Mapping[int, str]:
        """The tokens that ``push`` leaves out, by id, whose text occurs in one of ``texts``."""
        ...


def decoded_logprobs(scores: list[Score], before: Several[int], spell: DecodeToken | None) -> dict[int, Logprob]:
    """The log-probabilities by token id. Their texts are None without ``spell``."""
    return {t: Logprob(value, rank, None if spell is None else spell(t, before)) for t, value, rank in scores}


class TextStream:
    """The text of a completion, which only grows. A possible beginning of a stop string is held back.

    Stop strings match special tokens by their texts, even if the text omits those tokens. ``_raw`` and the stop strings
    represent such a token by a code point that no text has.
    """

    def __init__(self, pieces: IncrementalDetokenizer, stops: Several[str], *, include_stop: bool = False) -> None:
        """``include_stop``: the text ends after the stop string, else before it."""
        self._pieces = pieces
        special = pieces.special_tokens(stops) if stops else {}
        self._marks = {token: chr(_FIRST_MARK + n) for n, token in enumerate(special)}
        self._hidden = {ord(mark): None for mark in self._marks.values()}
        by_mark = {self._marks[token]: text for token, text in special.items()}
        self._stops = {s: s for s in stops} | {_marked(s, by_mark): s for s in stops}  # as searched -> as asked
        self._include_stop = include_stop
        self._longest = max((len(s) for s in self._stops), default=0)
        self._raw = ""
        self._ended = False

    @property
    def text(self) -> str:
        """The text that may be shown."""
        text = self._raw if self._ended else self._raw[: len(self._raw) - num_held_back(self._raw, self._stops)]
        return text.translate(self._hidden) if self._hidden else text

    def push(self, token: int, *, search: bool) -> str | None:
        """Add a token. With ``search``, returns the stop string that it completes; the text then ends there."""
        start = max(0, len(self._raw) - self._longest + 1)
        mark = self._marks.get(token)
        self._raw += self._pieces.push([token]) if mark is None else self._pieces.finish() + mark
        return self._cut(start) if search else None

    def finish(self, *, search: bool) -> str | None:
        """Show what was held back, since the completion has ended. May return a stop string, as ``push`` does."""
        if self._ended:
            return None
        start = max(0, len(self._raw) - self._longest + 1)
        self._raw += self._pieces.finish()
        self._ended = True
        return self._cut(start) if search else None

    def _cut(self, start: int) -> str | None:
        if (match := find_stop(self._raw, self._stops, start)) is None:
            return None
        at, stop = match[0], self._stops[match[1]]
        self._raw = self._raw[:at] + (stop if self._include_stop else "")
        self._ended = True
        return stop


def _marked(stop: str, texts: Mapping[str, str]) -> str:
    for mark, text in sorted(texts.items(), key=lambda each: -len(each[1])):
        stop = stop.replace(text, mark)
    return stop


def build_text_streams(
    params: SamplingParams, make_detokenizer: Callable[[], IncrementalDetokenizer] | None
) -> list[TextStream | None]:
    """Returns a stream for each completion of a request; None for each without a detokenizer."""
    stops, include = params.stop_strings, params.include_stop_str_in_output
    return [
        TextStream(make_detokenizer(), stops, include_stop=include) if make_detokenizer else None
        for _ in range(params.n)
    ]


class Request:
    """An active request: its output, its sequences and, if there is a tokenizer, their texts."""

    def __init__(
        self,
        output: RequestOutput,
        sequences: list[Sequence],
        texts: list[TextStream | None],
        spell: DecodeToken | None,
        *,
        is_accepted: bool = False,
    ) -> None:
        """``is_accepted``: an earlier engine or server has accepted it, so it is not refused for load."""
        self.output, self.is_accepted = output, is_accepted
        self.decode_token = spell
        self.sequences = sequences
        self.text_streams = texts
        self.logits = b""  # with external sampling, see SampledToken
        self.id = sequences[0].request_id  # in order of arrival

    def on_scheduled(self, sequence: Sequence, now: float) -> None:
        """Record that the first rows of a sequence are scheduled."""
        output = self.output
        if sequence.turn.session is not None:
            sequence.turn.session.on_turn_began(now - output.times.arrival_s)
        output.times.scheduled_s = output.times.scheduled_s or now
        if output.num_cached_tokens is None:
            output.num_cached_tokens = min(sequence.num_cached_tokens, len(sequence.prompt))

    def replay(self, resumed: ResumedCompletion) -> None:
        """Append the tokens that a completion had in an earlier engine, as if they were sampled now.

        The prompt's log-probabilities were reported with the first of them.
        """
        sequence = self.sequences[resumed.index]
        if resumed.index == 0 and resumed.token_ids:
            self.output.prompt_logprobs, sequence.num_scored_prompt_tokens = None, len(sequence.prompt) - 1
        for token in resumed.token_ids:
            sequence.num_output_placeholders += 1
            self.append(sequence, SampledToken(sequence.id, token))

    def roll_back(self) -> None:
        """Discard what is in flight: prompt log-probabilities that have not arrived are requested again."""
        if (scores := self.output.prompt_logprobs) is not None:
            self.sequences[0].num_scored_prompt_tokens = len(scores) - 1

    def pending_logits(self) -> bytes:
        """The logits after the last token, with external sampling; empty until they have arrived. See SampledToken."""
        return self.logits if self.sequences[0].awaits_external_token else b""

    def set_token(self, token: int) -> None:
        """Set the next token, with external sampling, once the logits have arrived."""
        self.sequences[0].set_external_token(token)
        self.output.outputs[0].token_ids.append(token)

    def end_sequence(self, sequence: Sequence, reason: str, why: str | None = None) -> None:
        """End an unfinished sequence for another reason than its last token. Its text gets what was held back."""
        if not sequence.finished:
            sequence.finish(reason, why)
            text = self.text_streams[sequence.output.index]
            if text is not None:
                text.finish(search=False)
                sequence.output.text = text.text

    def refuse(self, why: str) -> None:
        """End all sequences, as there is no room for them now."""
        for sequence in self.sequences:
            sequence.output.blame = ErrorOrigin.LOAD
            self.end_sequence(sequence, "error", why)

    def fail(self, sequence: Sequence, why: str) -> None:
        """End a sequence with an error of the server."""
        sequence.output.blame = ErrorOrigin.SERVER
        self.end_sequence(sequence, "error", why)

    def refuse_late(self, refusal: Refusal) -> None:
        """End all unfinished sequences, since the prompt is computed and decoding is overloaded."""
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.output.blame, sequence.output.refusal = ErrorOrigin.LOAD, refusal
                self.end_sequence(sequence, "error", refusal_text(refusal))

    def is_first_token_of(self, sequence: Sequence) -> bool:
        """True if ``sequence`` has its first token, and no other sequence of the request has one."""
        return len(sequence.tokens) - len(sequence.prompt) == 1 and not any(
            s.num_output_tokens for s in self.sequences if s is not sequence
        )

    def append(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Append the token that was sampled for a sequence, or end it with the reason why there is none."""
        output = sequence.output
        text = self.text_streams[output.index]
        if sequence.external_sampling:
            self.logits = drawn.logits
            sequence.on_logits_ready()
            return
        if drawn.token_id < 0:
            banned = drawn.token_id == ALL_TOKENS_BANNED
            why = all_tokens_banned_message(sequence.params, sequence.num_output_tokens) if banned else NOT_FINITE
            output.blame = ErrorOrigin.CLIENT if banned else ErrorOrigin.SERVER
            sequence.num_output_placeholders -= 1
            self.end_sequence(sequence, "error", why)
            level = logging.INFO if banned else logging.ERROR  # the client's fault, or the model's
            log.log(level, "request %d ends after %d tokens: %s", sequence.request_id, sequence.num_output_tokens, why)
            return
        sequence.append(drawn.token_id)
        output.token_ids.append(drawn.token_id)
        if output.logprobs is not None:
            output.logprobs.append(
                decoded_logprobs(drawn.logprobs, sequence.tokens[-1 - MAX_PENDING_BYTES : -1], self.decode_token)
            )
        if text is not None:
            _extend(text, sequence, drawn.token_id)

    def append_prompt_logprob(self, drawn: SampledToken) -> None:
        """Append the log-probability of the prompt's next token."""
        scores, prompt = self.output.prompt_logprobs, self.output.prompt_token_ids
        if scores is not None:
            scores.append(
                decoded_logprobs(
                    drawn.logprobs, prompt[max(0, len(scores) - MAX_PENDING_BYTES) : len(scores)], self.decode_token
                )
            )


def _extend(text: TextStream, sequence: Sequence, token: int) -> None:
    """Append a token's text. A stop token has a text only on request; a stop string overrules an end by length."""
    output, params = sequence.output, sequence.params
    search = sequence.num_output_tokens >= params.min_tokens and output.finish_reason != "stop"
    stop = None
    if output.finish_reason != "stop" or params.include_stop_str_in_output:
        stop = text.push(token, search=search)
    if sequence.finished:
        stop = stop or text.finish(search=search)
    if stop is not None:
        sequence.finish("stop", stop)
        output.finish_reason, output.stop_reason = "stop", stop
    output.text = text.text


def all_tokens_banned_message(params: SamplingParams, outputs: int) -> str:
    """Explains why no token is allowed after ``outputs`` tokens, in one line that names the parameters."""
    forbids = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": outputs < params.min_tokens,
        "structured_outputs": params.structured_outputs,
    }
    given = [name for name, value in forbids.items() if value]
    if given == ["min_tokens"]:
        return (
            f"min_tokens {params.min_tokens} bans the stop tokens so far, and the model gives no other token: lower "
            f"it, or name fewer stops"
        )
    return f"{' and '.join(given)} forbid every token that the model gives: allow more tokens, or forbid fewer"


class ActiveRequests:
    """The requests that are neither cancelled nor returned as finished by ``take_outputs``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = dict[int, Request]()
        self._grown = dict[int, Request]()  # those with new tokens since the last ``take_outputs``

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def __getitem__(self, request_id: int) -> Request:
        return self._all[request_id]

    def of(self, sequence: Sequence) -> Request | None:
        """The request of a sequence; None if it is no longer active, or for one that follows another."""
        return self._all.get(sequence.request_id)

    def add(self, request: Request) -> None:
        """Add a request. If it is finished already, it is among the next outputs."""
        self._all[request.id] = request
        if request.output.finished:
            self.mark_grown(request)

    def mark_grown(self, request: Request) -> None:
        """Return the request with the next outputs, since it has a new token or has ended."""
        self._grown[request.id] = request

    def cancel(self, request_id: int) -> RequestOutput | None:
        """Remove a request. Returns its output; None for an unknown id."""
        self._grown.pop(request_id, None)
        request = self._all.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            request.end_sequence(sequence, "abort")
        request.output.times.finished_s = self._clock()
        return request.output

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs with new tokens, in the order in which they grew. Removes finished requests."""
        if not self._grown:
            return []
        now, outputs = self._clock(), list[RequestOutput]()
        for request_id, request in self._grown.items():
            output = request.output
            finished = output.finished
            output.times.mark(now, finished=finished)
            if finished:
                output.num_preemptions = sum(s.num_preemptions for s in request.sequences)
                del self._all[request_id]
            outputs.append(output)
        self._grown = {}
        return outputs
