"""A request under way: its output, its sequences, their texts."""

from __future__ import annotations

import logging

from lamina.protocol.control import ALL_TOKENS_BANNED, SampledToken
from lamina.request import ErrorOrigin, Refusal, RequestOutput, ResumedCompletion, refusal_text
from lamina.scheduler.request_validation import NOT_FINITE, all_tokens_banned_message
from lamina.scheduler.sequence import Sequence

from .detokenizer import MAX_PENDING_BYTES, DecodeToken, TextStream, decoded_logprobs

log = logging.getLogger(__name__)


class Request:
    """A RequestOutput under way, with its sequences and, where there is a tokenizer, their texts."""

    def __init__(
        self,
        output: RequestOutput,
        sequences: list[Sequence],
        texts: list[TextStream | None],
        spell: DecodeToken | None,
    ) -> None:
        self.output = output
        self.decode_token = spell
        self.sequences = sequences
        self.text_streams = texts
        self.logits = b""  # of a held one that waits, see SampledToken

    @property
    def id(self) -> int:
        """The number of the request, in the order of arrival."""
        return self.sequences[0].request_id

    def on_scheduled(self, sequence: Sequence, now: float) -> None:
        """The first rows of a sequence are on their way."""
        output = self.output
        if sequence.session is not None:
            sequence.session.on_turn_began(now - output.times.arrival_s)
        output.times.scheduled_s = output.times.scheduled_s or now
        if output.num_cached_tokens is None:
            output.num_cached_tokens = min(sequence.num_cached_tokens, len(sequence.prompt))

    def replay(self, resumed: ResumedCompletion) -> None:
        """Take the tokens that one completion had in an earlier engine, as if they were drawn now. The prompt's scores
        were reported with the first of them.
        """
        sequence = self.sequences[resumed.index]
        if resumed.index == 0 and resumed.token_ids:
            self.output.prompt_logprobs, sequence.num_scored_prompt_tokens = None, len(sequence.prompt) - 1
        for token in resumed.token_ids:
            sequence.num_output_placeholders += 1
            self.append(sequence, SampledToken(sequence.id, token))

    def roll_back(self) -> None:
        """All that is in flight is taken back: scores of the prompt that have not come are requested again."""
        if (scores := self.output.prompt_logprobs) is not None:
            self.sequences[0].num_scored_prompt_tokens = len(scores) - 1

    def pending_logits(self) -> bytes:
        """Of a request with external sampling: the logits after its last token, see SampledToken; empty until they have
        come.
        """
        return self.logits if self.sequences[0].awaits_external_token else b""

    def set_token(self, token: int) -> None:
        """Set the next token of such a request, whose logits have come."""
        self.sequences[0].set_external_token(token)
        self.output.outputs[0].token_ids.append(token)

    def end_sequence(self, sequence: Sequence, reason: str, why: str | None = None) -> None:
        """A sequence ends that is not finished: not by its last token. Its text ends with all that was held back."""
        if not sequence.finished:
            sequence.finish(reason, why)
            text = self.text_streams[sequence.output.index]
            if text is not None:
                text.finish(search=False)
                sequence.output.text = text.text

    def refuse(self, why: str) -> None:
        """All of it ends, by no fault of its own."""
        for sequence in self.sequences:
            self.fail(sequence, why)

    def fail(self, sequence: Sequence, why: str) -> None:
        """One of its sequences ends, by no fault of its own."""
        sequence.output.blame = ErrorOrigin.SERVER
        self.end_sequence(sequence, "error", why)

    def refuse_late(self, refusal: Refusal) -> None:
        """Its prompt is computed and there is no room to decode: what has no end yet ends."""
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.output.blame, sequence.output.refusal = ErrorOrigin.LOAD, refusal
                self.end_sequence(sequence, "error", refusal_text(refusal))

    def is_first_token_of(self, sequence: Sequence) -> bool:
        """Whether this one has the first token of all."""
        return sequence.num_output_tokens == 1 and not any(
            s.num_output_tokens for s in self.sequences if s is not sequence
        )

    def append(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Take the token that was drawn for a sequence, or the reason why there is none."""
        output, text = sequence.output, self.text_streams[sequence.output.index]
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
            level = logging.INFO if banned else logging.ERROR  # a client's, or the model's
            log.log(level, "request %d ends behind %d tokens: %s", sequence.request_id, sequence.num_output_tokens, why)
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
        """The log-probability of the prompt's next token has come."""
        scores, prompt = self.output.prompt_logprobs, self.output.prompt_token_ids
        if scores is not None:
            scores.append(
                decoded_logprobs(
                    drawn.logprobs, prompt[max(0, len(scores) - MAX_PENDING_BYTES) : len(scores)], self.decode_token
                )
            )


def _extend(text: TextStream, sequence: Sequence, token: int) -> None:
    """A token that stopped the sequence has no text of its own; a stop string overrules an end by length."""
    output, search = sequence.output, sequence.num_output_tokens >= sequence.params.min_tokens
    stop = None if output.finish_reason == "stop" else text.push(token, search=search)
    if sequence.finished:
        stop = stop or text.finish(search=search and output.finish_reason != "stop")
    if stop is not None:
        sequence.finish("stop", stop)
        output.finish_reason, output.stop_reason = "stop", stop
    output.text = text.text
