"""A made model that writes scripts: its next token follows from the last one alone, through all layers of a Llama.

Real clients get whole answers of it: calls in the form of Hermes, JSON, reasoning. A message names a script as
``@name``, and the chat template turns that into the token that begins it. After a tool's reply comes ``after``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from shipped import MODEL

WIDTH, POSITIONS, GAIN = 512, 65536, 8.0
BEGIN = (
    "{%- set all = namespace(text='') %}"
    "{%- for m in messages %}{%- set all.text = all.text + (m.content or '') %}"
    "{{- '<|' + m.role + '|>\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson + '}</tool_call>' }}{%- endfor %}"
    "{{- '<|end|>\\n' }}{%- endfor %}{%- if tools %}{{- tools | tojson }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}"
    "{%- if messages[-1].role == 'tool' %}{{- '<|script:after|>' }}"
)
ONE = "{%%- elif '@%s' in all.text %%}{{- '<|script:%s|>' }}"
THINKS = (
    "{%- elif enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n<|script:plain|>' }}"
    "{%- else %}{{- '<|script:think|>' }}"
)
END = "{%- endif %}{%- endif %}"


def pieces_of(scripts: Mapping[str, str]) -> dict[str, list[str]]:
    """Each script in pieces of few characters. No piece comes twice, in all of them."""
    used, cut = set[str](), dict[str, list[str]]()
    for name, text in scripts.items():
        pieces, at = list[str](), 0
        while at < len(text):
            size = next((n for n in range(2, len(text) - at + 1) if text[at : at + n] not in used), 0)
            if not size:  # the rest was a piece before, so it becomes longer
                at -= len(pieces.pop())
                size = len(text) - at
            pieces.append(text[at : at + size])
            used.add(pieces[-1])
            at += size
        cut[name] = pieces
    return cut


def write_scripted(folder: Path, scripts: Mapping[str, str], *, thinks: bool = False) -> Path:
    """A checkpoint that writes ``scripts``, name -> text of ASCII, each up to an end token. ``thinks``: without a name
    in the text it is the script ``think``, or ``plain`` where the template's variable enable_thinking is false.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    cut = pieces_of(scripts)
    tokenizer.add_tokens([f"<|script:{name}|>" for name in cut], special_tokens=True)
    tokenizer.add_tokens([piece for pieces in cut.values() for piece in pieces])
    tokenizer.chat_template = BEGIN + "".join(ONE % (name, name) for name in cut) + (THINKS if thinks else "") + END
    tokenizer.model_max_length = POSITIONS
    end = tokenizer.eos_token_id
    follows = dict[int, int]()
    for name, pieces in cut.items():
        chain = [tokenizer.convert_tokens_to_ids(piece) for piece in (f"<|script:{name}|>", *pieces)]
        follows |= dict(pairwise([*chain, end]))
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS,
            bos_token_id=0, eos_token_id=end, pad_token_id=end, tie_word_embeddings=False, dtype=torch.float32,
        )
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:  # nothing is added to the embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        known = torch.nn.functional.normalize(torch.randn(len(tokenizer), WIDTH), dim=1)
        model.model.embed_tokens.weight.copy_(known)
        model.lm_head.weight.zero_()
        for token, then in follows.items():
            model.lm_head.weight[then] += GAIN * known[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
