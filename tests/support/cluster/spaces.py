"""Two hosts in miniature: network namespaces with an Ethernet cable between them, which know each other by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest


class Space(NamedTuple):
    name: str  # of the namespace
    host: str  # its name in both
    address: str

    @property
    def enter(self) -> list[str]:
        """Returns what to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.name]

    def processes(self) -> set[int]:
        out = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=10, check=True)
        return {int(pid) for pid in out.stdout.split()}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextmanager
def two_spaces() -> Iterator[tuple[Space, Space]]:
    """Gone at the end. Skips where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    number = os.getpid() % 250 + 1
    first, second = (
        Space(f"lamina-{os.getpid()}{letter}", f"node-{letter}", f"10.214.{number}.{last}")
        for letter, last in (("c", 1), ("d", 2))
    )
    names = "127.0.0.1 localhost\n" + "".join(f"{each.address} {each.host}\n" for each in (first, second))
    try:
        try:
            for space in (first, second):
                ip("netns", "add", space.name)
            ip("link", "add", "eth0", "netns", first.name, "type", "veth", "peer", "eth0", "netns", second.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces or veth here: {error.stderr.decode().strip()}")
        for space in (first, second):
            folder = Path("/etc/netns") / space.name  # in the place of /etc for every process that enters
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names)
            ip("-n", space.name, "addr", "add", f"{space.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", space.name, "link", "set", device, "up")
        yield first, second
    finally:
        for space in (first, second):
            subprocess.run(["ip", "netns", "del", space.name], check=False, capture_output=True, timeout=10)
            shutil.rmtree(Path("/etc/netns") / space.name, ignore_errors=True)
