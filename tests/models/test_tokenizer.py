"""Text that comes piece by piece is the text that decoding at once gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from lamina.models.errors import ModelError
from lamina.models.tokenizer import (
    Detokenizer,
    find_stop,
    load_tokenizer,
    num_held_back,
    token_ids,
)

WORDS = ["the", " cat", " sat", "ing", "\u00e9", " \u20ac", "\U0001f600", "\u4e2d\u6587"]
TEXT = "caf\u00e9 \u20ac5 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587, naive\u0301."


def byte_level() -> Any:
    """Like GPT-2: any byte is a token, and some words are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(p for p, _ in [encode_bytes(w)]) for w in WORDS)]
    inner = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(dict.fromkeys(pieces))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def encode_bytes(word: str) -> tuple[str, tuple[int, int]]:
    ((piece, span),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
    return piece, span


def byte_fallback() -> Any:
    """Like Llama: words with a mark for the space before them, bytes for what has no word."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *(w.replace(" ", "\u2581") for w in WORDS),
        "\u2581",
    ]
    inner = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def whole(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    decode = lambda x: tokenizer.decode(x, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # noqa: E731
    return str(decode(prompt + ids)[len(decode(prompt)) :])


def pieces(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.push([i]) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["", "the cat", "\u20ac"])
def test_text_comes_in_whole_characters(name: str, prompt: str) -> None:
    tokenizer = TOKENIZERS[name]
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(TEXT), "characters of several tokens are what this is about"
    got = pieces(tokenizer, before, ids)
    assert "".join(got) == whole(tokenizer, before, ids)
    assert not any("\ufffd" in piece for piece in got)
    assert got[-1] == ""


@given(ids=st.lists(st.integers(0, 255 + len(WORDS)), max_size=24), cut=st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_the_text_of_decoding_at_once(ids: list[int], cut: int) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(pieces(tokenizer, [], ids)) == whole(tokenizer, [], ids)
    stream = Detokenizer(tokenizer)
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == whole(tokenizer, [], ids)


@given(text=st.text(alphabet="ab \u00e9\u20ac\U0001f600\u4e2d", min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_byte_fallback(text: str) -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    prompt = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    ids = tokenizer("the cat" + text, add_special_tokens=False)["input_ids"][len(prompt) :]
    assert "".join(pieces(tokenizer, prompt, ids)) == whole(tokenizer, prompt, ids)


def test_an_open_character_is_held_back_and_given_up_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer("\u20ac", add_special_tokens=False)["input_ids"]
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "", "\u20ac"]
    stream = Detokenizer(tokenizer)
    assert stream.push(ids[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_completion_may_go_on_within_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    start, ids = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("the cat", "the cat\u20acing"))
    middle = len(start) + 2
    assert "".join(pieces(tokenizer, ids[:middle], ids[middle:])) == "\u20acing"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whole_characters_before_an_open_one_come_at_once(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer("\u20ac\u20ac", add_special_tokens=False)["input_ids"]
    stream = Detokenizer(tokenizer, tokenizer("the", add_special_tokens=False)["input_ids"])
    assert [stream.push(ids[-6:-1]), stream.push(ids[-1:])] == ["\u20ac", "\u20ac"]


def test_broken_bytes_do_not_hold_text_back_for_ever() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stray = tokenizer("\u20ac", add_special_tokens=False)["input_ids"][1]
    out = pieces(tokenizer, [], [stray] * 40)
    assert "".join(out) == "\ufffd" * 40
    assert "".join(out[:20]) != ""


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    word = tokenizer.convert_tokens_to_ids("the")
    cat = tokenizer.convert_tokens_to_ids("\u2581cat")
    assert "".join(pieces(tokenizer, [1], [word, 1, cat, 1, 1, cat])) == "the cat cat"


def test_find_stop_takes_the_first_and_there_the_longest() -> None:
    assert find_stop("abcabd", ["abd", "ca", "cab", ""]) == (2, "cab")
    assert find_stop("abcabd", ["b"], 2) == (4, "b")
    assert find_stop("abc", ["x"]) is None


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_end_that_begins_a_stop(text: str, stops: list[str]) -> None:
    ends = [n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])]
    assert num_held_back(text, stops) == max(ends, default=0)


def test_load_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).decode([70, 71]) == tokenizer.decode([70, 71])
    assert load_tokenizer(tokenizer) is tokenizer
    assert load_tokenizer(nn.Linear(1, 1)) is None
    assert load_tokenizer(None) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(ModelError, match="tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "empty").mkdir()
    assert load_tokenizer(tmp_path / "empty") is None
    with pytest.raises(ModelError, match="not int"):
        load_tokenizer(3)


FIRST_IMPORT = """
import sys, threading, time
from importlib.machinery import PathFinder
from lamina.models.tokenizer import load_tokenizer

begun, may_go = threading.Event(), threading.Event()

class Hold:  # the first import, in its midst
    def find_spec(name, path=None, target=None):
        if name != "transformers.utils":
            return None
        sys.meta_path.remove(Hold)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (begun.set(), may_go.wait(60.0), execute(module))
        return spec

def waits(frame):  # for another thread, which imports
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None

def importing():
    import transformers

sys.meta_path.insert(0, Hold)
threading.Thread(target=importing, daemon=True).start()
assert begun.wait(60.0)
told, deadline = [], time.monotonic() + 60.0
second = threading.Thread(target=lambda: told.append(load_tokenizer(None)), daemon=True)
second.start()
while not waits(sys._current_frames().get(second.ident)) and time.monotonic() < deadline:
    pass
may_go.set()
second.join(60.0)
print(told)
"""


def test_it_is_loaded_while_another_thread_imports_transformers_for_the_first_time() -> None:
    """Such as that of an LLM that could not start a moment ago; transformers puts another module into its own place."""
    words = [sys.executable, "-c", FIRST_IMPORT]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.returncode) == ("[None]\n", 0), done.stderr


def test_a_pattern_that_never_ends_costs_its_own_prompt_alone() -> None:
    tokenizer = byte_level()
    endless = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([endless, pre_tokenizers.ByteLevel()])
    with pytest.raises(ValueError, match=r"^the model's tokenizer fails on this prompt: .*retry-limit"):
        token_ids(tokenizer, "a" * 40 + "b")
    assert token_ids(tokenizer, "the cat")
