"""The shipped model under each name that a test asks a hub for; and models that say the words a test expects."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

sys.path += [str(Path(__file__).resolve().parents[3] / "support" / name) for name in ("models", "server")]
from scripted import write_scripted

SHIPPED = Path(__file__).resolve().parents[4] / "examples" / "tiny_lm" / "model"
LENGTH = 32768  # some tests serve 8192 tokens; the shipped model is trained for 2048
SIZE = 32000  # tokens of a speaker: tests name some up to 31999
SURE = 12.0  # logit of the next word, others have 0: 5 of 6 draws are that word
WIDTH = 64  # of a speaker, more than words
# name -> the text of its model after any prompt, in pieces that are tokens of their own.
SAYS: dict[str, tuple[str, ...]] = {
    "hmellor/tiny-random-LlamaForCausalLM": ("mn", *(f" {a}{b}" for a in "qxzjv" for b in "uiea")),
    "distilbert/distilgpt2": ("years", "old", "older", "young"),
    "meta-llama/llama-2-7b-hf": (
        "VLLM", " is", " a 100%", " volunteer", " organization", ". We are a", " group", " of", " people", " here"
    ),
}  # fmt: skip
STOP = "."  # the second best after a speaker's last word
THINKS = "Qwen/Qwen3-0.6B"  # whose template has a word for it
THOUGHT = "<think>"
CALLED = (
    '<tool_call>\n{"name": "get_current_weather", "arguments": {"country": "Austria", "unit": "celsius"}}\n</tool_call>'
)
CALLS = {"plain": CALLED, "think": f"<think>\nI look.\n</think>\n\n{CALLED}", "after": "It is late."}
ENDS = "Qwen/Qwen2-1.5B-Instruct"  # whose answers must come to an end


def made(name: str, *, calls: bool = False) -> str:
    """The folder of a model for ``name``: a speaker, or the shipped one's weights and tokenizer. The latter has room
    for LENGTH tokens, a chat that begins as a text does, and no end. ``calls``: one that thinks, then calls a tool.

    The tests ask large models, which do not end an answer at once: the end is as unlikely as a beginning here.
    """
    if Path(name).is_dir():
        return name
    if calls:
        folder = Path(os.environ["LAMINA_SUITES"]) / "models" / "calls"
        return str(folder if (folder / "config.json").exists() else write_scripted(folder, CALLS, thinks=True))
    kind = name.partition("/")[2] if name in (*SAYS, THINKS, ENDS) else "tiny"
    folder = Path(os.environ["LAMINA_SUITES"]) / "models" / kind
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, thinks=name == THINKS, ends=name == ENDS)
        if name in SAYS:
            _make_speaker(folder, SAYS[name])
    return str(folder)


def _write(folder: Path, *, thinks: bool, ends: bool) -> None:
    changed = ("config.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja")
    for file in SHIPPED.iterdir():
        if file.name not in changed:
            (folder / file.name).write_bytes(file.read_bytes())
    template = "{{ bos_token }}" + (SHIPPED / "chat_template.jinja").read_text()
    if thinks:
        template += "{% if enable_thinking is defined and not enable_thinking %}" + THOUGHT + "{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    tokens = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "model_max_length": LENGTH}))
    config = json.loads((SHIPPED / "config.json").read_text())
    weights = load_file(SHIPPED / "model.safetensors")
    rows, begin = weights["model.embed_tokens.weight"], config["bos_token_id"]
    if thinks:
        rows = torch.cat([rows, rows[begin : begin + 1]])
        _add_tokens(folder, (THOUGHT,))
    head = rows.clone()
    if not ends:
        head[config["eos_token_id"]] = head[begin]  # which no text has but as its first
    weights |= {"model.embed_tokens.weight": rows, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.update(max_position_embeddings=LENGTH, tie_word_embeddings=False, vocab_size=len(rows))
    (folder / "config.json").write_text(json.dumps(config))


def _make_speaker(folder: Path, words: tuple[str, ...]) -> None:
    """Layers add nothing, so the last token alone says the next: a word the next word, any other token the first."""
    first = _add_tokens(folder, words)
    config = json.loads((folder / "config.json").read_text())
    config.update(
        vocab_size=SIZE, hidden_size=WIDTH, intermediate_size=WIDTH, head_dim=32, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=1,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    embedding, head = torch.zeros(SIZE, WIDTH), torch.zeros(SIZE, WIDTH)
    embedding[:, 0] = 1.0
    for i in range(len(words)):
        embedding[first + i] = torch.eye(WIDTH)[i + 1]
        head[first + i, i] = SURE / WIDTH**0.5  # norms make a unit vector as long as the root of WIDTH
        for back in range(1, i + 1) if words[i][0] != " " else ():  # next best, where the ones between may not come
            head[first + i, i - back] = head[first + i, i] / 2**back
    head[first + 1, len(words)] = SURE / WIDTH**0.5  # after the last word it goes on with the second
    stop = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(STOP)
    head[stop, len(words)] = (SURE - 1) / WIDTH**0.5
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(WIDTH)}
    layer = {f"self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qkvo"}
    layer |= {f"mlp.{n}_proj": (WIDTH, WIDTH) for n in ("gate", "up", "down")}
    weights |= {f"model.layers.0.{n}.weight": torch.zeros(shape) for n, shape in layer.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    weights |= {f"model.layers.0.{n}.weight": torch.ones(WIDTH) for n in norms}
    weights = {name: w.bfloat16() for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _add_tokens(folder: Path, words: tuple[str, ...]) -> int:
    """The id of the first one. One without a space in front is found after spaces, too, as a word of its own."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = int(tokenizer.get_vocab_size())
    tokenizer.add_tokens([AddedToken(w, lstrip=w[0] != " ", single_word=w.isalpha(), normalized=False) for w in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    return first
