"""The shipped model under each name that a test asks a hub for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

SHIPPED = Path(__file__).resolve().parents[4] / "examples" / "tiny_lm" / "model"
LENGTH = 32768  # some tests serve 8192 tokens; the shipped model is trained for 2048


def made(name: str) -> str:
    """The folder of a model for ``name``: the shipped one's weights and tokenizer, room for LENGTH tokens, a
    chat that begins as a text does, and no end.

    The tests ask large models, which do not end an answer at once: the end is as unlikely as a beginning here.
    """
    if Path(name).is_dir():
        return name
    folder = Path(os.environ["LAMINA_SUITES"]) / "models" / "tiny"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder)
    return str(folder)


def _write(folder: Path) -> None:
    changed = ("config.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja")
    for file in SHIPPED.iterdir():
        if file.name not in changed:
            (folder / file.name).write_bytes(file.read_bytes())
    template = (SHIPPED / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    tokens = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "model_max_length": LENGTH}))
    config = json.loads((SHIPPED / "config.json").read_text())
    weights = load_file(SHIPPED / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[config["eos_token_id"]] = head[config["bos_token_id"]]  # which no text has but as its first
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config.update(max_position_embeddings=LENGTH, tie_word_embeddings=False)
    (folder / "config.json").write_text(json.dumps(config))
