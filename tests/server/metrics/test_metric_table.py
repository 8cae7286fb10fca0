"""docs/metrics.md lists what /metrics shows."""

from __future__ import annotations

from collections.abc import Iterator

from fake import FakeClient, make_service
from running import ROOT
from test_layers import ask

from lamina.server.engine_client.messages import EngineState
from lamina.server.metrics.metric_table import METRICS, full_name

PAGE = (ROOT / "docs" / "metrics.md").read_text()
ENDINGS = {"counter": "_total", "info": "_info"}  # of names in the text format


def rows() -> Iterator[str]:
    for name, spec in METRICS.items():
        shown = full_name(name) + ENDINGS.get(spec.kind, "")
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        yield f"| `{shown}` | {spec.kind} | {spec.unit} | {labels} | {spec.text} | {'yes' if spec.in_vllm else ''} |"


def test_the_page_lists_every_metric_and_no_other() -> None:
    wanted = list(rows())
    given = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert given == wanted, "docs/metrics.md differs from metric_table.py"


def test_no_name_and_no_sample_is_shown_twice() -> None:
    client = FakeClient()
    own = {family.name for family in make_service(FakeClient()).metrics.registry.collect()}
    engine = {n: s for n, s in METRICS.items() if s.kind in ("counter", "gauge") and full_name(n) not in own}
    values = {name: {"a": 1.0} if spec.labels else 1.0 for name, spec in engine.items() if len(spec.labels) < 2}
    shown_anyway = ("num_requests", "kv_cache_usage_perc", "engine_steps", "attention_message_bytes")
    kept = {name: value for name, value in values.items() if not name.startswith(shown_anyway)}
    client.state = EngineState(running=1, waiting=0, free_blocks=[48], steps=1, metrics=kept)
    client.counters = {"compute-0": {"steps": 1.0, "rows": 2.0, "wait_s": 0.5}}
    text = ask("GET", "/metrics", make_service(client, metrics_compat="vllm")).text
    heads = [tuple(line.split()[1:3]) for line in text.splitlines() if line.startswith("#")]
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(kept) > 30
    assert len(heads) == len(set(heads))
    assert len(samples) == len(set(samples))
