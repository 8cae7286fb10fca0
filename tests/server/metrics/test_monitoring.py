"""The Grafana board shows what the server exports, and Prometheus reads all of it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from running import ROOT, START_S, Running, eventually

pytestmark = pytest.mark.timeout(2 * START_S)  # starting a server on a busy machine takes its time
MONITORING = ROOT / "examples" / "monitoring"
BOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
NAME = re.compile(r"\b(?:lamina|http|process)[:_][a-z0-9_]+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"), "counter": ("_total",)}


@pytest.fixture(scope="module")
def text(http: httpx.Client) -> str:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True, "n": 2})
    told = eventually(lambda: "lamina:attention_wait_seconds_count" in http.get("/metrics").text, START_S)
    assert told, "all workers are asked for their counters each second, and have not answered"
    return http.get("/metrics").text


def queries() -> list[str]:
    return [t["expr"] for p in BOARD["panels"] for t in p["targets"]] + [BOARD["templating"]["list"][1]["definition"]]


def test_every_metric_of_the_board_is_exported(text: str) -> None:
    exported = {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in SUFFIXES.get(family.type, ("",))
    }
    shown = {name for query in queries() for name in NAME.findall(query)}
    assert shown - exported == set()
    assert len(shown) >= 15


def test_labels_of_the_board_exist(text: str) -> None:
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries():
        wanted = {w.strip() for group in re.findall(r"by \(([^)]*)\)", query) for w in group.split(",")}
        wanted |= set(re.findall(r"(\w+)=~?\"", query))
        for name in NAME.findall(query):
            if name in labels:  # a counter of what has not happened has no labels yet
                assert wanted <= labels[name], query


def test_panels_do_not_overlap_and_each_has_its_own_id() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(places)) == len({p["id"] for p in BOARD["panels"]}) == len(places)


def test_histograms_are_well_formed(text: str) -> None:
    """Buckets rise, end with +Inf, and that one equals the count."""
    found = 0
    for family in text_string_to_metric_families(text):
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        counts = {}
        for s in family.samples if family.type == "histogram" else []:
            key = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
            if s.name.endswith("_bucket"):
                series.setdefault(key, []).append((float(s.labels["le"]), s.value))
            elif s.name.endswith("_count"):
                counts[key] = s.value
        for key, buckets in series.items():
            assert [b for b, _ in buckets] == sorted({b for b, _ in buckets})
            assert [n for _, n in buckets] == sorted(n for _, n in buckets)
            assert buckets[-1] == (math.inf, counts[key])
            found += 1
    assert found >= 12


def test_prometheus_scrapes_a_route_that_exists(server: Running, http: httpx.Client) -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert http.get(job["metrics_path"]).status_code == 200
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}], "the default of --host and --port"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing(text: str) -> None:
    """vLLM's names are kept where promtool would name them otherwise; those are listed here."""
    config = str(MONITORING / "prometheus.yml")
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True, timeout=60)
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    wanted = ("should not contain ':'", "kv_cache_usage_perc", "iteration_tokens_total")  # names that vLLM's boards use
    assert [x for x in run.stderr.splitlines() if x.strip() and not any(w in x for w in wanted)] == []


def test_every_query_is_promql(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    rules = [
        {"record": f"test:{i}", "expr": q.replace("$__rate_interval", "1m").replace("$model", "m")}
        for i, q in enumerate(queries())
        if not q.startswith("label_values")
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
