"""A cluster's YAML file: its hosts, their resources, and how to reach them. Documented by examples/h100_h20.yaml."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field, replace
from typing import Any

from lamina.facts.hardware import DEVICES
from lamina.utils.yaml_file import read_yaml, yaml_table

from .worker_placement import RACK, Host

PORT = 6379  # Ray's
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_SUFFIXES = (".yaml", ".yml")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
# RFC 1123; a name that ends in digits is an address.
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of the file; ``compute``, ``memory``: the number of workers of each kind that it takes."""

    address: str  # IP or name, as in the file
    ip: str = ""  # of a name, once it has been looked up
    compute: int = 0
    memory: int = 0
    device: str = ""  # of each worker, a name in facts.hardware; "" = the host's own memory and cores
    rack: str = ""
    cores: int = 0  # 0 = all, their number is unknown here

    @property
    def ip_or_name(self) -> str:
        """The host's IP, or its name if that was not looked up."""
        return self.ip or self.address

    def resources(self) -> dict[str, float]:
        """Return the resources with which Ray is started on the host."""
        named = {"lamina_compute": self.compute, "lamina_memory": self.memory}
        return {name: float(count) for name, count in named.items() if count}

    def labels(self) -> dict[str, str]:
        """Return the labels with which Ray is started on the host."""
        named = {RACK: self.rack, "lamina_device": self.device}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster; ``hosts[0]`` is the head, which has Ray's own state."""

    hosts: tuple[HostEntry, ...]
    port: int = PORT
    ssh: tuple[str, ...] = field(default=SSH)  # a command that takes a host and a command line, for all but this host
    python: str = ""  # with Lamina and Ray, on every host; "" = the one that runs this
    path: str = ""  # of the file

    @property
    def head(self) -> str:
        """The address of the head, as ``--cluster`` takes it."""
        host = self.hosts[0].ip_or_name
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def planned(self) -> list[Host]:
        """Return the hosts as Ray will know them. If workers have devices, there is a GPU for each."""
        gpus = [{"GPU": float(h.compute + h.memory)} if h.device else {} for h in self.hosts]
        return [
            Host(
                name=f"{number:04}-{h.address}", address=h.ip_or_name, resources=h.resources() | gpus[number],
                labels=h.labels(), cores=h.cores or 1,
            )
            for number, h in enumerate(self.hosts)
        ]  # fmt: skip

    def looked_up(self) -> Cluster:
        """Return the cluster with all hosts' IPs. Raises ValueError for a name without an IP that other hosts reach."""
        hosts = tuple(
            replace(h, ip=look_up(h.address, f"{self.path}: host {number}", alone=len(self.hosts) == 1))
            for number, h in enumerate(self.hosts)
        )
        for number, host in enumerate(hosts):
            if twin := next((h for h in hosts[:number] if h.ip == host.ip), None):
                raise ValueError(
                    f"{self.path}: {twin.address} and {host.address} are one host, {host.ip}: name it once"
                )
        return replace(self, hosts=hosts)


def is_file(address: str) -> bool:
    """Return whether a ``ray_address`` names a cluster's YAML file."""
    return address.endswith(_SUFFIXES)


def head_address(address: str) -> str:
    """Return ``auto`` or HOST:PORT for a ``ray_address`` in any of its forms. Raises ValueError."""
    if is_file(address):
        return read_cluster(address).looked_up().head
    if address == "auto":
        return address
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = address, str(PORT)
    if "://" in address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--cluster {address} is not auto, HOST, HOST:PORT or a .yaml file")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_local(address: str) -> bool:
    """Return whether an IP address is one of this host's, or a name its own; no name is looked up."""
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return address in ("localhost", socket.gethostname().lower())
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def read_cluster(path: str) -> Cluster:
    """Read a cluster's file. Raises ValueError that names the file and the entry, ImportError without PyYAML."""
    table = yaml_table(read_yaml(path), path, ("hosts", "port", "ssh", "python", "placement", "address"))
    if "address" in table:
        raise ValueError(f"{path}: address names a cluster that others have started: this needs hosts")
    entries = table.get("hosts")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: hosts must be a list with at least one host")
    hosts = tuple(_host(entry, f"{path}: host {number}") for number, entry in enumerate(entries))
    if len({h.address for h in hosts}) < len(hosts):
        raise ValueError(f"{path}: two hosts have the same address")
    ssh, python = table.get("ssh", list(SSH)), table.get("python", "")
    if not (isinstance(ssh, list) and ssh and all(isinstance(word, str) for word in ssh)):
        raise ValueError(f"{path}: ssh must be a list of words, such as [ssh, -o, BatchMode=yes]")
    if not isinstance(python, str):
        raise ValueError(f"{path}: python must be a path")
    port = _count(table, "port", path, PORT)
    if not 0 < port < 1 << 16:
        raise ValueError(f"{path}: port must be 1..65535, not {port}")
    return Cluster(hosts=hosts, port=port, ssh=tuple(ssh), python=python, path=path)


def _host(entry: Any, where: str) -> HostEntry:
    table = yaml_table(entry, where, ("address", "compute", "memory", "device", "rack", "cores"))
    address, device = _address(table.get("address"), where), str(table.get("device", "")).lower()
    if device and device not in DEVICES:
        raise ValueError(f"{where}: device {device} is not one of {', '.join(DEVICES)}")
    compute, memory, cores = (_count(table, name, where, 0) for name in ("compute", "memory", "cores"))
    return HostEntry(
        address=address, compute=compute, memory=memory, device=device, rack=str(table.get("rack", "")), cores=cores
    )


def _address(address: Any, where: str) -> str:
    """Return an IP address in its shortest form, or a host's name in lower case."""
    text = str(address)
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        if not isinstance(address, str) or not _NAME.fullmatch(text.lower()):
            raise ValueError(f"{where}: address must be an IP address or the name of a host, not {address!r}") from None
        return text.lower()
    if ip.is_unspecified or ip.is_multicast:
        raise ValueError(f"{where}: address {text} is no host's own")
    return str(ip)


def look_up(address: str, where: str, *, alone: bool) -> str:
    """Return the IP of a host name as this host knows it, IPv4 before IPv6. ``alone``: no other host must reach it."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        addresses = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"{where}: {address} cannot be looked up ({error.strerror}): give a name that this host knows, or the IP"
        ) from None
    ips = sorted(
        (ipaddress.ip_address(place[0]) for *_, place in addresses), key=lambda ip: (ip.is_loopback, ip.version)
    )
    if ips[0].is_loopback and not alone:
        raise ValueError(f"{where}: {address} is {ips[0]} here, which other hosts cannot reach: give its IP")
    return str(ips[0])


def _count(table: dict[str, Any], name: str, where: str, default: int) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: {name} must be a whole number, not {value!r}")
    return value
