"""Every stored format that Lamina reads, dense and with experts: engines give the tokens of transformers.

Counters of the workers say which products were by packed weights, and which of them by rows of int8.

    pytest -m formats tests

The tokens are those of transformers in fp32, with weights as the format's own library unpacks them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import float_checkpoints
import gguf
import httpx
import pytest
from forked import launch
from gguf_mixture import FLOATS, IDS, KINDS, Mixture
from gguf_mixture import tokens_of as tokens_of_mixture
from running import Running
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lamina import LLM, SamplingParams
from lamina.models.quantization import FORMATS, compressed_tensors, gguf_blocks, gguf_weights, gptq, modelopt

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.no_retry, pytest.mark.formats]
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"

# Formats whose weights become numbers of --dtype.
UNPACKED = {
    "fp8", "compressed-tensors float-quantized", "modelopt FP8", "modelopt FP8_PER_CHANNEL_PER_TOKEN",
    *(f"gguf {kind}" for kind in FLOATS),
}  # fmt: skip
# Names of a format that has another name here, or of layers with several formats.
OTHER_NAMES = {
    "compressed-tensors naive-quantized", "compressed-tensors mixed-precision", "compressed-tensors dense",
    "modelopt W4A16_NVFP4", "modelopt MIXED_PRECISION",
}  # fmt: skip
ONLY_EXPERTS = {"mxfp4"}


class Served(NamedTuple):
    """A model, its greedy tokens, and the layers of a step that are stored in few bits."""

    path: Path
    prompt: list[int]
    tokens: list[int]
    layers: int


class Case(NamedTuple):
    """``formats``: of its weights. ``make``: writes the model into a folder, or finds it."""

    formats: frozenset[str]
    has_experts: bool
    make: Callable[[Path], Served]


def format_of(config: Mapping[str, Any]) -> str:
    settings = config["quantization_config"]
    method = settings["quant_method"]
    more = {
        "compressed-tensors": lambda: settings["format"],
        "gptq": lambda: f"{settings['checkpoint_format']} {settings['bits']}",
        "modelopt": lambda: settings["quant_algo"],
    }
    return f"{method} {more[method]()}" if method in more else str(method)


def kinds_of(path: Path) -> frozenset[str]:
    """The formats of the matrices in a GGUF file."""
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    return frozenset(f"gguf {tensor.tensor_type.name}" for tensor in matrices)


def formats_in(path: Path) -> frozenset[str]:
    """The formats of a model, by its files."""
    return kinds_of(path) if path.is_file() else frozenset({format_of(json.loads((path / "config.json").read_text()))})


def committed(path: Path) -> Case:
    config = json.loads((path / "config.json").read_text())
    known, has_experts = json.loads((path / "oracle.json").read_text()), "num_experts_per_tok" in config
    each = 4 + (2 * config["num_experts_per_tok"] if has_experts else 3)
    served = Served(path, known["prompt"], known["tokens"], config["num_hidden_layers"] * each)
    return Case(frozenset({format_of(config)}), has_experts, lambda _: served)


def committed_file(path: Path) -> Case:
    known = json.loads(path.with_suffix(".json").read_text())
    return Case(kinds_of(path), False, lambda _: Served(path, known["prompt"], known["tokens"], 7 + 1))


def floats(case: str, folder: Path) -> Served:
    path, model = float_checkpoints.write(folder, case)
    tokens, layers = float_checkpoints.tokens_of(model), 4 * model.config.num_hidden_layers
    return Served(path, float_checkpoints.PROMPT, tokens, layers)


def mixture(kind: str, folder: Path) -> Served:
    made = Mixture("qwen3moe", (kind, kind, kind))
    return Served(made.write(folder / "m.gguf"), IDS[0].tolist(), tokens_of_mixture(made.model(), 8), 4 + 4 + 1)


CASES = {path.parent.name: committed(path.parent) for path in sorted(CHECKPOINTS.glob("*/oracle.json"))}
CASES |= {path.name: committed_file(path) for path in sorted(CHECKPOINTS.glob("*.gguf"))}
if float_checkpoints.HAS_ORACLE:
    CASES |= {
        f"fp8-{name}": Case(frozenset({"fp8"}), name == "deepseek", partial(floats, name))
        for name in ("deepseek", "small-blocks", "channels", "tensors")
    }
CASES["gpt-oss"] = Case(frozenset({"mxfp4"}), True, partial(floats, "gpt-oss"))
for one in (*KINDS, *FLOATS):
    CASES[f"experts-{one}"] = Case(frozenset({f"gguf {one}"}), True, partial(mixture, one))


PROGRAMS = ("gpt-oss", "fp8-deepseek", "llama_awq", "llama_gptq", "llama_int4_group", "experts-Q4_0")


def has_int8_rows(path: Path) -> bool:
    """True if a checkpoint says that rows become int8."""
    if path.is_file():
        return False
    groups = json.loads((path / "config.json").read_text())["quantization_config"].get("config_groups", {})
    inputs = [group["input_activations"] for group in groups.values() if group["input_activations"]]
    return any(each["num_bits"] == 8 and each.get("type", "int") == "int" for each in inputs)


@pytest.mark.long(but=["llama_int4_group", "llama_q4_0.gguf"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_formats_own_library(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = case.make(tmp_path)
    assert case.formats <= formats_in(made.path)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(made.tokens), ignore_eos=True)
    with LLM(str(made.path), dtype="float32", memory_workers=2, transport="loopback", max_model_len=64) as llm:
        outputs = llm.generate([made.prompt] * 3, greedy)
        (worker,) = (values for values in llm.stats().values() if "packed_products" in values)
    assert [output.outputs[0].token_ids for output in outputs] == [made.tokens] * 3
    packed, int8 = worker["packed_products"], worker["int8_products"]
    if case.formats <= UNPACKED:
        assert packed == 0
    else:
        assert packed >= made.layers * worker["steps"] > 0
    assert int8 == (packed if has_int8_rows(made.path) else 0)


def with_words(made: Served, folder: Path) -> tuple[Path, str]:
    """The model with a tokenizer, and the text of its prompt."""
    if made.path.is_file():
        return made.path, "".join(chr(33 + token) for token in made.prompt)
    path = folder / "with_words"
    shutil.copytree(made.path, path)
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    inner = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0").save_pretrained(path)
    return path, " ".join(f"t{token}" for token in made.prompt)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_generate_and_serve(name: str, tmp_path: Path) -> None:
    made = CASES[name].make(tmp_path)
    path, prompt = with_words(made, tmp_path)
    flags, count = ["--dtype", "float32", "--max-model-len", "64"], len(made.tokens)
    words = ["--prompt", prompt, "--max-tokens", str(count), "--temperature", "0", "--ignore-eos", "--json"]
    answer = json.loads(launch("generate", str(path), *words, *flags))
    assert (answer["prompt_token_ids"], answer["outputs"][0]["token_ids"]) == (made.prompt, made.tokens)
    server = Running(tmp_path / "log", *flags, model=str(path))
    try:
        body = {
            "model": str(path), "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "logprobs": 0, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        shown = reply.json()["choices"][0]["logprobs"]["tokens"]
    finally:
        server.kill()
    assert shown == [f"token_id:{token}" for token in made.tokens]


def test_all_formats_have_cases() -> None:
    known = {method for method, module in FORMATS.items() if module in ("awq", "fp8", "mxfp4")}
    known |= {f"compressed-tensors {form}" for form in compressed_tensors.WEIGHT_FORMATS}
    known |= {f"gptq {version} {bits}" for version, bits in product(gptq.ADDED, gptq.BITS)}
    known |= {f"modelopt {algorithm}" for algorithm in modelopt.ALGORITHMS}
    known |= {f"gguf {kind}" for kind in gguf_blocks.PACKED | gguf_weights.FLOATS.keys()}
    assert set(FORMATS.values()) == {
        "awq", "compressed_tensors", "fp8", "gptq", "modelopt", "mxfp4"
    }, "another format needs a line here, and cases"  # fmt: skip
    dense = {form for case in CASES.values() if not case.has_experts for form in case.formats}
    experts = {form for case in CASES.values() if case.has_experts for form in case.formats}
    assert known - OTHER_NAMES - ONLY_EXPERTS - dense == set()
    assert known - OTHER_NAMES - experts == set()
