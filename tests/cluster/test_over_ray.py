"""Workers on the nodes of a Ray cluster: the same tokens, and every loss is reported soon and leaves nothing.

Covers: lamina/executor/launchers/ray_agent.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cluster import ROOT, FakeCluster
from running import Running, eventually

from lamina import LLM, SamplingParams
from lamina.config.flat_options import make_config
from lamina.executor.hosts import ray_cluster
from lamina.executor.hosts.worker_placement import HostAssignment
from lamina.executor.launchers import ray as over_ray
from lamina.executor.launchers.ray import RayLauncher, RayWorker, open_launcher
from lamina.executor.memory_worker_slots import ResizeNeedsRestartError
from lamina.protocol.executor import WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
PROMPTS = ["def f(", "import os\n", "class Stack:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
NODES = ({}, {"resources": {"lamina_compute": 2, "lamina_memory": 1}}, {"resources": {"lamina_memory": 1}})
OPTIONS = {"dtype": "float32", "memory_workers": 2, "placement": "spread"}
EXACT = (
    "--deterministic",
    "--dtype",
    "float32",
)  # KV that is built again in bf16 is another one on some CPUs


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    pytest.importorskip("ray")
    made = FakeCluster(tmp_path_factory.mktemp("ray"), *NODES)
    yield made
    made.close()


@pytest.fixture
def cluster(shared: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    for name, value in shared.environment.items():
        monkeypatch.setenv(name, value)
    return shared


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.no_retry
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tokens_are_those_of_the_local_launcher(cluster: FakeCluster, transport: str) -> None:
    options = {**OPTIONS, "pipeline": 3, "deterministic": True, "transport": transport}
    with LLM(MODEL, **options) as llm:
        here = tokens(llm)
    with LLM(MODEL, ray_address=cluster.address, **options) as llm:
        wardens = {name: parent(pid) for name, pid in llm.pools.pids.items()}
        assert len({*wardens.values(), os.getpid()}) == 5
        assert tokens(llm) == here
        assert llm.stats()["memory-1"]["steps"] > 0
        pids = [*llm.pools.pids.values(), *wardens.values()]
    assert eventually(lambda: all(gone(pid) for pid in pids), 10.0)


def test_prompts_on_a_worker_of_their_own(cluster: FakeCluster) -> None:
    options = {**OPTIONS, "prefill_workers": 1}
    with LLM(MODEL, **options) as llm:
        here = tokens(llm)
    with LLM(MODEL, ray_address=cluster.address, **options) as llm:
        assert tokens(llm) == here


def test_the_status_of_a_cluster_says_which_process_has_workers_there(
    cluster: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    status = [sys.executable, "-m", "lamina", "cluster", "status", cluster.address]
    driver = f"the process {socket.gethostname()}:{os.getpid()} runs compute-0, memory-0, memory-1"
    with LLM(MODEL, ray_address=cluster.address, **OPTIONS):
        assert driver in subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = lambda: subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: E731
    assert eventually(lambda: "no process runs workers here" in found(), 20.0)


@pytest.mark.parametrize("whom", ["worker", "warden"])
def test_a_loss_is_told_within_five_seconds(cluster: FakeCluster, whom: str) -> None:
    llm = LLM(MODEL, ray_address=cluster.address, max_recoveries=0, **OPTIONS)
    pids = llm.pools.pids
    stream = llm.stream(PROMPTS[:1], LONG)
    next(stream)
    os.kill(pids["memory-1"] if whom == "worker" else parent(pids["memory-1"]), signal.SIGKILL)
    start = time.monotonic()
    words = "was killed by SIGKILL" if whom == "worker" else "is lost"
    with pytest.raises(WorkerError, match=rf"memory worker 1 .* on [\d.]+ {words}"):
        for _ in stream:
            pass
    assert time.monotonic() - start < 5.0
    assert eventually(lambda: all(gone(pid) for pid in pids.values()), 10.0)


def test_a_worker_that_is_lost_is_replaced_on_its_host(cluster: FakeCluster) -> None:
    """And one whose warden is; streams get what they would have got."""
    with LLM(MODEL, ray_address=cluster.address, deterministic=True, **OPTIONS) as llm:
        wanted = tokens(llm)
        for victim in ("memory-1", "compute-0"):
            for whom in ("worker", "warden"):
                pids, outputs, hit = llm.pools.pids, {}, False
                with llm.stream(PROMPTS, GREEDY) as stream:
                    for output in stream:
                        outputs[output.request_id] = output.outputs[0].token_ids
                        if not hit:
                            os.kill(pids[victim] if whom == "worker" else parent(pids[victim]), signal.SIGKILL)
                            hit = True
                    assert [outputs[i] for i in stream.request_ids] == wanted
                assert [name for name, pid in llm.pools.pids.items() if pid != pids[name]] == [victim]
        last = llm.pools.pids
    assert eventually(lambda: all(gone(pid) for pid in last.values()), 10.0)


def test_one_that_stands_still_is_replaced_long_before_a_step_is_late(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(MODEL, ray_address=cluster.address, deterministic=True, step_timeout_s=200.0, **OPTIONS) as llm:
        wanted = tokens(llm)
        for victim in ("memory-1", "compute-0"):
            pids, outputs = llm.pools.pids, dict[int, list[int]]()
            caplog.clear()
            with llm.stream(PROMPTS, GREEDY) as stream:
                for output in stream:
                    if not outputs:
                        os.kill(pids[victim], signal.SIGSTOP)
                        stopped_at = time.time()
                    outputs[output.request_id] = output.outputs[0].token_ids
                assert [outputs[i] for i in stream.request_ids] == wanted
            (noticed,) = (r.created for r in caplog.records if "has been stopped for 1.75 s" in r.getMessage())
            print(f"{victim}: noticed after {noticed - stopped_at:.2f} s")
            assert [name for name, pid in llm.pools.pids.items() if pid != pids[name]] == [victim]
            assert eventually(lambda pid=pids[victim]: gone(pid), 10.0)


def test_a_memory_worker_leaves_and_who_stays_has_its_place_still(cluster: FakeCluster) -> None:
    """Its KV moves from node to node, streams go on, and a later lost worker is replaced where it was."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with LLM(MODEL, ray_address=cluster.address, kv_memory="32MiB", partition="request", **OPTIONS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        elastic, outputs, before = llm.pools.resizer, dict[int, list[int]](), llm.pools.pids
        with llm.stream(PROMPTS, params) as stream:
            for output in stream:
                outputs[output.request_id] = output.outputs[0].token_ids
                if len(llm.pools.registry.memory) == 2 and not elastic.is_preparing and len(outputs) == len(PROMPTS):
                    with suppress(ValueError):  # it is under way already
                        elastic.begin(elastic.plan(1), [0])
            assert [outputs[i] for i in stream.request_ids] == wanted
        outcome = elastic.take_outcome()
        assert outcome is not None
        assert (outcome.error, outcome.moved_bytes > 0) == ("", True)
        assert {name: pid for name, pid in llm.pools.pids.items() if name.startswith("memory")} == {
            "memory-0": before["memory-1"]
        }
        place = llm.pools.registry.memory[0].handle.host
        os.kill(before["memory-1"], signal.SIGKILL)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == wanted
        assert llm.pools.registry.memory[0].handle.host == place
        with pytest.raises(ResizeNeedsRestartError):
            elastic.begin(elastic.plan(2))
        assert eventually(lambda: gone(before["memory-0"]), 10.0)


def test_where_a_node_is_gone_its_worker_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams get what they would have got; where no other node has room, the run ends with a line that says so."""
    pytest.importorskip("ray")
    compute, memory = {"resources": {"lamina_compute": 1, "lamina_memory": 1}}, {"resources": {"lamina_memory": 1}}
    cluster = FakeCluster(tmp_path, {}, compute, memory)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    try:
        with LLM(MODEL, ray_address=cluster.address, kv_memory="32MiB", transport="tcp", **OPTIONS) as llm:
            wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
            cluster.add(**memory)
            before = llm.pools.pids
            outputs: dict[int, list[int]] = {}
            with llm.stream(PROMPTS, params) as stream:
                for output in stream:
                    if not outputs:
                        cluster.remove(2)
                        assert eventually(lambda: any(gone(pid) for pid in before.values()), 30.0)
                    outputs[output.request_id] = output.outputs[0].token_ids
                assert [outputs[i] for i in stream.request_ids] == wanted
            (moved,) = [name for name, pid in llm.pools.pids.items() if pid != before[name]]
            assert f"is lost: {moved.replace('-', ' worker ')} goes to" in caplog.text
            there = llm.pools.pids[moved]
            cluster.remove(3)
            assert eventually(lambda: gone(there), 30.0)
            with pytest.raises(WorkerError, match="could not be replaced: .* is lost, and memory worker . was there"):
                llm.generate(PROMPTS, LONG)
    finally:
        cluster.close()


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spares_of(llm: LLM, count: int) -> dict[str, int]:
    """The processes of its spares by their roles, once there are so many, and no other one of them comes up."""
    spares: Callable[[], dict[str, int]] = lambda: {  # noqa: E731
        m.handle.role: m.handle.pid for m in llm.pools.workers.spare_workers
    }
    assert eventually(lambda: llm.engine.check_workers() == [] and len(spares()) == count, 60.0)
    return spares()


@pytest.mark.timeout(900)
def test_spares_take_the_places_of_lost_workers_and_have_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On nodes of their kind; where a node is gone and no other one has room, there are fewer, and all goes on."""
    ray = pytest.importorskip("ray")
    numbers, pool = range(1, 3), 96 << 20
    memory = [{"resources": {"lamina_memory": 1, f"node-{number}": 1}} for number in numbers]
    cluster = FakeCluster(tmp_path, {"resources": {"lamina_compute": 2, "lamina_memory": 1}}, *memory)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    options = {**OPTIONS, "kv_memory": "96MiB", "transport": "tcp", "spare_memory": 1, "spare_compute": 1}
    try:
        with LLM(MODEL, ray_address=cluster.address, deterministic=True, **options) as llm:
            wanted, launcher = tokens(llm), llm.pools.workers.launcher
            assert isinstance(launcher, RayLauncher)
            hosts = {
                launcher.spares["memory"][0].assignment.host.name,
                *(p.host.name for p in launcher.assignments["memory"]),
            }
            assert len(hosts) == 3, "one on each node that has room for a memory worker"
            for victim in ("memory-1", "compute-0", "memory-1"):
                role, before, spares = victim.partition("-")[0], llm.pools.pids, spares_of(llm, 2)
                assert not {*spares.values()} & {*before.values()}
                assert eventually(lambda pid=spares["memory"]: resident(pid) > pool, 60.0), "its pages are not there"
                with llm.stream(PROMPTS, GREEDY) as stream:
                    outputs = dict[int, list[int]]()
                    for output in stream:
                        if not outputs:
                            os.kill(before[victim], signal.SIGKILL)
                        outputs[output.request_id] = output.outputs[0].token_ids
                    assert [outputs[i] for i in stream.request_ids] == wanted
                assert llm.pools.pids[victim] == spares[role]
                assert [name for name, pid in llm.pools.pids.items() if pid != before[name]] == [victim]
            spares, last = spares_of(llm, 2), launcher.assignments["memory"][1].host
            cluster.remove(next(number for number in numbers if f"node-{number}" in last.resources))
            assert eventually(lambda: not any(host.name == last.name for host in ray_cluster.hosts_of(ray)), 60.0)
            assert tokens(llm) == wanted
            assert llm.pools.pids["memory-1"] == spares["memory"]
            assert "there are fewer spare workers than configured" in caplog.text
            assert [*spares_of(llm, 1)] == ["compute"]
            assert tokens(llm) == wanted
            pids = [*llm.pools.pids.values(), *spares.values()]
        assert eventually(lambda: all(gone(pid) for pid in pids), 10.0)
    finally:
        cluster.close()


def test_a_servers_engine_is_replaced_too(cluster: FakeCluster, tmp_path: Path) -> None:
    """Its wardens go with it; another one finds room for its own."""
    body = {"prompt": "def f(", "max_tokens": 120, "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": 5}
    flags = ("--cluster", cluster.spread(), "--memory-workers", "2", *EXACT)
    server = Running(tmp_path / "server", *flags, env=cluster.environment, fresh=True)

    def told(http: httpx.Client, *, hit: bool) -> str:
        lines: list[str] = []
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if hit and len(lines) == 40:
                    os.kill(engine_of(server), signal.SIGKILL)
        assert "data: [DONE]" in lines
        events = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        return "".join(choice["text"] for event in events for choice in event["choices"])

    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            wanted = told(http, hit=False)
            assert told(http, hit=True) == wanted
            assert eventually(lambda: http.get("/health").status_code == 200, 30)
    finally:
        server.kill()


# Nodes of which the last one goes, flags of the server, those that it goes on with; modules of workers, and how many.
STAYS_AWAY: dict[str, tuple[tuple[dict[str, Any], ...], tuple[str, ...], str, dict[bytes, int]]] = {
    "memory": (
        NODES, ("--memory-workers", "2"), "--memory-workers 1",
        {b"lamina.workers.memory.main": 1},
    ),
    "prefill": (  # both replicas are where there is room for both
        ({}, {"resources": {"lamina_compute": 2, "lamina_memory": 1}}, {"resources": {"lamina_compute": 1}}),
        ("--memory-workers", "1", "--prefill-workers", "1", "--pipeline", "3"), "--prefill-workers 0",
        {b"lamina.workers.compute.main": 2, b"lamina.workers.prefill": 0},
    ),
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", STAYS_AWAY)
def test_a_server_goes_on_with_fewer_workers_where_a_node_stays_away(role: str, tmp_path: Path) -> None:
    """No other node has room: another engine has those that are left, and all streams go on there."""
    pytest.importorskip("ray")
    nodes, more, words, left = STAYS_AWAY[role]
    cluster, server = FakeCluster(tmp_path, *nodes), None
    body = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0.0}
    flags = ("--cluster", cluster.spread() if role == "memory" else cluster.address, *more, *EXACT)
    try:
        server = Running(
            tmp_path / "server", *flags, "--kv-cache-memory-bytes", "32MiB", env=cluster.environment, fresh=True
        )
        with httpx.Client(base_url=server.url, timeout=150) as http:

            def told(*, hit: bool) -> str:
                lines = list[str]()
                with http.stream("POST", "/v1/completions", json=body) as response:
                    for line in response.iter_lines():
                        lines.append(line)
                        if hit and len(lines) == 40:
                            cluster.remove(2)
                assert "data: [DONE]" in lines
                events = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
                return "".join(choice["text"] for event in events for choice in event["choices"])

            wanted = told(hit=False)
            assert told(hit=True) == wanted
            assert http.get("/health").status_code == 200
            assert told(hit=False) == wanted
        assert f"the server continues with {words}" in server.log.read_text()
        commands = [Path(f"/proc/{p}/cmdline").read_bytes() for p in workers_of(server)]
        assert {module: sum(module in command for command in commands) for module in left} == left
    finally:
        if server is not None:
            server.kill()
        cluster.close()


def workers_of(server: Running) -> list[int]:
    """Processes whose key is that of its engine: they are children of Ray's."""
    log = server.log.read_text()
    met = [line for line in log.splitlines() if "is pid" in line][-1]
    return [int(word.strip(",")) for word, before in zip(met.split()[1:], met.split(), strict=False) if before == "pid"]


def engine_of(server: Running) -> int:
    words = b"lamina.server.engine_client.engine_process:"
    return next(p for p in server.descendants() if words in Path(f"/proc/{p}/cmdline").read_bytes())


DRIVER = """
import sys
from lamina import LLM, SamplingParams
from lamina.executor.launchers.ray import RayWorker, open_launcher
from lamina.config.flat_options import make_config
llm = LLM(sys.argv[1], ray_address=sys.argv[2], dtype="float32", memory_workers=2)
print(*llm.pools.pids.values(), flush=True)
for _ in range(1000):
    llm.generate(["def f("], SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
"""


@pytest.mark.no_retry
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_driver_dies(cluster: FakeCluster, how: signal.Signals) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, MODEL, cluster.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert driver.stdout is not None
        assert select.select([driver.stdout], [], [], 120)[0]
        workers = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(workers) == 3
        pids = [*workers, *(parent(pid) for pid in workers)]
        driver.send_signal(how)
        driver.wait(20)
        assert eventually(lambda: all(gone(pid) for pid in pids), 10.0), "processes outlive their driver"
    finally:
        driver.kill()
        driver.wait()


def opened(cluster: FakeCluster, roles: dict[str, int], **options: Any) -> RayLauncher:
    config = make_config({"ray_address": cluster.address, "transport": "tcp", "kv_memory": "8MiB", **options})
    return open_launcher(config, os.urandom(32), roles)


def test_two_starts_at_once_share_no_slot(cluster: FakeCluster) -> None:
    """Both look before either has reserved anything, and both find the same place the best; Ray gives it to one."""
    ready, find_places = threading.Barrier(2), over_ray.find_places
    looks = list[str]()

    def look(ray: Any, *asked: Any) -> dict[str, list[HostAssignment]]:
        found = find_places(ray, *asked)
        looks.append(found["memory"][0].host.name)
        if len(looks) <= 2:
            ready.wait(30)
        return found

    launchers, workers = list[RayLauncher](), list[RayWorker]()
    with ray_cluster.joined(cluster.address), pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_ray, "find_places", look)
        try:
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(opened, cluster, {"memory": 1, "compute": 1}, memory_workers=1) for _ in range(2)]
                launchers += [call.result() for call in calls]
            assert looks[0] == looks[1]
            assert len({launcher.assignments["memory"][0].host.name for launcher in launchers}) == 2
            workers += [launcher.start(role, 0) for launcher in launchers for role in ("memory", "compute")]
            with pytest.raises(
                ValueError, match="1 memory workers do not fit|no host of the cluster has lamina_memory"
            ):
                opened(cluster, {"memory": 1, "compute": 0}, memory_workers=1)
        finally:
            for worker in workers:
                worker.sock.close()
                worker.join(5.0)
            for launcher in launchers:
                launcher.close()
        opened(cluster, {"memory": 2, "compute": 2}).close()  # all is free again


def test_an_autoscaler_sees_what_a_start_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    cluster = FakeCluster(tmp_path, {}, {"resources": {"lamina_memory": 1}, "labels": {"tier": "fast"}})
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    try:
        with ray_cluster.joined(cluster.address) as ray, ThreadPoolExecutor(1) as pool:
            ask = {"memory": 2, "compute": 0}
            with pytest.raises(ValueError, match=r"room for 1 .*; no host has come in 0.5 s \(--ray-wait-s\)"):
                opened(cluster, ask, ray_wait_s=0.5)
            start = pool.submit(opened, cluster, ask, ray_wait_s=120.0)
            groups: Callable[[], list[Any]] = lambda: [  # noqa: E731
                g for g in ray.util.placement_group_table().values() if g["state"] == "PENDING"
            ]
            assert eventually(lambda: len(groups()) == 1, 30.0)
            assert list(groups()[0]["bundles"].values()) == [{"lamina_memory": 1.0}] * 2
            cluster.add(resources={"lamina_memory": 1})
            launcher = start.result(60)
            assert len({place.host.name for place in launcher.assignments["memory"]}) == 2
            launcher.close()
    finally:
        cluster.close()


def test_each_worker_reserves_a_gpu_and_sees_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs exist only in Ray's count, and no worker looks for its own yet."""
    pytest.importorskip("ray")
    cluster = FakeCluster(tmp_path, {}, {"num_gpus": 2, "resources": {"lamina_compute": 2, "lamina_memory": 2}})
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = make_config({"ray_address": cluster.address, "compute_device": "cuda", "memory_device": "cuda"})
    launcher, workers = None, list[RayWorker]()
    try:
        launcher = open_launcher(config, os.urandom(32), {"compute": 1, "memory": 1})
        workers = [launcher.start(role, 0) for role in ("compute", "memory")]
        environments = [Path(f"/proc/{w.pid}/environ").read_bytes().split(b"\0") for w in workers]
        seen = [
            e.removeprefix(b"CUDA_VISIBLE_DEVICES=") for one in environments for e in one if e.startswith(b"CUDA_V")
        ]
        assert sorted(seen) == [b"0", b"1"]
        with pytest.raises(ValueError, match="a GPU each do not fit"):
            open_launcher(config, os.urandom(32), {"compute": 1})
    finally:
        for worker in workers:
            worker.sock.close()
            worker.join(5.0)
        if launcher is not None:
            launcher.close()
        cluster.close()


def test_health_tells_of_a_node_that_is_gone(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, *NODES)
    server = None
    try:
        flags = ("--cluster", cluster.spread(), "--memory-workers", "2")
        server = Running(tmp_path / "server", *flags, env=cluster.environment, fresh=True)
        answers: Callable[[], int] = lambda: httpx.get(f"{server.url}/health", timeout=10).status_code  # noqa: E731
        assert answers() == 200
        cluster.remove(2)
        start = time.monotonic()
        assert eventually(lambda: answers() == 503, 5.0), time.monotonic() - start
        assert "memory worker 1" in httpx.get(f"{server.url}/health", timeout=10).text + server.log.read_text()
    finally:
        if server is not None:
            server.kill()
        cluster.close()
