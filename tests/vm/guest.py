"""A QEMU guest with Soft-RoCE that runs this checkout's Python environment, read-only, over 9p."""

from __future__ import annotations

import base64
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType

from image import PYVERBS, ROOT, Image, program

from lamina.utils.proc import descendants_of, stat_fields

BOOT_S = 90.0
KVM_BOOT_S = 15.0  # by the host's clock: else its processors are emulated
PATIENCE = 10  # a second of a guest may take so many of the host's, which has other work
TICK = os.sysconf("SC_CLK_TCK")
LOOK_S = 1.0
LIFE_S = 7200  # no guest outlives this, whatever happens to the tests
# The kernel ends it with the thread that has started it (PR_SET_PDEATHSIG of prctl(2)). `timeout` passes that on, or
# ends by it alone where it has not yet noted its child: so the guest ends with `timeout`, too.
STARTER = (
    "setpriv", "--pdeathsig", "TERM", "nice", "-n", "5", "timeout", "--kill-after=1", str(LIFE_S),
    "setpriv", "--pdeathsig", "KILL",
)  # fmt: skip
MEMORY_MB = 3072
PYTHON = Path(sys.executable)
SHELL = (  # pyverbs is the distribution's, and nothing else of its packages is wanted
    f"mkdir -p /run/path && ln -sfn {PYVERBS} /run/path/pyverbs && cd {ROOT} && PYTHONPATH=/run/path:{ROOT} "
    "PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis "
    "OMP_NUM_THREADS=1"
)


def python(arguments: str, environment: str = "") -> str:
    """The command that runs this environment's Python in the checkout, pyverbs included."""
    return f"{SHELL} {environment} {PYTHON} {arguments}"


@dataclass(frozen=True)
class Done:
    """A finished command of the guest."""

    status: int
    output: str
    seconds: float


class Guest:
    """Boots on entry, is killed on exit. ``wire``: one end of a socketpair, whose other end another guest has; the
    caller's. Without one, both ends of the link are in this guest. A ``timeout_s`` is of its own: it goes by while its
    processors run, and where they wait, by the host's clock, PATIENCE times as slowly.
    """

    def __init__(
        self, image: Image, *, rdma_ip: str = "10.9.0.1", wire: socket.socket | None = None, loss_percent: float = 0.0,
        processors: int = 1,
    ) -> None:  # fmt: skip
        self._image, self._processors = image, processors
        self._options = f"rdma_ip={rdma_ip}" + (f" loss={loss_percent:g}" if loss_percent else "")
        self._wire = wire
        self._mac = "52:54:00:00:00:" + rdma_ip.split(".")[-1].zfill(2)
        self._buffer = b""
        self.boot_s = 0.0
        self.accelerator = ""

    def __enter__(self) -> Guest:
        start = monotonic()
        self._console = tempfile.NamedTemporaryFile(prefix="lamina-vm-", suffix=".log")
        attempts = [("kvm", KVM_BOOT_S, 1)] if _kvm_may_work() else []
        for self.accelerator, boot_s, patience in [*attempts, ("tcg", BOOT_S, PATIENCE)]:
            self._start()
            try:
                self._until(b"ready ", boot_s, patience)
                self._until(b"\n", boot_s, patience)
                break
            except TimeoutError:
                self.stop()
                if self.accelerator == "tcg":
                    raise
        self.boot_s = monotonic() - start
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._console.close()

    @property
    def console(self) -> str:
        return Path(self._console.name).read_text(errors="replace")

    def run(self, command: str, *, timeout_s: float) -> Done:
        """Run ``command`` with bash; raises TimeoutError, after which the guest is of no use."""
        self.start(command)
        return self.finish(timeout_s=timeout_s)

    def start(self, command: str) -> None:
        self._word = secrets.token_hex(8).encode()
        self._began = monotonic()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(self._word + b" " + base64.b64encode(command.encode()) + b"\n")
        stdin.flush()

    def finish(self, *, timeout_s: float) -> Done:
        output = self._until(b"\n" + self._word + b" ", timeout_s)
        status = int(self._until(b"\n", timeout_s))
        return Done(status, output.decode(errors="replace"), monotonic() - self._began)

    def hear(self, words: str, *, timeout_s: float) -> None:
        """Reads until the command that was started prints ``words``."""
        self._until(words.encode(), timeout_s)

    def line(self, *, timeout_s: float) -> str:
        """The rest of the line that the command is saying."""
        return self._until(b"\n", timeout_s).decode(errors="replace")

    def python(self, arguments: str, *, timeout_s: float) -> Done:
        """Run this environment's Python in the checkout, pyverbs included."""
        return self.run(python(arguments), timeout_s=timeout_s)

    def pytest(self, arguments: str, *, timeout_s: float) -> Done:
        """Run tests with no plugin but pytest-timeout: every import costs, emulated."""
        return self.python(f"-m pytest -p pytest_timeout -p no:cacheprovider {arguments}", timeout_s=timeout_s)

    def stop(self) -> None:
        """End it as a power cut does. Idempotent."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.terminate()  # timeout passes it on
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        if self._process.stdout:
            self._process.stdout.close()
        self._buffer = b""

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*STARTER, *self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[self._wire.fileno()] if self._wire else [],
        )

    def _command(self) -> list[str]:
        cpu = "host" if self.accelerator == "kvm" else "max"
        command = [
            str(program("qemu-system-x86_64")),
            "-machine", f"q35,accel={self.accelerator}", "-cpu", cpu,
            "-smp", str(self._processors), "-m", str(MEMORY_MB),
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", str(self._image.kernel), "-initrd", str(self._image.initrd),
            "-append", f"console=ttyS0 quiet panic=-1 mitigations=off {self._options}",
            "-serial", f"file:{self._console.name}",
            "-chardev", "stdio,id=host,signal=off", "-device", "virtio-serial-pci",
            "-device", "virtserialport,chardev=host,name=host",
        ]  # fmt: skip
        for n, path in enumerate(self._image.shares):
            command += [
                "-fsdev", f"local,id=share{n},path={path},security_model=none,readonly=on,multidevs=remap",
                "-device", f"virtio-9p-pci,fsdev=share{n},mount_tag=share{n}",
            ]  # fmt: skip
        if self._wire:
            netdev = f"socket,id=wire,fd={self._wire.fileno()}"
            command += ["-netdev", netdev, "-device", f"virtio-net-pci,netdev=wire,mac={self._mac}"]
        return command

    def _until(self, mark: bytes, timeout_s: float, patience: float = PATIENCE) -> bytes:
        """Returns what the guest prints before ``mark``."""
        begun, ran_s = monotonic(), self._ran_s()
        stdout = self._process.stdout
        assert stdout is not None
        while (at := self._buffer.find(mark)) < 0:
            if not select.select([stdout], [], [], LOOK_S)[0]:
                waited_s, own_s = monotonic() - begun, self._ran_s() - ran_s
                if waited_s > patience * timeout_s or min(waited_s, own_s) > timeout_s:
                    how_long = f"{waited_s:.0f} s, of which its processors ran {own_s:.0f}"
                    raise TimeoutError(f"the guest is silent after {how_long}: {self._said()}")
                continue
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                raise RuntimeError(f"the guest ended: {self._said()}")
            self._buffer += chunk
        before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        return before

    def _ran_s(self) -> float:
        """Seconds that each of its processors has run, on average; the emulator's other threads count too."""
        ticks = (int(n) for pid in descendants_of(self._process.pid) for n in stat_fields(pid)[11:13])
        return sum(ticks) / TICK / self._processors

    def _said(self) -> str:
        return f"{self._buffer.decode(errors='replace')[-3000:]}\nconsole: {self.console[-2000:]}"


def _kvm_may_work() -> bool:
    """A /dev/kvm may be there and dead: without the CPU's flag the guest never executes an instruction."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool({"vmx", "svm"} & set(flags))
