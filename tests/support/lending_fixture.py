"""The processes that the drill of lending needs: a ledger, a host that lends, a server that borrows, one that lends."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lamina.executor.lending.lender_service import BLOCK_BYTES
from lamina.executor.lending.lending_listener import LEDGER_NAME, open_link, parse_address
from lamina.lending.lending_messages import DebtsReply, DebtsRequest, FromLedger
from lamina.netstack.contract.cluster_key import KEY
from lamina.netstack.own_python import own_python
from lamina.tools.drill.client_streams import StreamRecord, read_all
from lamina.tools.drill.target import Target
from lamina.utils.proc import descendants_of

START_S, LOOK_S = 60.0, 0.02
SPARE_BYTES = 1 << 16  # of what is lent, on each memory worker


class DrillSizes(NamedTuple):
    """Bytes: of the pool on each of a server's two memory workers, and of what one lends and the other borrows."""

    pool: int
    loan: int

    @property
    def borrowing(self) -> tuple[int, str]:
        """KV memory and the entry of --lending of the server that borrows."""
        return self.pool, f"borrow: {{max: {self.loan}, wait_s: 600}}"

    @property
    def lending(self) -> tuple[int, str]:
        """The same of the server that lends as much as the other one borrows."""
        lent = self.loan // 2 + SPARE_BYTES
        return self.pool + lent, f"lend: {{share: {lent / (self.pool + lent):.6f}}}"

    @property
    def both(self) -> tuple[int, str]:
        """The same of a server that lends as much as it borrows."""
        kv_bytes, entry = self.lending
        return kv_bytes, f"{entry}\n{self.borrowing[1]}"


class StartedCommand(NamedTuple):
    """A sub-command in a process of its own. ``first_line``: its first line."""

    process: subprocess.Popen[str]
    first_line: str

    def end(self) -> None:
        """Kill the process. Idempotent."""
        self.process.kill()
        self.process.wait()


class DebtorServer(Target):
    """A server whose log, metrics and processes are looked at."""

    def pid_of(self, place: str) -> int:
        """The id of the process at a place, such as engine. Raises StopIteration where there is none."""
        return next(victim.pid for victim in self._processes() if victim.place == place)

    def has_logged(self, words: str, since: float) -> bool:
        """Return whether its log has had ``words`` since that moment of time.perf_counter."""
        return any(words in line for at, line in list(self.log) if at >= since)

    def metrics(self) -> str:
        """The text of its /metrics. Raises OSError."""
        asked = urllib.request.Request(self.url + "/metrics", headers=self.operator_headers)
        with urllib.request.urlopen(asked, timeout=60.0) as answer:
            return str(answer.read().decode())


class StreamReader:
    """A stream that a thread reads."""

    def __init__(self, url: str, body: dict[str, Any], timeout_s: float) -> None:
        self.record, self.has_begun = StreamRecord(), time.perf_counter()
        self._thread = threading.Thread(
            target=read_all, args=(url, [body], timeout_s, None, 0.0, [self.record]), daemon=True
        )
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Count of tokens so far."""
        return len(self.record.ids.get(0, ()))

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> StreamRecord:
        self._thread.join()
        return self.record


class LendingProcesses:
    """A ledger and servers, with one key of their cluster."""

    def __init__(self, key: str = "") -> None:
        """``key``: in hexadecimal; empty: a new one. Raises OSError where something does not start."""
        self._key, self._started = bytes.fromhex(key) or secrets.token_bytes(32), list[StartedCommand]()
        self._targets, self._folder = list[DebtorServer](), tempfile.TemporaryDirectory()
        self._environment = {**os.environ, KEY: self._key.hex()}
        try:
            self.start_ledger(f"127.0.0.1:{free_port()}")  # not by 0: it is to be taken again
        except BaseException:
            self.end()
            raise

    def start_ledger(self, place: str) -> None:
        self.ledger = self.start("ledger", "serve", place)
        self.place = self.ledger.first_line.rpartition(" ")[2]

    def lent(self) -> dict[str, int]:
        """Blocks that creditors have lent to others, by their names, as the ledger knows them."""
        place = parse_address(self.place, "the ledger")
        link = open_link(
            place, self._key, FromLedger, name=f"drill-{secrets.token_hex(4)}", peer=LEDGER_NAME, what="ledger"
        )
        try:
            link.send(DebtsRequest())
            answer = link.recv(START_S)
            assert isinstance(answer, DebtsReply)
        finally:
            link.close()
        return {row.name: row.num_lent for row in answer.lenders}

    def stop(self, started: StartedCommand) -> Callable[[], None]:
        """Stop a process and its descendants, as a network that is cut would; the result lets them continue."""
        pids = [started.process.pid, *descendants_of(started.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return go_on

    def end(self) -> int:
        """End all. How many processes of the servers are left."""
        left = sum(target.stop() for target in self._targets)
        for started in self._started:
            started.end()
        self._folder.cleanup()
        return left

    def serve(self, model: str, kv_bytes: int, entry: str) -> DebtorServer:
        """Start a server. ``entry``: its lines of --lending. Raises OSError."""
        file = Path(self._folder.name) / f"lending-{len(self._targets)}.yaml"
        file.write_text(f"ledger: {self.place}\n{entry}\n")
        flags = ["--kv-cache-memory-bytes", str(kv_bytes), "--lending", str(file)]
        own = ["--partition", "spill", "--memory-workers", "2", "--no-enable-prefix-caching", "--deterministic"]
        target = DebtorServer(model, [*own, *flags], environment=self._environment)
        self._targets.append(target)
        return target

    def start(self, *words: str) -> StartedCommand:
        """Start a sub-command. Raises OSError."""
        command, environment = own_python("-m", "lamina.cli.launch", *words, environ=self._environment)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        started = StartedCommand(process, process.stdout.readline().strip() if readable else "")
        self._started.append(started)
        if not started.first_line:
            raise OSError(f"{words[0]} did not start: its log says why")
        return started


class LendingFixture(LendingProcesses):
    """The processes of the drill. ``creditor`` is the host that lends, ``debtor`` and ``lender`` are the servers."""

    def __init__(self, model: str, sizes: DrillSizes) -> None:
        """Raises OSError where something does not start."""
        super().__init__()
        self._sizes = sizes
        try:
            self.start_creditor()
            self.debtor = self.serve(model, *sizes.borrowing)
            self.lender = self.serve(model, *sizes.lending)
        except BaseException:
            self.end()
            raise

    def start_creditor(self) -> None:
        """Start a host that lends. It has more than the server that lends, so it is asked first."""
        memory = str(self._sizes.loan + 2 * BLOCK_BYTES)
        self.creditor = self.start("lend", "--ledger", self.place, "--lend-memory", memory)

    @property
    def creditor_name(self) -> str:
        return self.creditor.first_line.partition(" ")[0]


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def seconds_until(true: Callable[[], Any], limit_s: float) -> float | None:
    """Seconds until it is; None where it is not in time."""
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < limit_s:
        if true():
            return now - began
        time.sleep(LOOK_S)
    return None
