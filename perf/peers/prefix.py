"""vLLM with prefix caching, as it is by default: the other side of bench_prefix.py, in an environment and a process of
its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from peers.child import Fields, serve


def begin() -> Callable[[Fields], Fields]:
    """What answers a prompt: the seconds until its first token."""
    path, length = sys.argv[1], int(sys.argv[2])
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(path, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=length + 8)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)

    def answer(fields: Fields) -> Fields:
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": fields["prompt"]}, params, use_tqdm=False)
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serve(begin)
