"""The YAML of a cluster, plans and orders made from it, the token; nothing is started.

Covers: lamina/cli/cluster.py, lamina/executor/hosts/cluster_file.py, lamina/executor/hosts/ray_token.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lamina.cli.cluster import ray_arguments
from lamina.cli.launch import main
from lamina.config.flat_options import make_config
from lamina.executor.hosts import ray_cluster
from lamina.executor.hosts.cluster_file import head_address, is_local, read_cluster
from lamina.executor.hosts.ray_token import MODE, TOKEN, TOKEN_PATH, make_token, offer_token, read_token
from lamina.executor.launchers import open_launcher

ROOT = Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "examples" / "h100_h20.yaml")
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
DRY_RUN = ("--dry-run", "--port", "0")
ON_GPUS = ("--compute-device", "cuda", "--memory-device", "cuda")
LIKE_33B = {  # the paper's smallest model, four of its 60 layers
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 6656, "intermediate_size": 17920,
    "num_hidden_layers": 4, "num_attention_heads": 52, "num_key_value_heads": 52, "vocab_size": 32000,
    "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, text: str) -> str:
    (folder / "hosts.yaml").write_text(text)
    return str(folder / "hosts.yaml")


def test_the_papers_cluster() -> None:
    cluster = read_cluster(PAPER)
    assert cluster.head == "10.20.0.1:6379"
    assert [h.resources() for h in cluster.hosts] == [{"lamina_compute": 2}, {"lamina_memory": 4}, {"lamina_memory": 4}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a table"),
        ("hosts: []", "at least one host"),
        (
            "hosts: [{address: 10.0.0.1}]\nspeed: 1",
            "unknown entry speed; known: address, hosts, placement, port, python, ssh",
        ),
        ("hosts: [{compute: 1}]", "host 0: address must be an IP address or the name of a host, not None"),
        ("hosts: [{address: some name}]", "must be an IP address or the name of a host, not 'some name'"),
        ("hosts: [{address: -oProxyCommand=x}]", "or the name of a host, not '-oProxyCommand=x'"),
        ("hosts: [{address: 10.0.0.300}]", "or the name of a host, not '10.0.0.300'"),
        ("hosts: [{address: a..b}]", "or the name of a host, not 'a..b'"),
        ("hosts: [{address: NODE-1}, {address: node-1}]", "same address"),
        ("hosts: [{address: 0.0.0.0}]", "no host's own"),
        ("hosts: [{address: 10.0.0.1, memory: -1}]", "memory must be a whole number, not -1"),
        ("hosts: [{address: 10.0.0.1, memory: true}]", "memory must be a whole number, not True"),
        ("hosts: [{address: 10.0.0.1, gpu: 1}]", "unknown entry gpu"),
        ("hosts: [{address: 10.0.0.1, device: h1000}]", "device h1000 is not one of h100"),
        ("hosts: [{address: 10.0.0.1}, {address: 10.0.0.1}]", "same address"),
        ("hosts: [{address: 10.0.0.1}]\nssh: ssh", "ssh must be a list of words"),
        ("hosts: [{address: 10.0.0.1}]\nport: 70000", "port must be 1..65535"),
        ("hosts: [", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "up", write(tmp_path, text), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


NAMES = {
    "node-a": ["10.20.0.1"],
    "node-b.rack": ["fd00::2", "10.20.0.2"],
    "self": ["127.0.1.1"],
    "alias": ["10.20.0.1"],
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as a resolver does."""

    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        if name not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (ip, 0)) for ip in NAMES[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_hosts_may_have_names(names: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ssh goes to the name, Ray and channels to what it leads to from here."""
    file = write(
        tmp_path, "hosts: [{address: Node-A, compute: 1}, {address: node-b.rack, memory: 2}, {address: 10.0.0.3}]"
    )
    cluster = read_cluster(file).looked_up()
    assert cluster.head == head_address(file) == "10.20.0.1:6379"
    assert [(h.address, h.ip) for h in cluster.hosts] == [
        ("node-a", "10.20.0.1"), ("node-b.rack", "10.20.0.2"), ("10.0.0.3", "10.0.0.3"),
    ]  # fmt: skip
    for host in cluster.hosts:
        words = ray_arguments(cluster, host)
        assert words[words.index("--node-ip-address") + 1] == host.ip
    assert [h.address for h in cluster.planned()] == ["10.20.0.1", "10.20.0.2", "10.0.0.3"]
    assert main(["cluster", "up", file, "--dry-run"]) == 0  # no name is looked up for that
    assert "ConnectTimeout=10): ray start --address node-a:6379 --node-ip-address node-b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("[{address: nobody}]", "host 0: nobody cannot be looked up (Name or service not known): give a name"),
        ("[{address: node-a}, {address: alias}]", "node-a and alias are one host, 10.20.0.1: name it once"),
        ("[{address: node-a}, {address: 10.20.0.1}]", "node-a and 10.20.0.1 are one host"),
        ("[{address: node-a}, {address: self}]", "host 1: self is 127.0.1.1 here, which other hosts cannot reach"),
    ],
)
def test_names_that_lead_nowhere(
    hosts: str, words: str, names: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, f"hosts: {hosts}")
    assert main(["cluster", "status", file]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match=re.escape(words)):
        head_address(file)


def test_a_host_may_be_alone_with_itself(names: None, tmp_path: Path) -> None:
    assert read_cluster(write(tmp_path, "hosts: [{address: self}]")).looked_up().head == "127.0.1.1:6379"


@pytest.mark.parametrize(
    ("asked", "address"),
    [
        ("auto", "auto"),
        ("10.0.0.1", "10.0.0.1:6379"),
        ("head.example:7000", "head.example:7000"),
        ("fd00::1", "[fd00::1]:6379"),
        ("[fd00::1]:7000", "[fd00::1]:7000"),
        (PAPER, "10.20.0.1:6379"),
    ],
)
def test_addresses(asked: str, address: str) -> None:
    assert head_address(asked) == address


@pytest.mark.parametrize("asked", ["ray://10.0.0.1:10001", "host:port", "host:0"])
def test_no_addresses(asked: str) -> None:
    with pytest.raises(ValueError, match="--cluster"):
        head_address(asked)


def test_up_says_what_it_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", PAPER, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "3 hosts with room for 2 compute workers and 8 memory workers" in said
    assert "--head --port 6379 --dashboard-host 127.0.0.1" in said
    cluster = read_cluster(PAPER)
    for host in cluster.hosts:
        words = ray_arguments(cluster, host)
        assert words[words.index("--node-ip-address") + 1] == host.address
        assert json.loads(words[words.index("--resources") + 1]) == host.resources()


@pytest.mark.long
def test_the_papers_plan_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LIKE_33B))
    argv = ["serve", str(tmp_path), "--cluster", PAPER, "--kv-cache-memory-bytes", "80GiB", *DRY_RUN, *ON_GPUS]
    assert main(argv) == 0
    title, _, compute, *memory = capsys.readouterr().out.splitlines()
    assert "1 compute worker and 2 memory workers through Ray" in title
    assert compute.split()[:2] == ["compute-0", "10.20.0.1"]
    # 4 layers of 4 h^2 + 3 h f and two norms, embeddings twice, the last norm; 2 bytes each
    h, f = 6656, 17920
    weights = 2 * (4 * (4 * h * h + 3 * h * f + 2 * h) + 2 * 32000 * h + h)
    assert f"{weights / 1e9:.1f} GB of weights of 80 GB" in compute
    half = 2 * 2 * 4 * h / 2  # bytes of a token's K and V on each of two memory workers
    for line in memory[:2]:
        assert f"85.9 GB for KV of 96 GB: {int((80 << 30) / half)} tokens" in line
        assert "auto://10.20.0.2:0 from compute-*" in line


@pytest.mark.long
def test_the_plan_says_how_ranks_would_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = "placement: {compute_on: lamina_compute, memory_on: lamina_memory}\nhosts:\n" + "".join(
        f"  - {{address: 10.20.0.{i}, compute: {n}, memory: 4, cores: 4}}\n" for i, n in ((1, 3), (2, 1))
    )
    ask = [
        "serve",
        MODEL,
        "--cluster",
        write(tmp_path, hosts),
        "--kv-cache-memory-bytes",
        "8MiB",
        *DRY_RUN,
        "--pipeline",
    ]
    ask += ["3", "--tensor-parallel-size", "2"]

    def lines(*flags: str) -> list[str]:
        assert main([*ask, *flags]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "--collective" in line]

    assert lines() == ["--collective auto: ranks would meet over mesh: not every rank computes on a GPU"]
    assert lines("--collective", "mesh") == ["--collective mesh: ranks would meet over mesh: as asked"]
    assert main([*ask, "--collective", "nccl"]) == 2
    assert "--collective nccl needs --compute-device cuda" in capsys.readouterr().err


@pytest.mark.long
def test_weights_that_no_device_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LIKE_33B, "vocab_size": 4_000_000}))
    argv = ["serve", str(tmp_path), "--cluster", PAPER, "--kv-cache-memory-bytes", "8GiB", *DRY_RUN]
    assert main([*argv, *ON_GPUS]) == 2
    assert "GB of weights do not fit in the 80 GB of NVIDIA H100" in capsys.readouterr().err
    assert main(argv) == 0  # in the memory of the host itself they may


@pytest.mark.long(but=["flags2-host's cores-NVIDIA H20 96 GB"])
@pytest.mark.parametrize(
    ("flags", "compute", "memory"),
    [
        ((), "host's cores", "host's cores"),
        (("--compute-device", "cuda"), "NVIDIA H100 SXM 80 GB", "host's cores"),
        (("--memory-device", "cuda:0"), "host's cores", "NVIDIA H20 96 GB"),
    ],
)
def test_the_plan_names_the_device_that_workers_would_use(
    flags: tuple[str, ...], compute: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else their host has."""
    assert main(["serve", MODEL, "--cluster", PAPER, "--kv-cache-memory-bytes", "8GiB", *DRY_RUN, *flags]) == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[2:5]]
    assert [line[2] for line in lines] == [compute, memory, memory]
    assert [" of 80 GB" in lines[0][3], " of 96 GB" in lines[1][3]] == ["GB" in compute, "GB" in memory]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory-workers", "9"], "9 memory workers do not fit: the cluster has room for 8"),
        (["--pipeline", "4"], "3 compute workers do not fit: the cluster has room for 2"),
        (
            ["--kv-cache-memory-bytes", "90GiB", "--memory-device", "cuda"],
            "--kv-cache-memory-bytes 90GiB exceeds the 96 GB",
        ),
        ([], "--kv-cache-memory-bytes auto is for one host: say what a worker takes on 10.20.0.2, such as 4GiB"),
        (
            ["--transport", "loopback"],
            "--transport loopback does not go with --launcher ray, because it connects threads",
        ),
        (["--memory-addresses", "10.0.0.1:1,10.0.0.2:1"], "--launcher ray does not go with --memory-addresses"),
    ],
)
def test_plans_that_do_not_work(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, "--cluster", PAPER, *DRY_RUN, *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("placement: {memory_on: B200}", "no host of the cluster has B200 free, which --cluster placement.memory_on"),
        ("placement: {policy: diagonal}", "--cluster placement.policy must be one of pack, spread"),
        ("placement: {polciy: pack}", ": placement: unknown entry polciy; known: compute_on, memory_on, policy"),
        ("placement: spread", ": placement: must be a table with compute_on, memory_on, policy"),
        ("placement: {policy: [pack]}", ": placement.policy must be a text or a number, not ['pack']"),
        ("address: 10.0.0.1:6379", ": it has address and hosts: leave one out"),
        ("addresses: 10.0.0.1:6379", ": unknown entry addresses; known: address, hosts, placement"),
    ],
)
def test_files_that_do_not_work(lines: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, f"{Path(PAPER).read_text()}\n{lines}\n")
    status: object = None
    try:
        status = main(["serve", MODEL, "--cluster", file, "--kv-cache-memory-bytes", "8GiB", *DRY_RUN])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_file_says_where_workers_are_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement = "placement: {policy: spread, compute_on: H100, memory_on: lamina_device=h20}"
    running = write(tmp_path, f"address: 10.0.0.1:6379\n{placement}\n")
    wanted = {"placement": "spread", "compute_on": "H100", "memory_on": "lamina_device=h20"}
    ours = tmp_path / "ours.yaml"
    ours.write_text(f"{Path(PAPER).read_text()}\n{placement}\n")
    for file, address in ((running, "10.0.0.1:6379"), (str(ours), str(ours))):
        assert main(["serve", MODEL, "--cluster", file, "--print-config"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["ray_address"] == address
        assert {name: printed[name] for name in wanted} == wanted
    assert len(read_cluster(str(ours)).hosts) == 3
    with pytest.raises(ValueError, match="address names a cluster that others have started: this needs hosts"):
        read_cluster(running)


def test_without_ray_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ImportError, match=r"--cluster needs Ray 2\.52 or newer: pip install 'ray>="):
        open_launcher(make_config({"ray_address": "auto"}), bytes(32), {"memory": 1, "compute": 1})
    assert main(["generate", MODEL, "--prompt", "x", "--cluster", "auto"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    open_launcher(make_config({}), bytes(32), {"memory": 1, "compute": 1}).close()  # this one needs none


def test_the_local_launcher_loads_no_ray() -> None:
    code = "import sys, lamina.executor.worker_executor, lamina.executor.launchers.local; print('ray' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_the_token_is_made_once_and_nobody_elses(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    assert read_token(environment) is None
    token = make_token(environment)
    assert len(token) >= 32
    assert make_token(environment) == read_token(environment) == token
    file = tmp_path / "lamina" / "ray_token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    offer_token(environment)
    assert environment[MODE] == "token"
    assert environment[TOKEN_PATH] == str(file)
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(environment)
    assert read_token({**environment, TOKEN: "given"}) == "given"


def test_calls_at_once_make_one_token(tmp_path: Path) -> None:
    for number in range(20):
        environment, ready = {"XDG_STATE_HOME": str(tmp_path / str(number))}, threading.Barrier(8)

        def make(environment: dict[str, str] = environment, ready: threading.Barrier = ready) -> str:
            ready.wait(10)
            return make_token(environment)

        with ThreadPoolExecutor(8) as pool:
            made = {call.result() for call in [pool.submit(make) for _ in range(8)]}
        assert made == {read_token(environment)}


def test_ray_is_never_joined_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="no token for Ray"):
        offer_token({"XDG_STATE_HOME": str(tmp_path)})
    with pytest.raises(ValueError, match="RAY_AUTH_MODE=disabled"):
        offer_token({"XDG_STATE_HOME": str(tmp_path), MODE: "disabled", TOKEN: "x"})


def test_own_addresses_are_known() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("10.255.255.254")
