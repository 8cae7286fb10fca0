"""GGUF files: tokens that transformers computes in fp32 with their weights, as the package gguf dequantises them.

Covers: lamina/models/quantization/gguf_file.py, lamina/models/quantization/gguf_blocks.py,
lamina/models/quantization/gguf_weights.py.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from lamina import LLM, SamplingParams
from lamina.config.engine_config import ModelOptions
from lamina.models.checkpoint import find_checkpoint, peek_config, read_config
from lamina.models.convert import convert_model
from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.quantization.gguf_weights import weight_names
from lamina.models.quantization.quantized_linear import QuantizedLinear
from lamina.models.tokenizer import load_tokenizer
from lamina.ops.gemm import get
from lamina.ops.rows import bind_rows, chain_slices
from lamina.ops.rows.program import ChainedSlice
from lamina.workers.compute.kv_identity import files_digest

pytestmark = pytest.mark.no_retry

FILES = Path(__file__).resolve().parents[2] / "checkpoints"
NAMES = sorted(path.stem for path in FILES.glob("*.gguf"))
BOUND = 1e-4  # of the spread of logits


def worst(model: Any, known: dict[str, Any]) -> float:
    """The difference of the logits of the last token, relative to their spread; infinite for other tokens."""
    prompt, tokens = known["prompt"], known["tokens"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    if logits.argmax(-1).tolist() != tokens:
        return float("inf")
    due = torch.tensor(known["logits"])
    return float((logits[-1, : len(due)] - due).abs().max() / logits[-1].std())


@pytest.mark.parametrize("entry", ["", "native", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, entry: str) -> None:
    loaded = load(FILES / f"{name}.gguf", dtype="float32", backend=get(entry, 1) if entry else None)
    packed = sum(isinstance(module, QuantizedLinear) for module in loaded.model.modules())
    assert packed == (8 if entry and name not in ("llama_f32", "llama_f16", "llama_bf16") else 0)  # with lm_head
    known = json.loads((FILES / f"{name}.json").read_text())
    assert worst(loaded.model, known) < BOUND
    assert loaded.eos_token_ids == (159,)


def test_look_ups_and_products_are_native_programs() -> None:
    backend = get("native", 1)
    model = load(FILES / "llama_q4_k_m.gguf", dtype="bfloat16", backend=backend).model
    slices = chain_slices(bind_rows(convert_model(model, max_model_len=64), backend)).slices
    assert all(isinstance(part, ChainedSlice) for part in slices)


# Families whose names differ: experts, a base model without prefix, fused projections.
FAMILIES = ("llama", "qwen2", "qwen3_moe", "gemma3_text", "gpt2", "bloom", "phi3", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_that_transformers_finds_in_all_modules(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=2))
    processor = TENSOR_PROCESSORS.get(family.replace("_", ""), TensorProcessor)(config={})
    names = get_gguf_hf_weights_map(model, processor)
    assert len(names) > 10
    assert weight_names(model, processor) == names


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_any_block_is_dequantised_as_by_gguf(kind: str) -> None:
    import numpy as np

    from lamina.models.quantization.gguf_blocks import grouped_codes

    draw, number = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    blocks = draw.integers(0, 256, (6, 3, size), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2)):
        blocks[..., at : at + 2] = draw.normal(size=(6, 3, 1)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(6, -1)
    found = grouped_codes(kind, "weight", torch.from_numpy(rows)).dequantized()
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(rows, number)))
    blocks[1, 1, :2], blocks[1, 1, -2:] = 0xFF, 0xFF  # halves that are no number
    with pytest.raises(ModelError, match="weight has a scale that is no finite number"):
        grouped_codes(kind, "weight", torch.from_numpy(rows))


def test_an_engine_serves_a_file_with_its_tokenizer() -> None:
    known = json.loads((FILES / "llama_q4_0.json").read_text())
    greedy = SamplingParams(temperature=0.0, max_tokens=len(known["tokens"]), ignore_eos=True)
    with LLM(str(FILES / "llama_q4_0.gguf"), dtype="float32", transport="loopback") as llm:
        (by_ids,) = llm.generate([known["prompt"]], greedy)
        (by_text,) = llm.generate(["".join(chr(33 + i) for i in known["prompt"] if i < 94)], greedy)
    assert by_ids.outputs[0].token_ids == known["tokens"]
    assert by_text.prompt_token_ids == [i for i in known["prompt"] if i < 94]


def test_the_tokenizer_is_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    text = "a-b c!"
    theirs = AutoTokenizer.from_pretrained(FILES, gguf_file="llama_q8_0.gguf")
    assert load_tokenizer(str(FILES / "llama_q8_0.gguf"))(text)["input_ids"] == theirs(text)["input_ids"]


def rewritten(name: str, path: Path, *, tokens: int = 0, damaged: str = "", **options: Any) -> None:
    """Write a file again with gguf's writer. ``tokens``: of a larger vocabulary. ``damaged``: a tensor with a NaN."""
    import numpy as np

    reader = gguf.GGUFReader(FILES / f"{name}.gguf")
    writer = gguf.GGUFWriter(path, "llama", **options)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, of_tokens = field.contents(), field.name.startswith("tokenizer.ggml.") and len(field.types) > 1
        if tokens and of_tokens and field.name != "tokenizer.ggml.merges":
            more = [f"w{i}" if isinstance(value[0], str) else value[0] for i in range(len(value), tokens)]
            value = [*value, *more]
        if not (tokens and field.name.endswith("vocab_size")):
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tokens and tensor.name in ("token_embd.weight", "output.weight"):
            data = np.resize(data, (tokens, data.shape[1]))
        if tensor.name == damaged:
            data.view(np.uint8).reshape(-1)[:4] = 0xFF
        writer.add_tensor(tensor.name, data, raw_shape=data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_large_vocabulary_is_passed_over_and_counted(tmp_path: Path) -> None:
    """Reading it item by item took 16 s of a real model. transformers does that here."""
    from transformers import AutoConfig

    path = tmp_path / "large.gguf"
    rewritten("llama_q8_0", path, tokens=12_000)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    ours = read_config(path).to_dict()
    assert ours["vocab_size"] == 12_000
    left_out = {"dtype", "architectures", "_name_or_path", "quantization_config"}
    assert {k: v for k, v in ours.items() if k not in left_out} == {
        k: v for k, v in theirs.items() if k in ours and k not in left_out
    }
    assert load(path, backend=get("native", 1)).model.lm_head.out_features == 12_000
    assert load_tokenizer(str(path)).vocab_size == 12_000
    assert gguf.GGUFReader.__module__.startswith("gguf"), "the package is as it was"


def test_files_are_read_by_many_threads_at_once(tmp_path: Path) -> None:
    """Each reading puts Lamina's header in the place of gguf's reader for a time."""
    own, interval = gguf.GGUFReader, sys.getswitchinterval()
    paths = [tmp_path / f"{number}.gguf" for number in range(16)]
    for number, path in enumerate(paths):
        shutil.copy(FILES / f"{NAMES[number % len(NAMES)]}.gguf", path)
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(read_config, paths))
    finally:
        sys.setswitchinterval(interval)
    assert [config.num_hidden_layers for config in found] == [
        read_config(FILES / f"{NAMES[n % len(NAMES)]}.gguf").num_hidden_layers for n in range(16)
    ]
    assert gguf.GGUFReader is own


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_a_file_in_parts_is_one_model(small_first_shard: bool, tmp_path: Path) -> None:
    """gguf splits it as llama.cpp does."""
    options = {"split_max_tensors": 4, "small_first_shard": small_first_shard}
    rewritten("llama_q4_0", tmp_path / "m.gguf", **options)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    loaded = load(parts[0], dtype="float32", backend=get("native", 1))
    assert worst(loaded.model, json.loads((FILES / "llama_q4_0.json").read_text())) < BOUND
    assert [Path(stamp.path) for stamp in loaded.stamps] == [part.resolve() for part in parts]
    assert load_tokenizer(str(parts[0]))("a-b c!")["input_ids"]
    digest = files_digest(parts[0])
    whole = parts[-1].read_bytes()
    parts[-1].write_bytes(whole[:-1] + b"\x01")
    assert files_digest(parts[0]) != digest
    parts[-1].write_bytes(parts[1].read_bytes())
    with pytest.raises(
        ModelError, match=r"-of-.*\.gguf says that it is part 1 of \d, counted from 0, and its name says"
    ):
        load(parts[0])
    parts[-1].write_bytes(whole)
    parts[1].unlink()
    with pytest.raises(ModelError, match="is missing: put all"):
        load(parts[0])


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "token_embd.weight", "output_norm.weight"])
@pytest.mark.parametrize("backend", ["", "native"])
def test_a_norm_or_an_embedding_that_is_no_number_is_refused_by_name(name: str, backend: str, tmp_path: Path) -> None:
    rewritten("llama_q8_0", tmp_path / "bad.gguf", damaged=name)
    with pytest.raises(
        ModelError, match=rf"{name} has a (value|scale) that is no finite number: fetch the model again"
    ):
        load(tmp_path / "bad.gguf", backend=get(backend, 1) if backend else None)


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = (FILES / "llama_q4_0.gguf").read_bytes()
    cases = {
        "other.gguf": (b"PK" + whole[2:], "is no GGUF file: it does not begin with GGUF"),
        "short.gguf": (whole[: len(whole) // 2], "is truncated or corrupt, fetch it again"),
        "header.gguf": (whole[:100], "is truncated or corrupt, fetch it again"),
        "novel.gguf": (whole.replace(b"llama", b"novel"), "is of a kind that transformers cannot read"),
        "model-00002-of-00002.gguf": (whole, "is a part of a GGUF file: give the first one, .*model-00001-of-00002"),
        "model-00000-of-00000.gguf": (whole, "is one of 0 parts: 1 to 1000 are read"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=words) as refused:
            load(tmp_path / name)
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("at", "form", "lie", "words"),
    [
        ("tensors", "<Q", 1 << 40, "at most 65536 are read"),
        ("fields", "<Q", 1 << 40, "at most 65536 are read"),
        ("items", "<Q", 1 << 60, "at most 4194304 are read"),
        ("items", "<Q", 1 << 20, "it ends at byte"),
        ("kind", "<I", 9, "a value is of type 9"),
        ("dims", "<Q", 1 << 63, "a tensor is "),
        ("version", "<I", 3 << 24, "its version"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made_of_it(
    at: str, form: str, lie: int, words: str, tmp_path: Path
) -> None:
    content = bytearray((FILES / "llama_q4_0.gguf").read_bytes())
    items = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    dims = content.index(b"output.weight") + len("output.weight") + 4
    places = {"version": 4, "tensors": 8, "fields": 16, "items": items, "kind": items - 4, "dims": dims}
    struct.pack_into(form, content, places[at], lie)
    (tmp_path / "lies.gguf").write_bytes(content)
    for read in (
        load,
        find_checkpoint,
        lambda path: peek_config(path, ModelOptions()),
        lambda path: load_tokenizer(str(path)),
    ):
        with pytest.raises(ModelError, match=f"is truncated or corrupt, fetch it again: .*{words}"):
            read(tmp_path / "lies.gguf")


@pytest.mark.parametrize(
    ("field", "lie", "words"),
    [
        ("llama.block_count", 1 << 30, "num_hidden_layers 1073741824: at most 10000 are made"),
        ("llama.attention.head_count", 0, "has no valid configuration"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(field: str, lie: int, words: str, tmp_path: Path) -> None:
    content = bytearray((FILES / "llama_q4_0.gguf").read_bytes())
    struct.pack_into("<I", content, content.index(field.encode() + b"\x04") + len(field) + 4, lie)
    (tmp_path / "lies.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load(tmp_path / "lies.gguf")


def test_a_folder_of_files_is_refused_with_the_file_to_give(tmp_path: Path) -> None:
    shutil.copy(FILES / "llama_q4_0.gguf", tmp_path)
    with pytest.raises(ModelError, match=r"has no config.json: give its GGUF file, as .*/llama_q4_0.gguf"):
        load(tmp_path)
    assert peek_config(tmp_path / "llama_q4_0.gguf", ModelOptions()) == {}
    assert find_checkpoint(tmp_path / "llama_q4_0.gguf") == tmp_path / "llama_q4_0.gguf"
