"""The tokens that a front end makes of texts in a request: bad words as tokens, the texts of tokens, and how many may
be reported.

Covers: lamina/engine/intake.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_executor import FakeWire
from test_streams import FakeFront
from transformers import AutoTokenizer

from lamina import SamplingParams
from lamina.api.frontend import Frontend, checked_limit
from lamina.engine.intake import check_token_ids
from lamina.engine.request import decoded_logprobs
from lamina.models.tokenizer import TokenSpeller, bad_words_ids

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def front(tokenizer: Any) -> Frontend:
    return FakeFront(FakeWire(), tokenizer, False, {})


class Words:
    """A tokenizer that makes a token of each word: odd ones with a space before them."""

    ids: ClassVar = {
        "a": [2],
        " a": [3],
        "ab": [4, 5],
        " ab": [6, 5],
        "abc": [7, 8],
        " abc": [9],
        "x": [2, 2],
        " x": [2, 3],
    }

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options == {"verbose": False, "add_special_tokens": False}
        return {"input_ids": self.ids.get(text, [])}


def test_bad_words_are_tokens_with_and_without_a_space_before_them() -> None:
    assert bad_words_ids(Words(), ["a", " ab", "abc", "x"]) == [[2], [3], [4, 5], [6, 5], [7, 8], [2, 2]]
    with pytest.raises(ValueError, match="bad_words has 'zz', which has no tokens: leave it out"):
        bad_words_ids(Words(), ["a", "zz"])


def test_bad_words_become_tokens_as_a_request_begins(front: Frontend, tokenizer: Any) -> None:
    params = SamplingParams(bad_words=["import", "class"])
    asked = Frontend.engine_request(front, [5, 6], params)
    assert asked.params.bad_words_token_ids == bad_words_ids(tokenizer, ["import", "class"])
    assert asked.params.bad_words_token_ids
    assert params.bad_words_token_ids is None
    params.bad_words = ["def"]
    assert Frontend.engine_request(front, [5], params).params.bad_words_token_ids == bad_words_ids(tokenizer, ["def"])
    own = SamplingParams(bad_words_token_ids=[[1, 2]])
    assert Frontend.engine_request(front, [5], own).params.bad_words_token_ids == [[1, 2]]


def test_as_many_tokens_of_a_prompt_as_fit_are_kept(front: Frontend) -> None:
    prompt, most = list(range(90)) * 3, front.engine.worker_info.max_model_len
    assert (
        Frontend.engine_request(front, prompt, SamplingParams(truncate_prompt_tokens=-1, max_tokens=8)).prompt
        == prompt[8 - most :]
    )
    kept = Frontend.engine_request(front, prompt, SamplingParams(truncate_prompt_tokens=-1, max_tokens=None)).prompt
    assert kept == prompt[1 - most :]
    assert (
        len(Frontend.engine_request(front, prompt, SamplingParams(truncate_prompt_tokens=-1, max_tokens=500)).prompt)
        == 1
    )


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_limit_are_refused(front: Frontend, name: str) -> None:
    Frontend.engine_request(front, [5], SamplingParams(**{name: 20}))
    with pytest.raises(ValueError, match=f"^{name} must be at most 20, not 21: start with max_logprobs=21$"):
        Frontend.engine_request(front, [5], SamplingParams(**{name: 21}))
    with pytest.raises(
        ValueError, match=f"^{name} must be at most 20, not -1, the whole vocabulary: .*max_logprobs=-1$"
    ):
        Frontend.engine_request(front, [5], SamplingParams(**{name: -1}))
    front.max_logprobs = -1
    Frontend.engine_request(front, [5], SamplingParams(**{name: -1}))
    Frontend.engine_request(front, [5], SamplingParams(**{name: 21}))
    front.max_logprobs = 0
    Frontend.engine_request(front, [5], SamplingParams(**{name: 0}))
    with pytest.raises(ValueError, match="must be at most 0, not 1"):
        Frontend.engine_request(front, [5], SamplingParams(**{name: 1}))


@pytest.mark.parametrize("limit", [-2, 1.0, "5", True, None])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    assert [checked_limit(n) for n in (-1, 0, 7)] == [-1, 0, 7]
    with pytest.raises(ValueError, match="^max_logprobs must be at least 0, or -1 for the whole vocabulary, not"):
        checked_limit(limit)


def test_texts_of_tokens_go_with_detokenize(front: Frontend) -> None:
    assert Frontend.engine_request(front, [5], SamplingParams(detokenize=False)).decode_token is None
    first, second = (Frontend.engine_request(front, [5], SamplingParams()).decode_token for _ in range(2))
    assert first is not None
    assert first is second, "remembered over requests"


def test_the_texts_of_tokens_are_those_of_the_whole(tokenizer: Any) -> None:
    text = "x = 'naïve €5 日本 🙂'"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spell = TokenSpeller(tokenizer)
    pieces = [spell(token, ids[:at]) for at, token in enumerate(ids)]
    assert "".join(pieces) == text
    assert "" in pieces, "of a character's first bytes"
    assert [spell(token, ids[:at]) for at, token in enumerate(ids)] == pieces
    broken = next(t for t, piece in zip(ids, pieces, strict=True) if piece == "")
    assert spell(broken, []) == ""
    assert spell(broken, tokenizer("abc")["input_ids"]) == ""


def test_what_is_told_of_a_token_is_a_mapping() -> None:
    found = decoded_logprobs(
        [(5, -2.0, 9), (3, -0.5, 1), (4, -1.0, 2)], [1, 2], lambda t, before: f"{t} behind {before}"
    )
    assert list(found) == [5, 3, 4]
    assert (found[5].logprob, found[5].rank, found[5].decoded_token) == (-2.0, 9, "5 behind [1, 2]")
    again = decoded_logprobs([(3, -0.5, 1), (3, -0.5, 1), (4, -1.0, 2)], [], None)
    assert [(t, x.rank, x.decoded_token) for t, x in again.items()] == [(3, 1, None), (4, 2, None)]


def test_bad_words_are_said_once(front: Frontend) -> None:
    with pytest.raises(ValueError, match="^bad_words and bad_words_token_ids say the same of other tokens"):
        Frontend.engine_request(front, [5], SamplingParams(bad_words=["zzz"], bad_words_token_ids=[[280]]))


@pytest.mark.parametrize(("alternatives", "fits"), [(0, 1 << 20), (15, 1 << 16), (-1, 32)])
def test_a_prompt_has_a_limit_of_scores(alternatives: int, fits: int) -> None:
    vocabulary = (1 << 15) - 1
    params = SamplingParams(prompt_logprobs=alternatives)
    check_token_ids([1] * fits, params, vocabulary)
    with pytest.raises(
        ValueError, match=f"^prompt_logprobs of {fits + 1} tokens, .* are more than 1048576 values: ask "
    ):
        check_token_ids([1] * (fits + 1), params, vocabulary)
