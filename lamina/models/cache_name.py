"""The name by which the installed transformers passes a KV cache."""

from __future__ import annotations

import functools
import inspect
import typing


@functools.cache
def cache_name() -> str:
    """Return the name of the KV cache among the arguments of a model's ``forward``, and the fields of its output.
    Releases use different names (``past_key_values`` up to 5.23, ``cache`` from 5.24), so it is found by its type.
    Raises ImportError, with the version, for a release whose outputs have no such field.
    """
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast

    for name, hint in typing.get_type_hints(CausalLMOutputWithPast).items():
        if transformers.Cache in (hint, *typing.get_args(hint)):
            return name
    raise ImportError(
        f"transformers {transformers.__version__} has no cache among the outputs of a causal LM: install a version "
        f"that pyproject.toml allows"
    )


def cache_argument(model: typing.Any) -> str:
    """Return the name by which the model's ``forward`` takes its KV cache. Code that comes with a model may have
    another one than the installed transformers.
    """
    takes = inspect.signature(model.forward).parameters
    return next((name for name in (cache_name(), "cache", "past_key_values") if name in takes), cache_name())
