"""A request under way: its output, its sequences, their texts."""

from __future__ import annotations

import logging

from lamina.protocol.control import ALL_BANNED, Drawn
from lamina.request import Blame, Refusal, RequestOutput, words_of

from .checks import NOT_FINITE, why_banned
from .sequence import Sequence
from .text import OPEN_BYTES, Spell, TextStream, spelled

log = logging.getLogger(__name__)


class Request:
    """A RequestOutput under way, with its sequences and, where there is a tokenizer, their texts."""

    def __init__(
        self, output: RequestOutput, sequences: list[Sequence], texts: list[TextStream | None], spell: Spell | None
    ) -> None:
        self.output = output
        self.spell = spell
        self.sequences = sequences
        self.texts = texts
        self.logits = b""  # of a held one that waits, see Drawn

    def begin(self, sequence: Sequence, now: float) -> None:
        """The first rows of a sequence are on their way."""
        output = self.output
        if sequence.session is not None:
            sequence.session.began(now - output.times.arrival_s)
        output.times.scheduled_s = output.times.scheduled_s or now
        if output.num_cached_tokens is None:
            output.num_cached_tokens = min(sequence.num_cached, len(sequence.prompt))

    def end(self, sequence: Sequence, reason: str, why: str | None = None) -> None:
        """A sequence ends that is not finished: not by its last token. Its text ends with all that was held back."""
        if not sequence.finished:
            sequence.finish(reason, why)
            text = self.texts[sequence.output.index]
            if text is not None:
                text.finish(search=False)
                sequence.output.text = text.text

    def refuse(self, why: str) -> None:
        """All of it ends, by no fault of its own."""
        for sequence in self.sequences:
            sequence.output.blame = Blame.SERVER
            self.end(sequence, "error", why)

    def refuse_late(self, refusal: Refusal) -> None:
        """Its prompt is computed and there is no room to decode: what has no end yet ends."""
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.output.blame, sequence.output.refusal = Blame.LOAD, refusal
                self.end(sequence, "error", words_of(refusal))

    def has_begun_with(self, sequence: Sequence) -> bool:
        """Whether this one has the first token of all."""
        return sequence.num_outputs == 1 and not any(s.num_outputs for s in self.sequences if s is not sequence)

    def append(self, sequence: Sequence, drawn: Drawn) -> None:
        """Take the token that was drawn for a sequence, or the reason why there is none."""
        output, text = sequence.output, self.texts[sequence.output.index]
        if sequence.held:
            self.logits = drawn.logits
            sequence.wait()
            return
        if drawn.token < 0:
            banned = drawn.token == ALL_BANNED
            why = why_banned(sequence.params, sequence.num_outputs) if banned else NOT_FINITE
            output.blame = Blame.CLIENT if banned else Blame.SERVER
            sequence.num_drawing -= 1
            self.end(sequence, "error", why)
            level = logging.INFO if banned else logging.ERROR  # a client's, or the model's
            log.log(level, "request %d ends behind %d tokens: %s", sequence.request_id, sequence.num_outputs, why)
            return
        sequence.append(drawn.token)
        output.token_ids.append(drawn.token)
        if output.logprobs is not None:
            output.logprobs.append(spelled(drawn.logprobs, sequence.tokens[-1 - OPEN_BYTES : -1], self.spell))
        if text is not None:
            _extend(text, sequence, drawn.token)

    def add_score(self, drawn: Drawn) -> None:
        """The log-probability of the prompt's next token has come."""
        scores, prompt = self.output.prompt_logprobs, self.output.prompt_token_ids
        if scores is not None:
            scores.append(spelled(drawn.logprobs, prompt[max(0, len(scores) - OPEN_BYTES) : len(scores)], self.spell))


def _extend(text: TextStream, sequence: Sequence, token: int) -> None:
    """A token that stopped the sequence has no text of its own; a stop string overrules an end by length."""
    output, search = sequence.output, sequence.num_outputs >= sequence.params.min_tokens
    stop = None if output.finish_reason == "stop" else text.push(token, search=search)
    if sequence.finished:
        stop = stop or text.finish(search=search and output.finish_reason != "stop")
    if stop is not None:
        sequence.finish("stop", stop)
        output.finish_reason, output.stop_reason = "stop", stop
    output.text = text.text
