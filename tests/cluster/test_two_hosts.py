"""`lamina-launch cluster` on two hosts in miniature: network namespaces with an Ethernet cable between them.

In place of ssh there is a program that enters the namespace of an address.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_cluster import ROOT
from spaces import Space, ip, two_spaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LAUNCH = [sys.executable, "-m", "lamina.cli.launch"]
MODEL = "examples/tiny_lm/model"
ASK = ("--prompt", "class Stack:", "--max-tokens", "24", "--ignore-eos", "--dtype", "float32")
RUN_S = 400.0  # on a busy machine
BEGUN = 300  # bytes of a text that is on its way
# A text that does not repeat itself: else KV that is wrong could stay quiet, and so could a piece that is lost.
PROMPT, TOKENS, PENALTIES = "class Stack:", 1200, {"frequency": 0.5, "repetition": 1.2}
TIE = 2e-4  # of two logits; KV that is built again moves them by less than a tenth of that


def least_margin(prompt: list[int], ids: list[int]) -> float:
    """Returns how much the greedy token of each row is the best one, in float64, by transformers: where that is much,
    rounding changes no token.
    """
    import torch
    from torch.nn.functional import one_hot
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / MODEL).double()
    with torch.inference_mode():
        scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    drawn = one_hot(torch.tensor(ids), scores.shape[-1])
    counts = drawn.cumsum(0) - drawn  # of each row, before its own token
    known = counts > 0
    known[:, prompt] = True
    factor = PENALTIES["repetition"]
    scores = torch.where(known, torch.where(scores > 0, scores / factor, scores * factor), scores)
    best = (scores - PENALTIES["frequency"] * counts).topk(2, -1)
    assert best.indices[:, 0].tolist() == ids
    return float((best.values[:, 0] - best.values[:, 1]).min())


@dataclass
class Hosts:
    spaces: tuple[Space, Space]
    file: Path
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        """On the first host."""
        return [*self.spaces[0].enter, *LAUNCH, *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=RUN_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> set[int]:
        return {pid for space in self.spaces for pid in space.processes()}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """In the file they have names, by which `ssh` also knows the second one."""
    pytest.importorskip("ray")
    with two_spaces() as spaces:
        first, second = spaces
        ssh = tmp_path / "ssh"
        ssh.write_text(f'#!/bin/sh\ntest "$1" = {second.host} || exit 255\nexec {" ".join(second.enter)} sh -c "$2"\n')
        ssh.chmod(0o700)
        file = tmp_path / "hosts.yaml"
        file.write_text(
            f"ssh: [{ssh}]\nplacement: {{policy: spread}}\nhosts:\n  - "
            f"{{address: {first.host}, compute: 2, memory: 1, cores: 1}}\n"
            f"  - {{address: {second.host}, memory: 2, cores: 1}}\n"
        )
        mine = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        made = Hosts(spaces, file, {**mine, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"})
        yield made
        subprocess.run(
            made.command("cluster", "down", str(file)), cwd=ROOT, env=made.environment, timeout=RUN_S, check=False
        )


def test_a_cluster_comes_up_serves_and_goes(hosts: Hosts) -> None:
    target = str(hosts.file)
    assert "started" in hosts.run("cluster", "up", target)
    assert "was up already" in hosts.run("cluster", "up", target)
    assert [line.split()[1] for line in hosts.run("cluster", "status", target).splitlines()[:2]] == ["up", "up"]
    options = (
        "--memory-workers",
        "2",
        "--kv-cache-memory-bytes",
        "64MiB",
        "--cluster",
        target,
    )
    planned = hosts.run("generate", MODEL, *ASK, *options, "--dry-run")
    assert [line.split()[0] for line in planned.splitlines()[2:5]] == ["compute-0", "memory-0", "memory-1"]
    here = subprocess.run(
        [*LAUNCH, "generate", MODEL, *ASK, "--memory-workers", "2"], cwd=ROOT, env=hosts.environment,
        capture_output=True, text=True, timeout=RUN_S, check=True,
    )  # fmt: skip
    assert hosts.run("generate", MODEL, *ASK, *options) == here.stdout
    assert hosts.processes()
    assert hosts.run("cluster", "down", target).count("ended") == 2
    assert not hosts.processes()
    assert hosts.run("cluster", "down", target).count("was not up") == 2


def test_a_host_that_falls_silent_is_noticed(hosts: Hosts) -> None:
    target = str(hosts.file)
    hosts.run("cluster", "up", target)
    ask = ("--prompt", "import os", "--max-tokens", "1900", "--ignore-eos", "--dtype", "float32")
    room = ("--kv-cache-memory-bytes", "64MiB")
    with subprocess.Popen(
        hosts.command("generate", MODEL, *ask, "--memory-workers", "3", *room, "--cluster", target),
        cwd=ROOT, env=hosts.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        assert driver.stderr is not None
        assert driver.stdout.read(20)  # it decodes
        ip("-n", hosts.spaces[1].name, "link", "set", "eth0", "down")
        start = time.monotonic()
        _, errors = driver.communicate(timeout=30)
        print(f"noticed after {time.monotonic() - start:.1f} s: {errors}")
        assert driver.returncode == 1
        assert time.monotonic() - start < 7.0
        assert "its host does not answer" in errors


@pytest.mark.parametrize("more", [("--spare-memory", "1"), ()], ids=["a spare", "room for another one"])
def test_where_a_host_stays_silent_all_goes_on_without_it(hosts: Hosts, more: tuple[str, ...]) -> None:
    """Its worker's place is taken on the other host, and the cable stays out to the end."""
    first, second = hosts.spaces
    lines = hosts.file.read_text().splitlines()[:3]
    lines += [f"  - {{address: {first.host}, compute: 1, memory: 2, cores: 1}}"]
    lines += [f"  - {{address: {second.host}, memory: 1, cores: 1}}", ""]
    hosts.file.write_text("\n".join(lines))
    target = str(hosts.file)
    hosts.run("cluster", "up", target)
    penalties = [word for name, value in PENALTIES.items() for word in (f"--{name}-penalty", str(value))]
    ask = ("--prompt", PROMPT, "--max-tokens", str(TOKENS), "--ignore-eos", "--dtype", "float32", *penalties)
    options = ("--deterministic", "--memory-workers", "2", "--kv-cache-memory-bytes", "64MiB")
    wanted = json.loads(hosts.run("generate", MODEL, *ask, *options, "--json"))
    assert least_margin(wanted["prompt_token_ids"], wanted["outputs"][0]["token_ids"]) > TIE, "take another prompt"
    over_ray = ("--cluster", target, *more)
    with subprocess.Popen(
        hosts.command("generate", MODEL, *ask, *options, *over_ray),
        cwd=ROOT, env=hosts.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        begun = b""
        while len(begun) < BEGUN and (piece := os.read(driver.stdout.fileno(), BEGUN)):
            begun += piece  # not by a file object: communicate() would not know what that has read ahead
        ip("-n", second.name, "link", "set", "eth0", "down")
        out, err = driver.communicate(timeout=RUN_S)
    text, errors = (begun + out).decode(), err.decode()
    assert driver.returncode == 0, errors
    assert text == wanted["outputs"][0]["text"] + "\n"
    assert "its host does not answer; lost workers are replaced" in errors
    assert ("there are fewer spare workers" in errors) == bool(more), errors
