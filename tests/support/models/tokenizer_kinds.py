"""Six kinds of tokenizer, small, as models of Hugging Face have them. Each was trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the cat sat on the mat",
    "import os and the other one",
    "caf\u00e9 \u20ac5 na\u00efve \U0001f600",
    "a b c d e o",
]
BOS, END, USER, UNKNOWN = "<s>", "<|end|>", "<|user|>", "<unk>"
SPECIAL = [UNKNOWN, BOS, END, USER]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
_MARK = "\u2581"


def _trained(inner: Tokenizer, trainer: Any) -> Tokenizer:
    inner.train_from_iterator(TEXT, trainer)
    return inner


def _begins(inner: Tokenizer, *more: Any) -> None:
    bos = [(BOS, inner.token_to_id(BOS))]
    template = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=bos)
    inner.post_processor = processors.Sequence([*more, template])


def _byte_level(size: int = 340) -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": size, "special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    return _trained(inner, trainers.BpeTrainer(**options))


def byte_level() -> Tokenizer:
    """Like Llama 3: bytes, and a token in front; its offsets leave out spaces."""
    inner = _byte_level()
    _begins(inner, processors.ByteLevel(trim_offsets=True))
    return inner


def normalizing() -> Tokenizer:
    """Like GPT-NeoX: bytes of composed characters."""
    inner = _byte_level()
    inner.normalizer = normalizers.NFC()
    _begins(inner)
    return inner


def _pieces(decoder: list[Any]) -> Tokenizer:
    inner = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    options = {"vocab_size": 380, "special_tokens": [*SPECIAL, *BYTES], "initial_alphabet": [_MARK, *"abcdefgh"]}
    inner = _trained(inner, trainers.BpeTrainer(show_progress=False, limit_alphabet=24, **options))
    made = json.loads(inner.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in SPECIAL]
    state = Tokenizer.from_str(json.dumps(made))
    state.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    state.normalizer = normalizers.Replace(" ", _MARK)
    state.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *decoder]
    )
    return state


def sentencepiece() -> Tokenizer:
    """A space before the first word, which the decoder drops, and no token in front."""
    inner = _pieces([decoders.Strip(" ", 1, 0)])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)])
    return inner


def sentencepiece_with_bos() -> Tokenizer:
    """Like Llama 2."""
    inner = sentencepiece()
    _begins(inner)
    return inner


def byte_fallback() -> Tokenizer:
    """Like Gemma: spaces as they are, and bytes for what has no piece."""
    inner = _pieces([])
    _begins(inner)
    return inner


def wordpiece() -> Tokenizer:
    """Like BERT: words without their spaces, in lower case."""
    inner = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    inner.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return _trained(inner, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each
    for each in (byte_level, normalizing, sentencepiece, sentencepiece_with_bos, byte_fallback, wordpiece)
}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of Hugging Face of a kind."""
    return PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        bos_token=BOS,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER],
    )
