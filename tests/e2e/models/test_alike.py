"""Workers that found another model, as on a host whose files are others, are named before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import LLM
from lamina.executor.rendezvous import OF_THE_MODEL
from lamina.workers.compute.model_server import ModelServer

pytestmark = pytest.mark.usefixtures("no_child_left")
OTHER: dict[str, Any] = {
    "vocab_size": 321, "num_layers": 2, "max_model_len": 256, "dtype": "bfloat16", "eos_token_ids": [2],
}  # fmt: skip


@pytest.mark.long(but=["-compute worker--compute-1"])
@pytest.mark.parametrize(
    ("options", "role", "number", "label"),
    [
        ({"prefill_workers": 2}, "prefill worker", 1, "prefill-1"),
        ({"pipeline": 3}, "compute worker", 1, "compute-1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_one_that_differs_is_named(
    options: dict[str, Any], role: str, number: int, label: str, llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(OTHER) == set(OF_THE_MODEL)
    name, ready = "", ModelServer.ready_message

    def changed(self: ModelServer, *args: Any) -> Any:
        said = ready(self, *args)
        other = (self.role, self.start.replica) == (role, number)
        return msgspec.structs.replace(said, **{name: OTHER[name]}) if other else said

    monkeypatch.setattr(ModelServer, "ready_message", changed)
    for name in OTHER:
        with pytest.raises(ValueError, match=f"^{label} has another model than compute-0: {name} is .* every host"):
            LLM(str(llama_path), transport="loopback", **options)
