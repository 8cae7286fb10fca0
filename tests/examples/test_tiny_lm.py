"""The model that ships with the demo: its size, its shape, and that it recalls what it read long before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from tiny_lm.evaluate import bits_per_byte, recall
from tiny_lm.ngram import KneserNey
from tiny_lm.recall import VALUE_WORDS, RecallTask, copy_sequence

HERE = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
MODEL = HERE / "model"
# Ordinary code, not from the held-out files: a fixed filler keeps the recall test the same on every Python version.
FILLER = (HERE / "train.py").read_text()
RECALL_BAR = 0.75  # Random weights score 0; picking one of the 4 stated values blindly scores 0.25.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def random_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.float32)


def test_files_are_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) <= 5_000_000


def test_weights_are_bf16() -> None:
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert AutoModelForCausalLM.from_pretrained(MODEL).dtype == torch.bfloat16


def test_shape_allows_two_memory_workers_and_long_contexts() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    assert config.num_key_value_heads >= 4
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.head_dim % 8 == 0
    assert config.max_position_embeddings >= 2048


def test_generation_stops_at_the_end_of_a_turn(tokenizer: Any) -> None:
    assert GenerationConfig.from_pretrained(MODEL).eos_token_id == tokenizer.eos_token_id


def test_chat_template(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "What does os.path.join do?"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>\nWhat does os.path.join do?<|end|>\n<|assistant|>\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=80))
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_recall_over_256_tokens(model: Any, tokenizer: Any, random_model: Any) -> None:
    assert recall(model, tokenizer, 256, prompts=12, filler=FILLER) >= RECALL_BAR
    assert recall(random_model, tokenizer, 256, prompts=12, filler=FILLER) < RECALL_BAR / 2


def test_recall_needs_the_statements(model: Any, tokenizer: Any) -> None:
    """The same questions with the statements cut off: the answer is nowhere else."""
    filler = np.array(tokenizer.encode(FILLER, add_special_tokens=False))
    prompts = RecallTask(tokenizer).prompts(filler, 128, count=12)
    rows = torch.tensor([prompt.tokens[-128:] + prompt.answer for prompt in prompts])
    with torch.inference_mode():
        guesses = model(input_ids=rows[:, :-1]).logits[:, -VALUE_WORDS:].argmax(-1)
    right = (guesses == rows[:, -VALUE_WORDS:]).all(-1).double().mean()
    assert float(right) < RECALL_BAR / 2


def test_bits_per_byte_of_the_model(model: Any, tokenizer: Any, random_model: Any) -> None:
    """Text that no training file holds; knowing nothing costs 11 bits for every token of about 3 bytes."""
    text = (HERE / "ngram.py").read_text()
    assert bits_per_byte(model, tokenizer, text, window=256) < 0.7 * bits_per_byte(random_model, tokenizer, text)


def test_bits_per_byte_counts_every_token_once(tokenizer: Any) -> None:
    """A model that spreads evenly over the vocabulary needs log2(vocabulary) bits a token, whatever the window."""

    class Even(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            class Output:
                logits = torch.zeros(*input_ids.shape, 2048)

            return Output

    tokens = len(tokenizer.encode(FILLER[:4000], add_special_tokens=False))
    for window in (16, 100, 5000):
        assert bits_per_byte(Even(), tokenizer, FILLER[:4000], window=window) * 4000 == pytest.approx(11 * tokens)


def test_training_sequence_states_before_it_asks(tokenizer: Any) -> None:
    task, rng = RecallTask(tokenizer), np.random.default_rng(1)
    filler = np.resize(np.array(tokenizer.encode(FILLER, add_special_tokens=False)), 2048)
    ids, weights = task.training_sequence(rng, filler)
    assert len(ids) == len(weights) == 2048
    stated: dict[str, str] = {}
    asked = 0
    for line in tokenizer.decode(ids).splitlines():
        if line.startswith("# remember "):
            key, _, value = line.removeprefix("# remember ").partition(" = ")
            stated[key] = value
        elif line.startswith("# recall ") and stated:
            key, _, value = line.removeprefix("# recall ").partition(" = ")
            assert stated[key].startswith(value)  # The end of the sequence may cut the last one.
            asked += 1
    assert asked * VALUE_WORDS - 1 <= int((weights > 1).sum()) <= asked * VALUE_WORDS
    assert asked >= 4


def test_copy_sequence_repeats() -> None:
    ids, weights = copy_sequence(np.random.default_rng(2), 200, 2048)
    period = next(p for p in range(1, 200) if (ids[p:] == ids[:-p]).all())
    assert (weights[: period + 1] == 0).all()
    assert (weights[period + 1 :] > 0).all()


@pytest.mark.parametrize("order", [1, 2, 4])
def test_kneser_ney_is_a_distribution(order: int) -> None:
    """Over all next symbols the probabilities add up to one, in seen and unseen contexts."""
    rng = np.random.default_rng(3)
    baseline = KneserNey(rng.integers(0, 7, 300), 8, order)
    for context in ([1, 2, 3], [7, 7, 7], []):
        ids = np.array(context, dtype=np.int64)
        known = baseline.bits(ids)
        total = sum(2.0 ** (known - baseline.bits(np.append(ids, symbol))) for symbol in range(8))
        assert total == pytest.approx(1.0)


def test_kneser_ney_beats_a_shorter_context() -> None:
    """In a text where each symbol follows from the two before, order 3 predicts and order 1 cannot."""
    ids = np.resize(np.array([0, 1, 0, 2, 0, 3, 1, 1, 2]), 900)
    assert KneserNey(ids, 4, 3).bits(ids) < 0.2 * KneserNey(ids, 4, 1).bits(ids)
