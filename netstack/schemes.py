"""The table of transports by scheme, and the function that opens one."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

from .contract.base import RDMA_FLAG
from .contract.fabric import Fabric
from .contract.plugins import load_plugin, plugins
from .contract.rdma_device_name import Wanted

# scheme -> module, named like its file, with a function open_fabric(key: bytes) -> Fabric; imported when first used. If
# it has an argument ``gpu``, it gets the GPU that the caller computes on; ``device`` gets the RDMA device that was
# named for all hosts.
SCHEMES: dict[str, str] = {
    "loopback": "loopback",
    "shm": "host.shm",
    "tcp": "host.tcp",
    "cuda": "cuda.cuda",
    "mlx5": "mlx5.mlx5",
    "gin": "gin.gin",
    "verbs": "rdma.verbs",
    "auto": "auto",
    "emulate": "emulate",
}
PLUGINS = "LAMINA_TRANSPORTS"  # more entries, with whole names of modules; see contract.plugins
THREADS = ("loopback",)  # peers are threads of one process
NEAR = {"shm": "auto"}  # for one host only -> the same there, and more beyond it
HERE = "shm"  # the default between processes of this machine
WITHIN = {"": "loopback", "auto": "loopback"}  # no choice, or the nearest -> the nearest within one process
BY_RDMA = ("verbs", "mlx5", "auto")  # those that use a named RDMA device
AT_START = ("gin",)  # all their channels are made before the first message: for pools that do not change
WRAPPERS = ("emulate",)  # used as NAME+OTHER; their open_fabric takes the part after the plus, too


def open(scheme: str, *, key: bytes, gpu: int | None = None, device: str = "") -> Fabric:
    """Open the transport ``scheme`` for peers that hold ``key``; see ``check_scheme`` for its forms.

    ``gpu``: the one that the caller computes on, for a transport that uses one; None = it computes on none. ``device``:
    an RDMA device, as for ``check_rdma_device``; "" = the one of this host's environment, else the nearest. Raises
    ValueError for an unknown scheme (it lists the table) and ImportError, with its cause, when the transport's own
    needs (a native module, a driver, that device) are missing.
    """
    check_scheme(scheme)
    check_rdma_device(scheme, device)
    name, _, other = scheme.partition("+")
    plugin = plugins(PLUGINS).get(name, "")
    module = load_plugin(PLUGINS, plugin) if plugin else import_module(f"{__package__}.{SCHEMES[name]}")
    open_fabric = module.open_fabric
    options: dict[str, int | str | None] = {"gpu": gpu, "device": device or None}
    taken = signature(open_fabric).parameters
    more = {name: value for name, value in options.items() if value is not None and name in taken}
    fabric: Fabric = open_fabric(key, other, **more) if other else open_fabric(key, **more)
    return fabric


def check_scheme(scheme: str) -> None:
    """Raises ValueError, with the table, unless ``scheme`` is in it or in LAMINA_TRANSPORTS, or wraps one that is, such
    as emulate+shm?latency_ms=1 (its options are checked when it is opened).
    """
    name, plus, other = scheme.partition("+")
    if name not in {*SCHEMES, *plugins(PLUGINS)} or (plus and name not in WRAPPERS):
        raise ValueError(f"unknown transport {scheme!r}; choose one of {', '.join(SCHEMES)}")
    if plus:
        check_scheme(other.partition("?")[0])


def check_rdma_device(scheme: str, device: str) -> None:
    """Raises ValueError, naming the flag, if ``device`` is no RDMA device's name (rdma_device_name.FORM), or ``scheme``
    uses none; "": no device is named.
    """
    name = scheme.rpartition("+")[2].partition("?")[0]
    if device and name not in BY_RDMA:
        takers = ", ".join(BY_RDMA)
        raise ValueError(f"{RDMA_FLAG} {device} is for --transport {takers}: leave it out with --transport {name}")
    Wanted.parse(device)


def in_process(scheme: str) -> bool:
    """Return ``Fabric.in_process`` of ``scheme``, even if this host lacks what opening it needs. Raises ValueError for
    an unknown one.
    """
    check_scheme(scheme)
    name, plus, other = scheme.partition("+")
    return in_process(other.partition("?")[0]) if plus else name in THREADS


def made_at_start(scheme: str) -> bool:
    """Return True if all channels of ``scheme`` must be made before the first message."""
    name, plus, other = scheme.partition("+")
    return made_at_start(other.partition("?")[0]) if plus else name in AT_START


def beyond_host(scheme: str) -> str:
    """Return the scheme to use for ``scheme`` if peers may be on several hosts; for most it is the same.

    Raises ValueError for one that stays in a process.
    """
    name, plus, other = scheme.partition("+")
    if plus:
        return f"{name}+{beyond_host(other)}"
    name, mark, options = scheme.partition("?")
    if name in THREADS:
        raise ValueError(f"{name} stays in one process: choose another transport for workers on other hosts")
    return NEAR.get(name, name) + mark + options


def within_process(scheme: str) -> str:
    """Return the scheme to use for ``scheme`` ("": no choice) if all peers may be threads of one process; "" if
    ``scheme`` is a definite choice.
    """
    return WITHIN.get(scheme, "")
