"""docs/metrics.md lists what /metrics shows, and old names are shown with new ones."""

from __future__ import annotations

from collections.abc import Iterator

from fake import FakeClient, make_service
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
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
    for name, spec in METRICS.items():
        if spec.old:
            total = "_total" * (spec.kind == "counter")
            yield f"| `lamina:{spec.old}{total}` | `{full_name(name)}{total}` |"


def test_the_page_lists_every_metric_and_no_other() -> None:
    wanted = list(rows())
    given = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert given == wanted, "docs/metrics.md differs from metric_table.py"


def test_a_renamed_metric_is_shown_under_both_names() -> None:
    client = FakeClient()
    client.state = EngineState(
        running=1,
        waiting=0,
        free_blocks=[48],
        steps=1,
        metrics={"kv_migrated_bytes": {"weigh": 7}, "prefill_replicated_pages": 3},
    )
    text = ask("GET", "/metrics", make_service(client)).text
    labels = 'engine="0",model_name="tiny"'
    for name in ("kv_migrated_bytes_total", "moved_bytes_total"):
        assert f'lamina:{name}{{{labels},reason="weigh"}} 7.0' in text
    for name in ("prefill_replicated_pages", "kv_replicas"):
        assert f"lamina:{name}{{{labels}}} 3.0" in text
    helps = {family.name: family.documentation for family in text_string_to_metric_families(text)}
    assert helps["lamina:kv_replicas"] == "old name of lamina:prefill_replicated_pages"


def test_layers_of_sparse_kv_have_their_old_label_under_the_old_name() -> None:
    client = FakeClient()
    client.ready = structs.replace(client.ready, sparse=[True])
    text = ask("GET", "/metrics", make_service(client)).text
    assert 'lamina:kv_sparse_blocks_in_use{engine="0",layers="sparse",model_name="tiny"} 16.0' in text
    assert 'lamina:kv_kept_blocks{engine="0",model_name="tiny",tier="sparse"} 16.0' in text


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
    old = {
        f"lamina:{spec.old}" + ENDINGS.get(spec.kind, "") for name, spec in METRICS.items() if name in kept and spec.old
    }
    assert old <= {sample.partition("{")[0] for sample in samples}
