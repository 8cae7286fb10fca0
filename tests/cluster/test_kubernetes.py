"""The Kubernetes example: its schema, what it says of the product, and its pods run as processes of this host."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from running import eventually

from lamina.cli.launch import main
from lamina.config.engine_config import Deadlines, EngineConfig
from lamina.env import VARIABLES
from lamina.server.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "kubernetes" / "lamina.yaml"
OBJECTS = [found for found in yaml.safe_load_all(FILE.read_text()) if found]
SERVICES = {found["metadata"]["name"]: found["spec"] for found in OBJECTS if found["kind"] == "Service"}
DEPLOYMENTS = {found["metadata"]["name"]: found["spec"] for found in OBJECTS if found["kind"] == "Deployment"}
DRIVER, COMPUTE, MEMORY = (DEPLOYMENTS[f"lamina-{name}"] for name in ("driver", "compute", "memory"))
SECRETS = {"cluster-key": bytes(range(32)).hex(), "api-key": "k" * 32}
POD_IP = "127.0.0.5"
VALIDATOR = "kubernetes-validate>=1.34"
START_S = 90.0


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def flag(name: str, deployment: dict[str, Any] = DRIVER) -> str:
    words = container(deployment)["args"]
    found: str = words[words.index(name) + 1]
    return found


def test_all_kinds_are_there() -> None:
    assert sorted(found["kind"] for found in OBJECTS) == ["Deployment"] * 3 + ["Service"] * 2


def test_numbers_and_names_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """Workers with what the driver waits for, ports with those of their services, labels with selectors."""
    counts = EngineConfig().topology.num_workers | {"memory": int(flag("--memory-workers"))}
    assert {"memory": MEMORY["replicas"], "compute": COMPUTE["replicas"], "prefill": 0} == counts
    ports = {port["name"]: port["containerPort"] for port in container(DRIVER)["ports"]}
    assert ports == {"http": ServerConfig().port, "control": 7000}
    for service, port in (("lamina", "http"), ("lamina-driver", "control")):
        assert SERVICES[service]["selector"] == DRIVER["template"]["metadata"]["labels"]
        assert [(p["name"], p["port"], p["targetPort"]) for p in SERVICES[service]["ports"]] == [
            (port, ports[port], port)
        ]
    assert SERVICES["lamina-driver"]["clusterIP"] == "None"
    assert SERVICES["lamina-driver"]["publishNotReadyAddresses"] is True
    for deployment in DEPLOYMENTS.values():
        assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    for deployment in (COMPUTE, MEMORY):
        assert flag("--driver", deployment) == f"tiny-lm@lamina-driver:{ports['control']}"
    assert flag("--driver") == f"tiny-lm@$(POD_IP):{ports['control']}"


def test_the_product_knows_what_it_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", SECRETS["cluster-key"])
    monkeypatch.delenv("LAMINA_CLUSTER_KEY_FILE", raising=False)
    for deployment in DEPLOYMENTS.values():
        words = [word.replace("$(POD_IP)", POD_IP) for word in container(deployment)["args"]]
        assert main([*words, "--dry-run", *(["--port", "0"] if words[0] == "serve" else [])]) == 0
        given = {variable["name"] for variable in container(deployment)["env"]} - {"POD_IP"}
        assert given <= set(VARIABLES)
        assert "LAMINA_CLUSTER_KEY" in given
    assert "would start 1 compute worker and 2 memory workers by hand over auto" in capsys.readouterr().out


def test_a_pod_has_the_time_that_its_server_has() -> None:
    probe, grace = container(DRIVER)["startupProbe"], DRIVER["template"]["spec"]["terminationGracePeriodSeconds"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= Deadlines().start_timeout_s
    assert grace > ServerConfig().shutdown_timeout
    assert {p["httpGet"]["path"] for p in (probe, container(DRIVER)["readinessProbe"])} == {"/health"}


def test_no_pod_runs_as_root() -> None:
    for deployment in DEPLOYMENTS.values():
        assert deployment["template"]["spec"]["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_has_the_schema_of_kubernetes(tmp_path: Path) -> None:
    """A published validator checks it, in an environment of its own; PIP_ARGS passes options to pip."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True, timeout=120)
    pip = [str(tmp_path / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    made = subprocess.run([*pip, *more, VALIDATOR], capture_output=True, text=True, timeout=600, check=False)
    if made.returncode:
        pytest.skip(f"{VALIDATOR} cannot be installed: {made.stderr.strip()[-300:]}")
    bad = tmp_path / "bad.yaml"
    bad.write_text(FILE.read_text().replace("targetPort: http", "targetport: http"))
    for file, good in ((FILE, True), (bad, False)):
        validate = [str(tmp_path / "bin" / "kubernetes-validate"), "--strict", "-k", "1.34", str(file)]
        done = subprocess.run(validate, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode == 0) == good, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(" passed for ") == len(OBJECTS) - (0 if good else 1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_pods_meet_and_serve(tmp_path: Path) -> None:
    """They run as processes: with a pod's words and variables, and an address where Kubernetes would answer
    for a name.
    """
    control, http = free_port(), free_port()

    def pod(deployment: dict[str, Any], number: int) -> subprocess.Popen[bytes]:
        words = list[str]()
        for word in container(deployment)["args"]:
            word = word.replace("$(POD_IP)", POD_IP).replace("lamina-driver", POD_IP)
            words.append(word.replace(":7000", f":{control}"))
        if words[0] == "serve":
            words += ["--port", str(http)]
        secrets = {
            v["name"]: SECRETS[v["valueFrom"]["secretKeyRef"]["key"]]
            for v in container(deployment)["env"]
            if "secretKeyRef" in v["valueFrom"]
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LAMINA_")}
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **secrets}
        with (tmp_path / f"log-{words[0]}-{words[1].rpartition('/')[2]}-{number}").open("wb") as log:
            command = [sys.executable, "-m", "lamina.cli.launch", *words]
            return subprocess.Popen(command, cwd=ROOT, env={**kept, **own}, stdout=log, stderr=log)

    workers = [pod(d, i) for d in (MEMORY, COMPUTE) for i in range(d["replicas"])]  # before there is a driver
    driver = pod(DRIVER, 0)
    try:
        url, bearer = f"http://127.0.0.1:{http}", {"authorization": f"Bearer {SECRETS['api-key']}"}

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/health", headers={"host": "10.1.2.3:8000"}).status_code == 200  # as a kubelet
            except httpx.TransportError:
                return False

        logs = lambda: "\n".join(f"{f.name}: {f.read_text()}" for f in tmp_path.glob("log-*"))  # noqa: E731
        assert eventually(ready, START_S), logs()
        assert "# start 3 workers by hand" in logs()  # no user has to, but it is printed
        ask = {"model": "examples/tiny_lm/model", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=ask, headers=bearer, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code == 401
        driver.terminate()
        assert driver.wait(60) == 0, logs()
        assert [worker.wait(60) for worker in workers] == [0] * len(workers), logs()
    finally:
        for process in (driver, *workers):
            process.kill()
            process.wait()
