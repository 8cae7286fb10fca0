"""A model's directory is data: nothing in it runs code, reaches a hub or reads other files, unless it is trusted.

Each case is a directory with one fault, loaded in a process whose audit hook sees what loading does. The same cases,
trusted, show that the hook sees it, and that the packages that would do it are there.

Covers: lamina/models/model_files.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # one program loads all of them
PROGRAM = Path(__file__).with_name("audited.py")
LIMIT_S = 580
SHAPE = {
    "vocab_size": 340, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIG, TOKENIZER, SPECIAL, GENERATION = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
)  # fmt: skip
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
HUB = "kernels-community/flash-attn"
# A package that would fetch kernels from a hub, as an operator may have installed it.
KERNELS = """
import socket
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, x=None, *a, **k: x})
def get_kernel(name, *a, **k):
    with socket.socket() as s:
        s.connect(("127.0.0.1", 9))
"""
Plant = Callable[[Path, Path], object]  # (the directory, the secret)


def keys(file: str, **values: Any) -> Plant:
    def plant(place: Path, secret: Path) -> None:
        path = place / file
        own = json.loads(path.read_text()) if path.exists() else {}
        given = {k: str(secret) if v == "SECRET" else v for k, v in values.items()}
        path.write_text(json.dumps({k: v for k, v in (own | given).items() if v is not None}))

    return plant


def text(file: str, content: str) -> Plant:
    return lambda place, secret: (place / file).write_text(content)


def link(file: str, target: str = "SECRET") -> Plant:
    def plant(place: Path, secret: Path) -> None:
        (place / file).unlink(missing_ok=True)
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).symlink_to(secret if target == "SECRET" else target)

    return plant


def pipe(file: str) -> Plant:
    def plant(place: Path, secret: Path) -> None:
        (place / file).unlink(missing_ok=True)
        os.mkfifo(place / file)

    return plant


def code(file: str, **values: Any) -> Plant:
    def plant(place: Path, secret: Path) -> None:
        keys(file, **values)(place, secret)
        (place / "own.py").write_text("raise SystemExit('ran')\n")

    return plant


def index(name: str) -> Plant:
    def plant(place: Path, secret: Path) -> None:
        shutil.move(place / "model.safetensors", place.parent / f"{place.name}.safetensors")
        (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))

    return plant


def without(file: str, then: Plant) -> Plant:
    def plant(place: Path, secret: Path) -> None:
        then(place, secret)
        (place / file).unlink()

    return plant


def own_link(place: Path, secret: Path) -> None:
    (place / "chat_template.jinja").rename(place / "own.jinja")
    (place / "chat_template.jinja").symlink_to("own.jinja")


def other_config(place: Path, secret: Path) -> None:
    keys(CONFIG, attn_implementation=HUB)(place, secret)
    (place / CONFIG).rename(place / "config.0.0.1.json")
    (place / CONFIG).write_text(
        json.dumps({**SHAPE, "model_type": "llama", "configuration_files": ["config.0.0.1.json"]})
    )


REFUSED: dict[str, tuple[Plant, str]] = {
    "attention": (keys(CONFIG, attn_implementation=HUB), f"hub (attn_implementation in {CONFIG})"),
    "attention_of_old": (keys(CONFIG, _attn_implementation=HUB), f"hub (_attn_implementation in {CONFIG})"),
    "attention_by_part": (keys(CONFIG, attn_implementation={"": HUB}), f"hub (attn_implementation in {CONFIG})"),
    "attention_within": (keys(CONFIG, parts={"attn_implementation": HUB}), f"(parts.attn_implementation in {CONFIG})"),
    "paged_attention": (keys(CONFIG, attn_implementation=f"paged|{HUB}"), f"hub (attn_implementation in {CONFIG})"),
    "experts": (keys(CONFIG, experts_implementation=HUB), f"hub (experts_implementation in {CONFIG})"),
    "fusion": (keys(CONFIG, fusion_config={"patch_embeddings": True}), f"(fusion_config in {CONFIG})"),
    "other_config": (other_config, f"another file (configuration_files in {CONFIG})"),
    "other_weights": (keys(CONFIG, transformers_weights="o.safetensors"), f"(transformers_weights in {CONFIG})"),
    "backbone": (keys(CONFIG, use_pretrained_backbone=True), f"hub (use_pretrained_backbone in {CONFIG})"),
    "model_code": (
        code(CONFIG, auto_map={"AutoConfig": "own.C"}, architectures=["OwnForCausalLM"]),
        f"its own code (auto_map in {CONFIG})",
    ),
    "tokenizer_code": (
        code(TOKENIZER, auto_map={"AutoTokenizer": ["own.T", "own.T"]}, tokenizer_class=None),
        f"its own code (auto_map in {TOKENIZER})",
    ),
    "generation_code": (keys(GENERATION, custom_generate="a/b"), f"its own code (custom_generate in {GENERATION})"),
    "class_of_a_model": (keys(TOKENIZER, tokenizer_class="AutoModelForCausalLM"), "which is no tokenizer"),
    "class_of_a_function": (keys(TOKENIZER, tokenizer_class="pipeline"), "which is no tokenizer"),
    "class_of_a_pickle": (keys(TOKENIZER, tokenizer_class="RagRetriever"), "which is no tokenizer"),
    "class_in_the_config": (
        without(TOKENIZER, keys(CONFIG, tokenizer_class="RagTokenizer")),
        f"'RagTokenizer' (tokenizer_class in {CONFIG})",
    ),
    "gguf": (without("tokenizer.json", keys(TOKENIZER, gguf_file="SECRET")), f"file (gguf_file in {TOKENIZER})"),
    "vocabulary": (
        without("tokenizer.json", keys(TOKENIZER, vocab_file="SECRET", tokenizer_class="GPT2Tokenizer")),
        f"another file (vocab_file in {TOKENIZER})",
    ),
    "vocabulary_of_old": (
        keys(SPECIAL, tokenizer_file="SECRET"),
        f"another file (tokenizer_file in {SPECIAL})",
    ),
    "dictionary": (keys(TOKENIZER, mecab_kwargs={"mecab_option": "-r x"}), f"file (mecab_kwargs in {TOKENIZER})"),
    "adapter": (text("adapter_config.json", '{"base_model_name_or_path": "a/b"}'), "is a LoRA adapter of a/b"),
    "index_above": (index("../index_above.safetensors"), "names ../index_above.safetensors, outside of"),
    "index_elsewhere": (index("/etc/passwd"), "names /etc/passwd, outside of"),
    "link_config": (link(CONFIG), f"{CONFIG} is a link to"),
    "link_template": (link("chat_template.jinja"), "chat_template.jinja is a link to"),
    "link_template_within": (link("additional_chat_templates/x.jinja"), "x.jinja is a link to"),
    "pipe_config": (pipe(CONFIG), f"{CONFIG} is not a regular file"),
    "pipe_tokenizer": (pipe(TOKENIZER), f"{TOKENIZER} is not a regular file"),
    "pipe_weights": (pipe("model.safetensors"), "model.safetensors is not a regular file"),
    "device": (link(CONFIG, "/dev/zero"), f"{CONFIG} is not a regular file"),
    **{
        f"deep_{file}": (text(file, DEEP), f"{file} is nested too deeply: at most 64 levels are read")
        for file in (CONFIG, TOKENIZER, GENERATION, SPECIAL, "added_tokens.json")
    },
    "deep_list": (text(CONFIG, "[" * 100_000), f"{CONFIG} is nested too deeply"),
    "deep_vocabulary": (text("tokenizer.json", DEEP), "the tokenizer in"),
    "large_config": (text(CONFIG, '{"a": "' + "x" * (65 << 20) + '"}'), f"{CONFIG} has 68157449 bytes: at most"),
    "layers": (keys(CONFIG, num_hidden_layers=10**9), f"{CONFIG} has num_hidden_layers 1000000000: at most 10000"),
    "wide": (keys(CONFIG, hidden_size=1 << 40, head_dim=8), f"{CONFIG} describes embeddings of"),
    "long": (keys(CONFIG, vocab_size=1 << 40), f"{CONFIG} describes embeddings of"),
    "part_quantised": (keys(CONFIG, text_config={"quantization_config": {"quant_method": "awq"}}), "and none is"),
}  # fmt: skip
TAKEN: dict[str, Plant] = {
    "plain": keys(CONFIG),
    "named_kernels": keys(CONFIG, attn_implementation="flash_attention_2"),  # many models on hubs name theirs
    "paths_of_others": keys(
        TOKENIZER, tokenizer_file="/root/.cache/none/tokenizer.json", special_tokens_map_file="/a/b"
    ),
    "own_link": own_link,
    "code_of_a_known_tokenizer": code(
        TOKENIZER, auto_map={"AutoTokenizer": ["own.T", "own.T"]}, tokenizer_class="PreTrainedTokenizerFast"
    ),
    "unneeded_code": code(CONFIG, auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}),  # as of Phi-3
    "unknown_class": keys(TOKENIZER, tokenizer_class="NoSuchTokenizer"),
}
SEEN = {  # what the hook sees of cases that are trusted
    "attention": "socket.connect",
    "other_config": "socket.connect",
    "model_code": "own.py",
    "tokenizer_code": "own.py",
    "link_template": "opens the secret",
    "gguf": "opens the secret",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Load each directory in one program: its events and error, by the name of its case; "+name": trusted."""
    root = tmp_path_factory.mktemp("models")
    site, whole, secret = root / "site", root / "whole", root / "secret.json"
    secret.write_text("{}")
    (site / "kernels/layer").mkdir(parents=True)
    (site / "kernels/__init__.py").write_text(KERNELS)
    (site / "kernels/layer/__init__.py").touch()
    (site / "kernels/layer/mode.py").write_text("class Mode: pass\n")
    (site / "kernels-0.18.2.dist-info").mkdir()
    (site / "kernels-0.18.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(whole)
    tokenizer = tokenizer_of("byte_level")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(whole)
    for name, plant in {**TAKEN, **{name: plant for name, (plant, _) in REFUSED.items()}}.items():
        plant(Path(shutil.copytree(whole, root / "cases" / name)), secret)
    words = [str(root / "cases" / name) for name in (*TAKEN, *REFUSED)]
    words += [f"+{root / 'cases' / name}" for name in SEEN]
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, secret, *words],
        check=True,
        env={**os.environ, "PYTHONPATH": path, "HF_MODULES_CACHE": str(root / "modules")},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_names_code_a_hub_or_other_files_is_refused_in_one_line(name: str, results: Any) -> None:
    assert results[name]["events"] == []
    error = results[name]["error"]
    assert error is not None, "it was loaded"
    assert "\n" not in error
    assert len(error) < 600
    assert REFUSED[name][1] in error


@pytest.mark.parametrize("name", TAKEN)
def test_a_model_that_names_neither_is_loaded(name: str, results: Any) -> None:
    assert results[name] == {"events": [], "error": None}


@pytest.mark.parametrize("name", SEEN)
def test_the_hook_sees_what_a_trusted_model_does(name: str, results: Any) -> None:
    result = results[f"+{name}"]
    if "`kernels` is either not installed" in (result["error"] or ""):
        pytest.skip("this version of transformers asks for the package kernels before it opens a connection")
    assert any(SEEN[name] in event for event in result["events"])
