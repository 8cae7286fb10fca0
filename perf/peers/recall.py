"""Other projects that leave out KV, each in an environment and a process of its own, for bench_kv_sparsity.py.

``RecallPeer`` is the benchmark's side; run as a script it is the other one. Greedy answers to prompts whose KV was cut
to a number of tokens, the question among them (`seen`) or fed after them, a token at a time (`later`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers.child import Child, Fields, serve
from peers.decode import export_openvino

# Tokens of a prompt, those of the question at its end, tokens of the answer, order, tokens that are kept -> the answer.
Answer = Callable[[list[int], int, int, str, int], list[int]]
ASKED = "tokens", "asked", "length", "order", "budget"


class RecallPeer:
    """A peer that has loaded the model. Raises OSError or RuntimeError, with the cause, where it cannot take part."""

    def __init__(self, python: str, peer: str, model: Path, folder: Path) -> None:
        """``folder``: where it may put files."""
        self._child = Child(python, __file__, [peer, str(model), str(folder)])

    def answer(self, tokens: list[int], asked: int, length: int, order: str, budget: int) -> list[int]:
        """``length`` tokens after a prompt. Raises RuntimeError where the peer cannot do that."""
        fields = dict(zip(ASKED, (tokens, asked, length, order, budget), strict=True))
        answer: list[int] = self._child.ask(**fields)["answer"]
        return answer

    def close(self) -> None:
        """End the process."""
        self._child.close()


def kvpress(name: str, model: str, folder: str) -> Answer:
    """A press of kvpress on transformers, with its own defaults, in all layers but the first; a window no longer than
    the budget.
    """
    import kvpress  # type: ignore[import-not-found]
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    made = getattr(kvpress, name)

    class FirstLayerFull(made):  # type: ignore[misc,valid-type]
        def compress(self, module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
            return (keys, values) if not module.layer_idx else super().compress(module, hidden, keys, values, *rest)

    def answer(tokens: list[int], asked: int, length: int, order: str, budget: int) -> list[int]:
        context = tokens if order == "seen" else tokens[:-asked]
        press = FirstLayerFull(compression_ratio=max(0.0, 1.0 - budget / len(context)))
        press.window_size = min(press.window_size, budget // 2)
        cache, generated, behind = DynamicCache(), list[int](), tokens[len(context) :]
        with torch.inference_mode():
            with press(decoder):
                logits = decoder(torch.tensor([context]), past_key_values=cache).logits[0, -1]
            for position in range(len(context), len(tokens) + length):
                if not behind:
                    generated.append(int(logits.argmax()))
                token = behind.pop(0) if behind else generated[-1]
                at = torch.tensor([[position]])
                logits = decoder(torch.tensor([[token]]), position_ids=at, past_key_values=cache).logits[0, -1]
        return generated

    return answer


def openvino(model: str, folder: str) -> Answer:
    """Cache eviction of OpenVINO GenAI's continuous batching, in its blocks of 32: the first one and the last one
    always stay, in all layers.
    """
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    size, at = 32, export_openvino(Path(model), Path(folder) / "openvino")

    def answer(tokens: list[int], asked: int, length: int, order: str, budget: int) -> list[int]:
        if order != "seen":
            raise ValueError("it takes no tokens after a prompt that has lost some of its KV")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = 1, len(tokens) + size
        if budget < len(tokens):
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                size, size, max(3 * size, budget // size * size), genai.AggregationMode.NORM_SUM
            )
        pipeline = genai.ContinuousBatchingPipeline(str(at), scheduler, "CPU", {"KV_CACHE_PRECISION": "bf16"})
        config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(1)
        row = ov.Tensor(np.array([tokens], dtype=np.int64))
        return list(pipeline.generate([row], [config])[0].m_generation_ids[0])

    return answer


PEERS: dict[str, Callable[..., Answer]] = {
    "kvpress SnapKV": partial(kvpress, "SnapKVPress"),
    "kvpress PyramidKV": partial(kvpress, "PyramidKVPress"),
    "openvino": openvino,
}
ENVIRONMENTS = {"kvpress SnapKV": "kvpress", "kvpress PyramidKV": "kvpress", "openvino": "openvino"}


def _begin(peer: str, model: str, folder: str) -> Callable[[Fields], Fields]:
    answer = PEERS[peer](model, folder)

    def reply(question: Fields) -> Fields:
        try:
            return {"answer": answer(*(question[name] for name in ASKED))}
        except Exception as e:  # noqa: BLE001 - the benchmark reports it
            return {"error": f"{type(e).__name__}: {e}"}

    return reply


if __name__ == "__main__":
    serve(partial(_begin, *sys.argv[1:]))
