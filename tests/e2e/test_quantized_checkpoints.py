"""Quantised checkpoints served by whole engines: tokens of the formats' own libraries, through packed weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.no_retry]
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"


def tokens_are_due(name: str, file: str = "oracle.json", **options: Any) -> None:
    known = json.loads((CHECKPOINTS / name / file).read_text())
    greedy = SamplingParams(temperature=0.0, max_tokens=len(known["tokens"]), ignore_eos=True)
    with LLM(str(CHECKPOINTS / name), dtype="float32", memory_workers=2, **options) as llm:
        outputs = llm.generate([known["prompt"]] * 3, greedy)
    assert [output.outputs[0].token_ids for output in outputs] == [known["tokens"]] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "llama_int4_channel",
        "llama_int4_zeros",
        "llama_int8_zeros",
        "llama_fp8_channel",
        "llama_w8a8_dynamic",
        "llama_w4a8",
        "llama_gptq_act",
        "llama_int4_act",
        "llama_nvfp4",
    ],
)
def test_ranks_have_parts_of_packed_weights(name: str) -> None:
    tokens_are_due(name, transport="loopback", tensor_parallel_size=2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounded_floats_give_the_tokens_of_compressed_tensors(name: str, ranks: int) -> None:
    tokens_are_due("llama_floats", f"{name}.json", quantization=name, transport="loopback", tensor_parallel_size=ranks)


@pytest.mark.long
def test_kv_of_floats_is_not_read_with_rounded_weights(tmp_path: Path) -> None:
    """KV of the prompt is stored with its floats. Other weights do not find it, and give their own tokens."""
    known = json.loads((CHECKPOINTS / "llama_floats" / "int4.json").read_text())
    prompt = known["prompt"] * 40
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    more = {"dtype": "float32", "transport": "loopback", "kv_store_dir": str(tmp_path), "max_model_len": 512}
    raised = str(_with_positions(tmp_path / "model"))

    def run(**options: Any) -> tuple[list[int], float]:
        with LLM(raised, **more, **options) as llm:
            output = llm.generate([prompt], greedy)[0]
            loaded = sum(values.get("kv_loaded_bytes", 0.0) for values in llm.stats().values())
        return output.outputs[0].token_ids, loaded

    floats, first = run()
    assert first == 0
    assert run() == (floats, pytest.approx(floats_bytes := run()[1]))
    assert floats_bytes > 0
    rounded, loaded = run(quantization="int4")
    assert loaded == 0
    assert run(quantization="int8")[1] == 0
    again, loaded = run(quantization="int4")
    assert loaded > 0
    assert again == rounded != floats


def _with_positions(path: Path) -> Path:
    """Copy the checkpoint of floats, with more positions."""
    shutil.copytree(CHECKPOINTS / "llama_floats", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return path
