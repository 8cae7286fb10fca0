"""What the launcher ``ray`` refuses of a host, without a cluster: wardens that answer from a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina import __version__
from lamina.fleet.launchers.ray import RayLauncher


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"version": "0.0.0", "auth": "token"}, f"10.0.0.3 has Lamina 0.0.0, this host has {__version__}: install the"),
        ({"version": __version__, "auth": ""}, "10.0.0.3: its Ray runs without tokens"),
    ],
)
def test_a_host_of_another_version_or_without_tokens_is_refused_by_name(answer: dict[str, Any], words: str) -> None:
    launcher, at = RayLauncher.__new__(RayLauncher), SimpleNamespace(host=SimpleNamespace(address="10.0.0.3", cores=4))
    launcher._used, launcher._incarnation, launcher._key = set(), "run", b"key"
    launcher.places = {"memory": [at]}  # type: ignore[list-item]
    launcher._wardens = {("memory", 0): SimpleNamespace(listen=SimpleNamespace(remote=lambda order: None))}
    launcher._ask = lambda who, reference: {"port": 1, **answer}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=words):
        launcher.start("memory", 0)
