"""``lamina.wrap``: a Hugging Face model whose ``generate`` runs with attention on memory workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.llm import LLM
from lamina.request import SamplingParams

_DEFAULT_NEW_TOKENS = 20  # of transformers, where no length is given
_FILTERS = ("top_k", "top_p", "min_p")  # as transformers orders them
_DEFAULTS = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1,
    "repetition_penalty": 1.0, "min_p": 0.0,
}  # fmt: skip
# Fields of GenerationConfig that are obeyed here ...
_OBEYED = {
    *_DEFAULTS, "max_length", "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id", "pad_token_id",
    "bos_token_id", "return_dict_in_generate", "repetition_penalty", "min_p",
}  # fmt: skip
# ... those that change no token when num_beams is 1 and no assistant model is given ...
_IRRELEVANT = {
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "early_stopping", "length_penalty",
    "low_memory", "prefill_chunk_size", "compile_config", "disable_compile", "decoder_start_token_id", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "transformers_version", "renormalize_logits", "remove_invalid_values",
}  # fmt: skip
# ... and the values at which the others do nothing, besides None and False.
_NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0,
}  # fmt: skip


def wrap(model: nn.Module, **options: Any) -> WrappedModel:
    """Start memory workers for ``model`` and return an object with its ``generate``.

    ``model`` is any causal LM that lamina serves; it computes in this process, with its own weights, and can still be
    used as before. ``options`` are those of ``lamina.LLM``: memory_workers=2, transport="shm", max_model_len=...

        with lamina.wrap(AutoModelForCausalLM.from_pretrained(path), memory_workers=2) as wrapped:
            wrapped.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=32)

    Raises ValueError for a model or an option that cannot be served.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes a model (AutoModelForCausalLM.from_pretrained), not {model!r}: or use lamina.LLM")
    return WrappedModel(model, LLM(model, **options))


class WrappedModel:
    """What ``wrap`` returns. A context manager: worker processes live until ``close``."""

    def __init__(self, model: nn.Module, llm: LLM) -> None:
        self.model = model
        self.llm = llm

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """The model's generation configuration: defaults of ``generate``, to be edited as usual."""
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def close(self) -> None:
        """End the workers. Idempotent; the model stays usable."""
        self.llm.close()

    def __enter__(self) -> WrappedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> Any:
        """Continue ``input_ids`` [batch, length] int64 as transformers' ``generate`` does, and with its defaults.

        Settings come from the keywords, then ``generation_config``, then the model's own: lengths, ``do_sample``,
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` (of the prompt without its padding),
        ``num_return_sequences``, ``eos_token_id``, ``pad_token_id``. Prompts of
        different lengths are padded on the left, with zeros in ``attention_mask``. Sampling draws its seeds from
        torch's generator, so ``torch.manual_seed`` makes it repeatable, but not equal to transformers' draws.

        Returns [batch * num_return_sequences, length + new] on the device of the input: prompts as given, then new
        tokens up to and with an end token, then padding. Raises ValueError for a setting that would change tokens and
        cannot be obeyed (beams, other penalties, processors).
        """
        chosen = _GenerateOptions(self.generation_config, generation_config, settings)
        ids = self._prompts(inputs if inputs is not None else input_ids, chosen)
        mask = _mask(ids, attention_mask, chosen)
        params = self._params(ids, mask, chosen)
        prompts = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
        if streamer is None:
            results = self.llm.generate(prompts, params)
            completions = [c.token_ids for r in results for c in r.outputs]
        else:
            completions = [self._stream(ids, prompts, params, streamer)]
        repeated = ids.repeat_interleave(len(completions) // len(prompts), dim=0)
        sequences = _assemble(repeated, completions, chosen.pad_token_id)
        if chosen["return_dict_in_generate"]:
            from transformers.generation import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _prompts(self, ids: Tensor | None, chosen: _GenerateOptions) -> Tensor:
        if ids is None:
            if chosen["bos_token_id"] is None:
                raise ValueError("generate needs input_ids: the model has no bos_token_id to begin with")
            ids = torch.full((1, 1), chosen["bos_token_id"], dtype=torch.long, device=self.device)
        if ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
            raise ValueError(f"input_ids must be token ids [batch, length], not {list(ids.shape)} of {ids.dtype}")
        return ids

    def _params(self, ids: Tensor, mask: Tensor, chosen: _GenerateOptions) -> list[SamplingParams]:
        """One SamplingParams for each prompt."""
        batch, length = ids.shape
        limit = self.llm.engine.info.max_model_len
        most, least = chosen.new_tokens(length, limit)
        stops = chosen.stop_token_ids(self.llm.engine.info.vocab_size)
        longest = int(mask.sum(1).max())
        if longest + most > limit:
            raise ValueError(
                f"{longest} tokens of a prompt and max_new_tokens={most} exceed the longest text of {limit} tokens"
            )
        samples = bool(chosen["do_sample"])
        if chosen["num_return_sequences"] > 1 and not samples:
            raise ValueError("num_return_sequences > 1 needs do_sample=True: greedy completions are all the same")
        seeds = torch.randint(1 << 62, (batch,)).tolist() if samples else [None] * batch
        return [
            SamplingParams(
                n=chosen["num_return_sequences"],
                temperature=chosen["temperature"] if samples else 0.0,
                top_p=chosen["top_p"] if samples else 1.0,
                top_k=chosen["top_k"] or 0 if samples else 0,
                min_p=chosen["min_p"] if samples else 0.0,
                filter_order=_FILTERS,
                repetition_penalty=chosen["repetition_penalty"],
                max_tokens=most,
                min_tokens=least,
                stop_token_ids=stops,
                ignore_eos=True,  # the end tokens of this call alone
                seed=seed,
            )
            for seed in seeds
        ]

    def _stream(self, ids: Tensor, prompts: list[list[int]], params: list[SamplingParams], streamer: Any) -> list[int]:
        if len(prompts) > 1 or params[0].n > 1:
            raise ValueError("streamer takes one sequence: pass a batch of one")
        streamer.put(ids.cpu())
        done: list[int] = []
        for output in self.llm.stream(prompts, params):
            tokens = output.outputs[0].token_ids
            for token in tokens[len(done) :]:
                streamer.put(torch.tensor([token]))
            done = tokens
        streamer.end()
        return done


class _GenerateOptions:
    """What one call asks for: its keywords, over a GenerationConfig, over the model's."""

    def __init__(self, model_config: Any, call_config: Any, keywords: dict[str, Any]) -> None:
        known = set(model_config.to_dict()) | set(_DEFAULTS)
        if unknown := [k for k, v in keywords.items() if k not in known and v is not None]:
            raise ValueError(f"generate does not take {', '.join(unknown)} here")
        layers = [
            _given(keywords),
            _given(call_config.to_dict() if call_config else {}),
            _given(model_config.to_dict()),
        ]
        self._own_ends = _ids(model_config.eos_token_id)
        self._values = {k: v for layer in reversed(layers) for k, v in layer.items()}
        self._has_length = any(k in layer for layer in layers for k in ("max_length", "max_new_tokens"))
        for name, value in self._values.items():
            if name not in _OBEYED | _IRRELEVANT and not _is_neutral(name, value):
                neutral = f"{name}={_NEUTRAL.get(name)}"
                raise ValueError(f"generate cannot obey {name}={value}: pass {neutral} or use the model's own generate")

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, _DEFAULTS.get(name))

    @property
    def eos_token_ids(self) -> list[int]:
        return _ids(self["eos_token_id"])

    def stop_token_ids(self, vocab: int) -> list[int]:
        """The end tokens that can be drawn; one of the model's own that cannot is no mistake of the caller's."""
        kept = [i for i in self.eos_token_ids if 0 <= i < vocab or i not in self._own_ends]
        if bad := [i for i in kept if not 0 <= i < vocab]:
            raise ValueError(f"eos_token_id {bad[0]} is outside the vocabulary of {vocab} tokens")
        return kept

    @property
    def pad_token_id(self) -> int | None:
        """Of the configuration, else the first end token, as in transformers."""
        pad = self["pad_token_id"]
        return int(pad) if pad is not None else next(iter(self.eos_token_ids), None)

    def new_tokens(self, length: int, limit: int) -> tuple[int, int]:
        """(most, least) new tokens behind prompts that are ``length`` tokens long, padding included."""
        most = self["max_new_tokens"]
        if most is None:
            most = min(_DEFAULT_NEW_TOKENS, limit - length) if not self._has_length else self["max_length"] - length
        if most < 1:
            raise ValueError(f"prompts of {length} tokens leave no room for new ones: raise max_new_tokens")
        least = self["min_new_tokens"]
        if least is None:
            least = max((self["min_length"] or 0) - length, 0)
        return int(most), min(int(least), int(most))


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(i) for i in (value if isinstance(value, Sequence) else [value])]


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _is_neutral(name: str, value: Any) -> bool:
    return value is False or value == _NEUTRAL.get(name) or name.startswith("_")


def _mask(ids: Tensor, mask: Tensor | None, chosen: _GenerateOptions) -> Tensor:
    """[batch, length], 1 where a token counts. Raises ValueError unless prompts are padded on the left alone."""
    if mask is None:
        pad, mask = chosen["pad_token_id"], torch.ones_like(ids)
        if pad is not None and pad not in chosen.eos_token_ids:
            mask = ids.ne(pad).long()  # as transformers infers it
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} does not fit input_ids {list(ids.shape)}")
    if not bool((mask.long().diff(dim=1) >= 0).all() and mask[:, -1].all()):
        raise ValueError("attention_mask must be 0 on the left and 1 from there on: use padding_side='left'")
    return mask


def _assemble(prompts: Tensor, completions: list[list[int]], pad: int | None) -> Tensor:
    longest = max(map(len, completions))
    rows = [c + [pad or 0] * (longest - len(c)) for c in completions]
    return torch.cat([prompts, torch.tensor(rows, dtype=prompts.dtype, device=prompts.device)], dim=1)
