"""The model that ``wrap`` returns."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StopStringCriteria
from transformers.utils import ModelOutput

from lamina.api.llm import LLM
from lamina.models.cache_name import cache_name

from .generate_call import GenerateCall
from .sampling_mapping import assemble_output, sampling_params_of
from .stepwise_generate import generate_by_step
from .unsupported_arguments import check_arguments, check_prepared, generation_setting

# Attributes of the model that change nothing in it.
_READ = frozenset({
    "base_model_prefix", "buffers", "can_generate", "compute_transition_scores", "dtype", "get_input_embeddings",
    "get_memory_footprint", "get_output_embeddings", "hf_device_map", "input_modalities", "main_input_name",
    "name_or_path", "named_buffers", "named_modules", "named_parameters", "num_parameters", "output_modalities",
    "parameters", "save_pretrained", "state_dict", "training", "vocab_size", "warnings_issued",
})  # fmt: skip


@dataclass
class SplitOutput(ModelOutput):  # type: ignore[misc]
    """The fields of transformers' GenerateDecoderOnlyOutput without its KV cache, which is on the memory workers.

    ``sequences`` [rows, length]; ``scores`` and ``logits`` have a tensor [rows, vocabulary] fp32 for each step, after
    all processors and before them.
    """

    sequences: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    attentions: None = None
    hidden_states: None = None

    def __getattr__(self, name: str) -> object:
        if name in ("past_key_values", cache_name()):
            raise AttributeError(
                f"{name} is not here: the KV cache lies on the memory workers; pass the whole text again"
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def wrap(model: nn.Module, **options: Any) -> WrappedModel:
    """Start memory workers for ``model`` and return an object with its ``generate``.

    ``model`` is any causal LM that lamina serves. It computes in this process, with its own weights, and can still be
    used as before. ``options`` are those of ``lamina.LLM``: memory_workers=2, transport="shm", max_model_len=...

        with lamina.wrap(AutoModelForCausalLM.from_pretrained(path), memory_workers=2) as split:
            split.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=32)

    Raises ValueError for a model or an option that cannot be served.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes a model (AutoModelForCausalLM.from_pretrained), not {model!r}: or use lamina.LLM")
    if not hasattr(model, "generate"):
        raise ValueError(f"{type(model).__name__} has no generate to wrap: use lamina.LLM(model)")
    # Libraries decide by the name of a model's class.
    named = type(type(model).__name__, (WrappedModel,), {"__doc__": WrappedModel.__doc__})
    wrapped: WrappedModel = named(model, LLM(model, **{"generation_config": "none", **options}))
    return wrapped


class WrappedModel:
    """A wrapped model, made by ``wrap``. A context manager: worker processes live until ``close``. Threads take turns.

    It has the model's names that only read: ``dtype``, ``parameters()``, ``state_dict()``, ... The model itself is
    ``model``.
    """

    def __init__(self, model: nn.Module, llm: LLM) -> None:
        self.model: Any = model
        self.llm = llm
        self._turn = threading.RLock()  # the running call's thread has it; its processors may call ``generate``, too

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """The model's generation configuration: defaults of ``generate``, to be edited as usual."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.model.generation_config = config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def eval(self) -> WrappedModel:
        """Put the model into evaluation mode, as its own ``eval`` does; returns this object."""
        self.model.eval()
        return self

    def to(self, *args: Any, **kwargs: Any) -> WrappedModel:
        """Return this object if the model has that device and dtype. Raises ValueError for others: workers use the
        model as it is.
        """
        for asked in (*args, *(kwargs.get(name) for name in ("device", "dtype"))):
            dtype = isinstance(asked, torch.dtype)
            if (
                asked is not None
                and not isinstance(asked, bool)
                and (asked != self.model.dtype if dtype else torch.device(asked) != self.device)
            ):
                raise ValueError(
                    f"a wrapped model stays where it is, on {self.device} in {self.model.dtype}: close it, call "
                    f"model.to({asked!r}), and wrap the model again"
                )
        return self

    def close(self) -> None:
        """End the workers. Idempotent; the model stays usable."""
        self.llm.close()

    def __enter__(self) -> WrappedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: a wrapped model has no forward pass of its own."""
        raise ValueError("a wrapped model generates: call split.generate(...); for logits call split.model(...)")

    def __getattr__(self, name: str) -> Any:
        if name in _READ:
            return getattr(self.model, name)
        raise AttributeError(f"a wrapped model has no {name!r}: try split.model.{name}, of the model itself")

    def generate(self, *args: Any, **settings: Any) -> Any:
        """Continue ``input_ids`` [batch, length] int64 as transformers' ``generate`` does: arguments, defaults, errors
        and results are its own, and its processors and criteria run. docs/wrap.md lists unsupported arguments.

        Workers draw the tokens if they can. Otherwise this process chooses them, which takes longer: with processors
        and criteria, the caller's or of settings such as ``no_repeat_ngram_size``, with ``output_scores`` and
        ``output_logits``, and for streamers of several rows. The workers' draws are repeatable by
        ``torch.manual_seed``, but not equal to transformers' draws.

        Returns [batch * num_return_sequences, length + new] on the device of the input: prompts as given, then new
        tokens up to and with an end token, then padding. Raises ValueError for an unsupported argument, by its name.
        """
        if self.llm.pools.is_closed:
            raise ValueError("this wrapped model is closed: wrap the model again, or use split.model.generate(...)")
        arguments = inspect.signature(self.model.generate).bind(*args, **settings).arguments
        arguments |= arguments.pop("kwargs", {})
        configs = [arguments.get("generation_config"), self.model.generation_config]
        check_arguments(arguments, configs)
        own_hooks = any(
            arguments.get(name) for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
        )
        if _take_stop_strings(arguments, configs):
            own_hooks = True
        streamer = arguments.get("streamer")

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **inputs: Any,
        ) -> Any:
            mask = check_prepared(generation_config, inputs, input_ids, arguments)
            info = self.llm.engine.worker_info
            call = GenerateCall(
                input_ids, mask, logits_processor, stopping_criteria, generation_config, streamer,
                info.max_model_len, info.vocab_size, own_hooks,
            )  # fmt: skip
            return self._decode(call)

        with self._turn:
            return self.model.generate(**{**arguments, "custom_generate": decode})

    def _decode(self, call: GenerateCall) -> Any:
        params = sampling_params_of(call)
        if params is None:
            ids, scores, logits = generate_by_step(self.llm, call, (self, self.model))
        else:
            ids, scores, logits = assemble_output(call, self._draw(call, params)), None, None
        if call.streamer is not None:
            call.streamer.end()
        if call.config.return_dict_in_generate:
            return SplitOutput(sequences=ids, scores=scores, logits=logits)
        return ids

    def _draw(self, call: GenerateCall, params: list[Any]) -> list[list[int]]:
        if call.streamer is None:
            completions = [r.outputs[0] for r in self.llm.generate(call.prompts, params, use_tqdm=False)]
        else:
            completions = [self._stream(call, params)]
        if failed := next((c for c in completions if c.finish_reason == "error"), None):
            raise ValueError(f"generate ended early: {failed.stop_reason}")
        return [c.token_ids for c in completions]

    def _stream(self, call: GenerateCall, params: list[Any]) -> Any:
        done, output = 0, None
        for output in self.llm.stream(call.prompts, params):
            tokens = output.outputs[0].token_ids
            for token in tokens[done:]:
                call.streamer.put(torch.tensor([token]))
            done = len(tokens)
        assert output is not None
        return output.outputs[0]


def _take_stop_strings(arguments: dict[str, Any], configs: list[Any]) -> bool:
    """Make a criterion of stop strings, since transformers does not pass their tokenizer to a foreign decoding loop.
    Returns True if there are stop strings.
    """
    strings, tokenizer = generation_setting("stop_strings", arguments, configs), arguments.get("tokenizer")
    if strings is None or tokenizer is None:
        return False
    given = list(arguments.get("stopping_criteria") or [])
    if not any(type(c) is StopStringCriteria for c in given):
        given = [StopStringCriteria(tokenizer, strings), *given]
    arguments |= {"stopping_criteria": given, "stop_strings": None}
    return True
