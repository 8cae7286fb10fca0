"""A server gets other numbers of workers while streams are open: each stream is what it would have been.

Covers: lamina/cli/operate/scale.py, lamina/server/operator_routes.py,
lamina/server/engine_client/operator_commands.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from fake import READY
from running import Running, alive, eventually
from test_recovering import BODY, health, texts

from lamina.cli.launch import main
from lamina.cli.operate.scale import as_flags
from lamina.config.flat_options import make_config
from lamina.config.option import MEASURED
from lamina.server.errors import ApiError
from lamina.server.operator_routes import scaled_config, sizes_of, workers_on_host

pytestmark = pytest.mark.timeout(300)
KEY = "the-operator"


@pytest.fixture(scope="module")
def scalable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("scaling") / "log"
    env = {"LAMINA_ADMIN_KEY": KEY, "LAMINA_API_KEY": "a-client"}
    flags = ("--memory-workers", "1", "--partition", "request", "--max-recoveries", "0")
    server = Running(log, *flags, env=env)
    yield server
    pids = server.descendants()
    server.kill()
    assert eventually(lambda: not alive(pids), 30), alive(pids)


@pytest.fixture
def client(scalable: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scalable.url, timeout=120, headers={"Authorization": "Bearer a-client"}) as http:
        yield http


def scale(server: Running, *flags: str, key: str = KEY) -> int:
    command = "drain" if {"--memory-worker", "--host"} & {*flags} else "scale"
    return main([command, server.url, *flags, "--admin-key", key])


def cordon(server: Running, *flags: str) -> int:
    return main(["cordon", server.url, "--admin-key", KEY, *flags])


def is_memory_worker(pid: int) -> bool:
    return b"lamina.workers.memory.main:" in Path(f"/proc/{pid}/cmdline").read_bytes()


def memory_workers(server: Running) -> int:
    return sum(map(is_memory_worker, server.descendants()))


@pytest.mark.long
def test_streams_go_on_with_more_and_fewer_memory_workers(
    scalable: Running, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(flags: tuple[str, ...]) -> dict[int, str]:
        lines, asking = [], None
        with client.stream("POST", "/v1/completions", json=BODY) as response:
            for line in response.iter_lines():
                lines.append(line)
                if flags and len(lines) == 40:
                    asking = threading.Thread(target=lambda: status.append(scale(scalable, *flags)))
                    asking.start()
        if asking is not None:
            asking.join(120)
        assert lines[-2:] == ["data: [DONE]", ""]
        return texts(lines)

    status = list[int]()
    wanted = stream(())
    assert stream(("--memory-workers", "2")) == wanted
    assert memory_workers(scalable) == 2
    assert cordon(scalable, "--memory-worker", "1") == 0
    assert cordon(scalable, "--memory-worker", "0") == 2, "some must begin somewhere"
    assert stream(("--memory-worker", "0")) == wanted
    assert stream(("--memory-workers", "3")) == wanted
    assert memory_workers(scalable) == 2, "sequences would move to it"
    assert cordon(scalable, "--memory-worker", "1", "--undo") == 0
    first = min(p for p in scalable.descendants() if is_memory_worker(p))
    assert stream(("--memory-worker", "0")) == wanted
    assert memory_workers(scalable) == 1
    assert eventually(lambda: not alive([first]), 30), "the one that was named goes"
    assert status == [0, 2, 2, 0]
    said, refused = capsys.readouterr()
    assert "no new sequence begins on memory worker 1\nsequences begin on all memory workers\n" in said
    assert "memory worker 0 is the last one on which sequences begin" in refused
    assert refused.count("memory worker 1 is cordoned, and sequences would move to it: undo that first") == 2
    assert "--memory-workers 1 -> --memory-workers 2; streams paused for" in said
    assert "memory worker 0 has gone, 1 left; streams paused for" in said
    assert eventually(lambda: health(client) == (200, "ok"), 60)
    metrics = client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert metrics.status_code == 200


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (["--tensor-parallel-size", "3"], KEY, "--tensor-parallel-size 2 or more does not go with --memory-workers 1"),
        (["--memory-workers", "0"], KEY, "--memory-workers must be at least 1, not 0"),
        (["--memory-worker", "0"], KEY, "--memory-worker 0: there is no other memory worker, so it cannot go"),
        (["--memory-worker", "1"], KEY, "--memory-worker 1: there is no other memory worker"),
        (["--host", "10.0.0.9"], KEY, "--host 10.0.0.9: no worker is there; they are on localhost"),
        (["--host", "localhost"], KEY, "--host localhost: compute-0 is there, too"),
        (["--host", "x", "--memory-worker", "0"], KEY, "--host does not go with --memory-worker, because "),
        (["--memory-worker", "0", "--undo"], KEY, "--undo does not go with --memory-worker, because "),
        (["--host", "x", "--undo"], KEY, "--undo does not go with --host, because "),
        (["--memory-workers", "2"], "a-client", "the operator's key is another one: the server's LAMINA_ADMIN_KEY"),
        ([], KEY, "nothing is to change"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    scalable: Running, capsys: pytest.CaptureFixture[str], flags: list[str], key: str, words: str
) -> None:
    workers = sorted(scalable.descendants())
    assert scale(scalable, *flags, key=key) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert sorted(scalable.descendants()) == workers


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory-worker", "0"], "each memory worker has a part of every sequence"),
        (["--memory-worker", "1"], "memory worker 1: there are memory workers 0 to 0"),
        (["--memory-worker", "-1"], "--memory-worker -1: memory workers are counted from 0"),
    ],
)
def test_a_cordon_that_cannot_be_is_refused(
    scalable: Running, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert cordon(scalable, *flags) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "body",
    [{"on": False, "memory_worker": 0}, {"on": False, "host": "localhost"}, {"memory_worker": 0, "host": "localhost"}],
)
def test_a_drain_that_says_two_things_drains_nobody(scalable: Running, body: dict[str, object]) -> None:
    workers = sorted(scalable.descendants())
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{scalable.url}/drain", json=body, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert "name memory_worker or host, or on: only one of them" in answer.text
    assert sorted(scalable.descendants()) == workers


def test_a_host_is_left_by_its_memory_workers_alone() -> None:
    at = {"memory-0": "10.0.0.2", "memory-1": "10.0.0.3", "memory-2": "10.0.0.3", "compute-0": "10.0.0.2"}
    ready = msgspec.structs.replace(READY, hosts=at)
    assert workers_on_host(ready, "10.0.0.3") == [1, 2]
    with pytest.raises(ApiError, match="--host 10.0.0.2: compute-0 is there, too"):
        workers_on_host(ready, "10.0.0.2")
    with pytest.raises(ApiError, match=r"no worker is there; they are on 10.0.0.2, 10.0.0.3"):
        workers_on_host(ready, "10.0.0.4")


def test_nobody_scales_without_the_operators_key(scalable: Running, client: httpx.Client) -> None:
    assert client.post("/scale", json={"memory_workers": 2}).status_code == 401
    assert httpx.post(f"{scalable.url}/scale", json={"memory_workers": 2}, timeout=30).status_code == 401
    assert client.post("/cordon", json={"memory_worker": 0}).status_code == 401


@pytest.mark.long
def test_a_drained_server_finishes_what_it_has_and_takes_nothing_new_until_that_is_undone(
    scalable: Running, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def drain(*flags: str) -> int:
        return main(["drain", scalable.url, "--admin-key", KEY, *flags])

    short = BODY | {"stream": False, "max_tokens": 2}
    with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 1000}) as response:
        lines = response.iter_lines()
        next(lines)
        assert drain("--timeout-s", "0.1") == 1
        assert "2 completions under way" in capsys.readouterr().out
        assert health(client) == (503, "draining")
        refused = client.post("/v1/completions", json=short)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert drain() == 0
    assert drain("--undo") == 0
    assert eventually(lambda: health(client) == (200, "ok"), 20)
    assert client.post("/v1/completions", json=short).status_code == 200
    assert client.post("/drain", json={}).status_code == 401


@pytest.mark.long
def test_who_says_how_many_batches_takes_the_place_of_a_plan() -> None:
    """Memory workers keep their measured parts; other numbers leave the plan as it is."""
    planned = make_config({"plan": "auto:3", "memory_workers": 2})
    assert as_flags(sizes_of(planned)) == (
        "--memory-workers 2, --prefill-workers 0, --tensor-parallel-size 1, --pipeline auto:3"
    )
    for n in (1, 2):
        told = scaled_config(planned, {"pipeline": n})
        assert (told.topology.plan, told.topology.pipeline, told.topology.memory_weights) == ("", n, MEASURED)
        assert sizes_of(told)["pipeline"] == n != sizes_of(planned)["pipeline"]
    more = scaled_config(planned, {"memory_workers": 4})
    assert (more.topology.plan, more.topology.memory_workers) == ("auto:3", 4)
    assert (
        scaled_config(make_config({}), {"pipeline": 2}).topology.memory_weights
        == make_config({}).topology.memory_weights
    )
