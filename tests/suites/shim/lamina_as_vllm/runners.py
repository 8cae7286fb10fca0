"""``VllmRunner`` and ``HfRunner`` of vLLM's conftest, over Lamina and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import SamplingParams

from .models import made
from .offline import LLM

DTYPES = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16}


class VllmRunner:
    def __init__(self, model_name: str, tokenizer_name: str | None = None, **options: Any) -> None:
        options = {"seed": 0, "max_model_len": 1024, **options}
        options.pop("default_torch_num_threads", None)
        self.llm = LLM(model_name, tokenizer=tokenizer_name, **options)

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.llm.close()

    def get_llm(self) -> LLM:
        return self.llm

    def generate(
        self, prompts: Sequence[Any], sampling_params: SamplingParams, return_logprobs: bool = False, **more: Any
    ) -> Any:
        """[(ids of prompt and completion, text of both), ...] of each prompt; and its logprobs, where asked for."""
        outputs, scores = [], []
        for done in self._ask(prompts, sampling_params, more):
            ids = [done.prompt_token_ids + list(o.token_ids) for o in done.outputs]
            outputs.append((ids, [(done.prompt or "") + o.text for o in done.outputs]))
            scores.append([*(done.prompt_logprobs or []), *(x for o in done.outputs for x in o.logprobs or [])])
        return (outputs, scores) if return_logprobs else outputs

    def generate_greedy(self, prompts: Sequence[Any], max_tokens: int, **more: Any) -> list[tuple[list[int], str]]:
        done = self.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), **more)
        return [(ids[0], texts[0]) for ids, texts in done]

    def generate_w_logprobs(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams,
        include_prompt_token_ids: bool = False,
        **more: Any,
    ) -> list[tuple[Any, ...]]:
        found = []
        for done in self._ask(prompts, sampling_params, more):
            last = done.outputs[-1]
            entry: tuple[Any, ...] = (list(last.token_ids), last.text, last.logprobs)
            entry += (done.prompt_token_ids,) if include_prompt_token_ids else ()
            found.append(entry if sampling_params.prompt_logprobs is None else (*entry, done.prompt_logprobs))
        return found

    def generate_greedy_logprobs(
        self, prompts: Sequence[Any], max_tokens: int, num_logprobs: int | None, num_prompt_logprobs: int | None = None,
        stop_token_ids: list[int] | None = None, stop: list[str] | None = None, **more: Any,
    ) -> list[tuple[Any, ...]]:  # fmt: skip
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, logprobs=num_logprobs, prompt_logprobs=num_prompt_logprobs,
            stop_token_ids=stop_token_ids, stop=stop,
        )  # fmt: skip
        return self.generate_w_logprobs(prompts, params, **more)

    def _ask(self, prompts: Sequence[Any], params: Any, more: dict[str, Any]) -> Any:
        asked = [
            p if isinstance(p, dict) else {"prompt" if isinstance(p, str) else "prompt_token_ids": p} for p in prompts
        ]
        return self.llm.generate(asked, sampling_params=params, **{k: v for k, v in more.items() if v is not None})


class HfRunner:
    """transformers' own ``generate``, greedy."""

    def __init__(self, model_name: str, dtype: str = "auto", **options: Any) -> None:
        path = made(model_name)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES.get(dtype, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model

    def get_inputs(self, prompts: Sequence[Any], **more: Any) -> list[Any]:
        return [
            self.tokenizer(p, return_tensors="pt") if isinstance(p, str) else {"input_ids": torch.tensor([p])}
            for p in prompts
        ]

    def generate_greedy(self, prompts: Sequence[Any], max_tokens: int, **more: Any) -> list[tuple[list[int], str]]:
        found = []
        for inputs in self.get_inputs(prompts):
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)[0]
            found.append((ids.tolist(), self.tokenizer.decode(ids, skip_special_tokens=True)))
        return found

    def generate_greedy_logprobs(
        self, prompts: Sequence[Any], max_tokens: int, **more: Any
    ) -> list[list[torch.Tensor]]:
        """Returns for each prompt: first [prompt tokens, vocabulary], then [1, vocabulary] of each new token."""
        found = []
        for inputs in self.get_inputs(prompts):
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
            with torch.inference_mode():
                scores = self.model(ids[:, :-1]).logits[0].float().log_softmax(-1)
            first = inputs["input_ids"].shape[1]
            found.append([scores[:first], *scores[first:].split(1)])
        return found

    def generate_greedy_logprobs_limit(
        self, prompts: Sequence[Any], max_tokens: int, num_logprobs: int | None, **more: Any
    ) -> list[tuple[list[int], str, list[dict[int, float]]]]:
        found = []
        for inputs, scores in zip(
            self.get_inputs(prompts), self.generate_greedy_logprobs(prompts, max_tokens), strict=True
        ):
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)[0]
            ids = ids[inputs["input_ids"].shape[1] :]
            best = [s[-1].topk(num_logprobs or 0) for s in scores]
            each = [dict(zip(b.indices.tolist(), b.values.tolist(), strict=True)) for b in best]
            found.append((ids.tolist(), self.tokenizer.decode(ids), each))
        return found
