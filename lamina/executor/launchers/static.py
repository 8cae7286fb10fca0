"""The launcher ``static``: people start the workers by hand, with commands that are printed.

Each command is a node agent (``static_agent.py``) that connects to this process, by the cluster's key. It watches one
worker, whose control link comes here too. So only one port of this host is reached from elsewhere.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from lamina import __version__
from lamina.config.engine_config import EngineConfig
from lamina.executor.hosts.cluster_file import look_up
from lamina.executor.hosts.worker_placement import Host, HostAssignment, check_kv_memory
from lamina.netstack import ChannelAborted, ChannelError, ChannelTimeout
from lamina.netstack.contract.cluster_key import KEY_FILE, cluster_key
from lamina.protocol.control import ControlLink, LinkClosedError
from lamina.protocol.encrypted_socket import EncryptedSocket

from . import WorkerHandle
from .remote_links import ControlListener, any_port, host_port
from .static_agent import ANY, AgentHello, KillWorker, StartWorker, WorkerExited, WorkerRefused, WorkerStarted
from .static_commands import WorkerId, commands, instructions, planned_places

log = logging.getLogger(__name__)
TURN_S = 1.0  # of the listening thread, between looks
GREETING_S = 10.0  # for a node agent to send AgentHello
CALL_S = 60.0  # for a worker's process to start
END_S = 2.0


class StaticWorker:
    """A worker that was started by hand, and its node agent."""

    def __init__(self, warden: AgentConnection, role: str, index: int, sock: EncryptedSocket) -> None:
        self.role, self.index, self.pid = role, index, warden.pid
        self.host = any_port(warden.hello.host)
        self.sock = sock
        self._agent = warden

    is_stopped = False  # unknown

    def exit_reason(self) -> str | None:
        where = f"on {self._agent.hello.host}"
        if self._agent.exit_reason:
            return f"{where} {self._agent.exit_reason}"
        if self.sock.timed_out or self._agent.sock.timed_out:
            return f"{where} is lost: its host does not answer"
        return f"{where} is lost, with the command that looked after it" if self._agent.has_ended.is_set() else None

    def join(self, timeout_s: float) -> None:
        if not self._agent.has_ended.wait(timeout_s):
            self._agent.kill()
            self._agent.has_ended.wait(END_S)
        self._agent.link.close()


class AgentConnection:
    """A connected node agent, as this process sees it."""

    def __init__(self, sock: EncryptedSocket, link: ControlLink, came: AgentHello) -> None:
        self.sock, self.link, self.hello = sock, link, came
        self.pid, self.exit_reason = 0, ""
        self.has_started, self.has_ended = threading.Event(), threading.Event()

    def kill(self) -> None:
        """Kill the worker; the node agent itself ends if it has none."""
        try:
            self.link.send(KillWorker())
        except LinkClosedError:
            self.has_ended.set()

    def listen(self) -> None:
        """Receive the node agent's messages until its link ends."""
        try:
            while not self.exit_reason:
                message = self.link.recv()
                if isinstance(message, WorkerStarted):
                    self.pid = message.pid
                    self.has_started.set()
                elif isinstance(message, WorkerExited):
                    self.exit_reason = message.exit_reason
        except LinkClosedError:
            pass
        self.has_ended.set()
        self.has_started.set()


class StaticLauncher:
    """Listens and prints the commands to run. ``thread_count`` and ``start`` wait until all workers have connected."""

    key = b""  # workers get it from their own environment

    def __init__(self, config: EngineConfig, key: bytes, wanted: Mapping[str, int]) -> None:
        """Listen and print the commands. Raises ValueError, OSError."""
        self._config, self._key = config, key
        self._wanted = {role: count for role, count in wanted.items() if count}
        self._planned = planned_places(config, self._wanted)
        host, _, port = config.launch.driver_address.rpartition(":")
        at = _own_ip(host.removeprefix("[").removesuffix("]"))
        self.name = config.launch.driver_name or f"driver-{secrets.token_hex(8)}"
        links = 2 * sum(self._wanted.values()) + 16  # and some that will be refused
        self._listener = ControlListener(at, key, self.name, "", port=int(port), links=links)
        self.address = host_port(at, self._listener.port)
        self.commands = commands(config, self._planned, self._wanted, self.address, self.name)
        self.agents: dict[WorkerId, AgentConnection] = {}
        self._control: dict[str, EncryptedSocket | None] = {}  # by the name that the worker was given
        self._changed = threading.Condition()
        self._closed = False
        self.refusal = ""
        limit_s = config.deadlines.start_timeout_s
        self.deadline = time.monotonic() + limit_s
        threading.Thread(target=self._receive, name="lamina-static", daemon=True).start()
        if self.commands:
            log.warning("%s", instructions(self.commands, limit_s))

    def thread_count(self, role: str, index: int) -> int:
        self._all_connected()
        own = self.agents[role, index].hello
        num_on_same_host = sum(v.hello.host == own.host for (of, _), v in self.agents.items() if of == role)
        return max(1, own.cores // num_on_same_host)

    def start(self, role: str, index: int, threads: int = 0) -> StaticWorker:
        threads = threads or self.thread_count(role, index)  # waits too
        self._all_connected()
        warden, name = self.agents[role, index], f"{role}-{index}-{secrets.token_hex(8)}"
        who = f"the command for {role} worker {index} on {warden.hello.host}"
        with self._changed:
            self._control[name] = None
        try:
            warden.link.send(StartWorker(role=role, index=index, threads=threads, name=name))
        except LinkClosedError:
            raise OSError(f"{who} has ended") from None
        with self._changed:
            came = self._changed.wait_for(lambda: self._control.get(name) or warden.has_ended.is_set(), CALL_S)
            sock = self._control.pop(name, None)
        if not warden.has_started.wait(CALL_S if came else 0.0) or sock is None or not warden.pid:
            raise OSError(f"{who} did not start it: see its output there")
        return StaticWorker(warden, role, index, sock)

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> StaticWorker:
        raise OSError("people start the workers of --launcher static: there are no spares")

    def promote_spare(self, role: str, number: int, index: int) -> None:
        """Do nothing: there are no spares."""

    def avoid_host(self, role: str, index: int) -> None:
        """Do nothing: no worker is started again."""

    def set_capacity(self, role: str, count: int) -> bool:
        """Allow only fewer workers, since people start them."""
        return count <= self._wanted.get(role, 0)

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None:
        with self._changed:
            stay = {(role, new): self.agents[role, old] for new, old in enumerate(numbers)}
            self.agents = {who: v for who, v in self.agents.items() if who[0] != role} | stay
            self._wanted[role] = len(numbers)

    def can_replace(self, lost: WorkerHandle) -> bool:
        """Return False, since people start the workers."""
        return False

    def close(self) -> None:
        with self._changed:
            visitors, self.agents, self._closed = list(self.agents.values()), {}, True
            unclaimed, self._control = [sock for sock in self._control.values() if sock], {}
            self._changed.notify_all()
        self._listener.close()
        for sock in unclaimed:
            sock.close()
        for visitor in visitors:
            visitor.kill()
            visitor.link.close()

    def _all_connected(self) -> None:
        """Wait for all workers. Raises OSError after the deadline, ValueError if they cannot work together."""
        total = sum(self._wanted.values())
        with self._changed:
            left = self.deadline - time.monotonic()
            here = self._changed.wait_for(lambda: len(self.agents) == total or self._closed, max(0.0, left))
            if not here or self._closed:
                raise OSError(self._missing_workers())
            hosts = {who: Host(name=v.hello.host, address=v.hello.host, resources={}) for who, v in self.agents.items()}
        places = {
            role: [HostAssignment(hosts[role, i], {}) for i in range(count)] for role, count in self._wanted.items()
        }
        check_kv_memory(places, self._config.devices.kv_bytes())

    def _missing_workers(self) -> str:
        missing = [who for who in self.commands if who not in self.agents]
        words = "; ".join(f"on {c.host or 'any host'}: {c.text}" for c in (self.commands[who] for who in missing))
        limit_s, total = self._config.deadlines.start_timeout_s, len(self.commands)
        refused = f"; the last one that came was refused: {self.refusal}" if self.refusal else ""
        return (
            f"{len(missing)} of {total} workers did not come to {self.address} within {limit_s:g} s "
            f"(--start-timeout-s): {words}{refused}"
        )

    def _receive(self) -> None:
        """Accept connections until ``close``: node agents, and the control links of their workers."""
        while True:
            try:
                name, sock, keys = self._listener.accept_any(TURN_S)
            except ChannelTimeout as error:
                _, _, refusal = str(error).partition("the last one was refused: ")
                self.refusal = refusal or self.refusal
                continue
            except ChannelAborted:
                return
            except ChannelError as error:  # such as too few descriptors
                self.refusal = str(error)
                threading.Event().wait(TURN_S)
                continue
            sealed = EncryptedSocket(sock.detach(), keys)
            with self._changed:
                if name in self._control and not self._closed:
                    self._control[name] = sealed
                    self._changed.notify_all()
                    continue
            threading.Thread(target=self._greet, args=(sealed,), name="lamina-visitor", daemon=True).start()

    def _greet(self, sock: EncryptedSocket) -> None:
        link = ControlLink(sock, AgentHello | WorkerStarted | WorkerExited)
        try:
            came = link.recv(GREETING_S)
            if not isinstance(came, AgentHello):
                return
            try:
                visitor, who = self._admit(sock, link, came)
            except ValueError as error:
                self.refusal = f"{came.role} worker from {came.host}: {error}"
                link.send(WorkerRefused(str(error)))
                return
            visitor.listen()
            with self._changed:
                if not visitor.pid and self.agents.get(who) is visitor:
                    del self.agents[who]  # it left before it was needed: another one may connect
                self._changed.notify_all()
        except (TimeoutError, LinkClosedError):
            return
        finally:
            link.close()

    def _admit(self, sock: EncryptedSocket, link: ControlLink, came: AgentHello) -> tuple[AgentConnection, WorkerId]:
        """Take an agent's worker into the group. Raises ValueError, with the reason, if there is no use for it."""
        if came.version != __version__:
            raise ValueError(f"it has Lamina {came.version}, the driver has {__version__}: install the same")
        host = str(ipaddress.ip_address(came.host))
        if came.cores < 1:
            raise ValueError(f"it reports {came.cores} cores")
        with self._changed:
            count = self._wanted.get(came.role, 0)
            free = [i for i in range(count) if (came.role, i) not in self.agents]
            if came.index != ANY or not count:
                if not 0 <= came.index < count:
                    raise ValueError(f"the driver has {count} {came.role} workers, numbered from 0")
                free = [i for i in free if i == came.index]
            if not free:
                raise ValueError("all workers of that kind have come already")
            planned = self._planned.get(came.role, [])
            fitting = [i for i in free if not planned or planned[i].host.address == host]
            if not fitting:
                raise ValueError(f"none is planned on {host} (--cluster {self._config.launch.hosts})")
            if self._closed:
                raise ValueError("the driver ends")
            who = came.role, fitting[0]
            visitor = self.agents[who] = AgentConnection(sock, link, came)
            self._changed.notify_all()
        left = len(self.commands) - len(self.agents)
        log.info("%s worker %d has come from %s; %d more to come", *who, host, left)
        return visitor, who


def open_launcher(
    config: EngineConfig, key: bytes, wanted: Mapping[str, int], without: Collection[str] = ()
) -> StaticLauncher:
    if cluster_key() != key:
        raise ValueError(
            f"--launcher static: workers prove the cluster's key: put one in a file (openssl rand -hex 32), chmod 600, "
            f"and name it by {KEY_FILE} here and on their hosts"
        )
    return StaticLauncher(config, key, wanted)


def _own_ip(host: str) -> str:
    """Return the IP of --driver, for commands that are run elsewhere."""
    try:
        ip = look_up(host, "--driver", alone=host == "localhost")
    except UnicodeError as error:
        raise ValueError(f"--driver {host} is no host: {error}") from None
    if ipaddress.ip_address(ip).is_unspecified:
        raise ValueError(f"--driver {host} is no host's own: give the IP by which workers reach this host")
    return ip
