"""A request under way: its output, its sequences, their texts."""

from __future__ import annotations

from lamina.protocol.control import Drawn
from lamina.request import RequestOutput

from .sequence import Sequence
from .text import OPEN_BYTES, Spell, TextStream, spelled


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

    def add_score(self, drawn: Drawn) -> None:
        """The log-probability of the prompt's next token has come."""
        scores, prompt = self.output.prompt_logprobs, self.output.prompt_token_ids
        if scores is not None:
            scores.append(spelled(drawn.logprobs, prompt[max(0, len(scores) - OPEN_BYTES) : len(scores)], self.spell))


def extend(text: TextStream, sequence: Sequence, token: int) -> None:
    """A token that stopped the sequence has no text of its own; a stop string overrules an end by length."""
    output, search = sequence.output, sequence.num_outputs >= sequence.params.min_tokens
    stop = None if output.finish_reason == "stop" else text.push(token, search=search)
    if sequence.finished:
        stop = stop or text.finish(search=search and output.finish_reason != "stop")
    if stop is not None:
        sequence.finish("stop", stop)
        output.finish_reason, output.stop_reason = "stop", stop
    output.text = text.text
