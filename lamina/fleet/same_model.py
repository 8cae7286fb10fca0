"""All workers that have the model must have the same one: the driver goes by what the first of them says."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.protocol.control import ComputeReady

# What is the same for every rank, replica and prefill worker; memory workers compare the layers that each one sends.
OF_THE_MODEL = ("vocab_size", "num_layers", "max_model_len", "dtype", "eos_token_ids")


def check_alike(readies: Mapping[str, ComputeReady]) -> None:
    """``readies``: by the workers' labels. Raises ValueError, naming two that differ and in what."""
    (first, wanted), *others = readies.items()
    for label, ready in others:
        found, known = (r.summary.get("attention") for r in (ready, wanted))
        if found != known:
            raise ValueError(
                f"memory workers of {label} attend with {found}, those of {first} with {known}: by --attention name "
                f"one that all hosts have, or build the native modules on each"
            )
        for name in OF_THE_MODEL:
            if (found := getattr(ready, name)) != (known := getattr(wanted, name)):
                raise ValueError(
                    f"{label} has another model than {first}: {name} is {found} there, not {known}: every host needs "
                    f"the same files of the model"
                )
