"""Checks which needs of each transport this machine meets, and how to get the missing ones. Changes nothing. Paths are
below ``Machine.root``, so that tests can check an artificial machine.
"""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shutil
import socket
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path

from .contract.base import NAMED_BY
from .contract.base import rdma_device as named_device
from .cuda.driver import NVRTC_SIGNATURES, load, nvrtc_names
from .gin.compiler import why_no_compiler
from .gin.nccl import NcclLibrary
from .host.native_module import mlx5_fault
from .kernel_files import names, text
from .rdma.card import MTU_NAMES
from .rdma.mtu import FRAMES, LARGEST, ROCE_HEADS
from .rdma.nearest_port import PCI, gpus, nearest_first
from .rdma.pcie_bridges import bridges_above, redirects
from .rdma.rdma_ports import CLASS, NONE, Wanted, gid_names, ports, why_no_port
from .schemes import BY_RDMA, SCHEMES, open

MEMLOCK_LEAST = 1 << 30
MELLANOX = "0x15b3"
DMABUF_KERNEL = (5, 12)


@dataclass(frozen=True)
class Machine:
    root: Path = Path("/")
    kernel: str = platform.release()
    uid: int = os.geteuid()
    wanted: str = field(default_factory=named_device)

    def text(self, path: str) -> str:
        return text(self.root / path)

    def names(self, folder: str) -> list[str]:
        return names(self.root / folder)


@dataclass(frozen=True)
class Finding:
    check: str
    transports: tuple[str, ...]  # that need it
    ok: bool | None  # None: unknown from here
    detail: str
    fix: str = ""


Verdict = tuple[bool | None, str, str]  # ok, detail, fix


def shared_memory(machine: Machine) -> Verdict:
    try:
        os.close(os.memfd_create("lamina-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return False, f"memfd_create: {error.strerror}", "allow memfd_create in this container's seccomp profile"
    free = shutil.disk_usage(machine.root / "dev/shm").free if machine.names("dev") else 0
    return True, f"memfd works; /dev/shm has {free >> 20} MiB free", ""


def tcp_loopback(_: Machine) -> Verdict:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return True, "127.0.0.1 can be bound", ""
    except OSError as error:
        return False, f"127.0.0.1: {error.strerror}", "bring the loopback interface up: ip link set lo up"


def compiler(_: Machine) -> Verdict:
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return bool(path), path or "none", "" if path else "install a C++17 compiler and install Lamina again"


def rdma_device(machine: Machine) -> Verdict:
    """Check for a port for queue pairs: the named one, if one was named."""
    there = ports(machine.root)
    if not there:
        why, _, fix = NONE.partition("; ")
        return False, why, fix
    why, _, fix = why_no_port(there, machine.wanted).partition("; ")
    if why:
        return False, why, fix or "correct it, or unset it for the nearest active port"
    described = (f"{p}, {p.link or 'link unknown'}, GIDs {gid_names(p.gids)}" for p in there if p.is_active)
    return True, "; ".join(described), ""


def mellanox(machine: Machine) -> list[str]:
    """Return the RDMA devices of that maker."""
    return [d for d in machine.names(CLASS) if machine.text(f"{CLASS}/{d}/device/vendor") == MELLANOX]


def connectx(machine: Machine) -> Verdict:
    cards = [f"{d} (firmware {machine.text(f'{CLASS}/{d}/fw_ver') or 'unknown'})" for d in mellanox(machine)]
    if not cards:
        return False, "no ConnectX", "none in software: the device path needs a ConnectX-6 or newer"
    return None, ", ".join(cards), "hardware-unverified: compare its results with the software NIC's first"


def gpu_ports(machine: Machine) -> Verdict:
    """Report the port of each GPU, the nearest by PCI. Ports next to several GPUs are divided among these."""
    try:
        wanted = Wanted.parse(machine.wanted)
    except ValueError as error:
        return False, str(error), f"correct {NAMED_BY}"
    fitting = [port for port in ports(machine.root) if port.fits(wanted)]
    there = gpus(machine.root)
    if not (fitting and there):
        return False, f"{len(there)} NVIDIA GPUs, {len(fitting)} ports for queue pairs", "see the other checks"
    chosen = (f"{gpu}: {(p := nearest_first(fitting, gpu, machine.root)[0]).device}:{p.number}" for gpu in there)
    return None, ", ".join(chosen), f"compare with `nvidia-smi topo -m`; {NAMED_BY} names another one"


def iommu(machine: Machine) -> Verdict:
    """Check for an IOMMU. GPU and NIC address each other's memory and registers by physical addresses (NVIDIA's
    GPUDirect RDMA, "Supported Systems"). An IOMMU that translates them breaks that: doorbells and reads fault, in the
    kernel's log.
    """
    folders = {gpu: f"{PCI}/{gpu}" for gpu in gpus(machine.root)}
    folders |= {device: f"{CLASS}/{device}/device" for device in mellanox(machine)}
    if not folders:
        return False, "no NVIDIA GPU and no ConnectX", "see the other checks"
    kinds = {name: machine.text(f"{folder}/iommu_group/type") for name, folder in folders.items()}
    translated = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in ("", "identity")]
    if translated:
        return None, f"translates addresses of {', '.join(translated)}", "boot with iommu=pt, or with the IOMMU off"
    return True, f"translates for none of {', '.join(folders)}", ""


def pcie_bridges(machine: Machine) -> Verdict:
    """Check PCIe bridges: traffic between GPU and NIC below one switch passes no CPU, unless a bridge redirects it."""
    devices = [machine.root / PCI / gpu for gpu in gpus(machine.root)]
    devices += [machine.root / CLASS / device / "device" for device in mellanox(machine)]
    if not devices:
        return False, "no NVIDIA GPU and no ConnectX", "see the other checks"
    there = {bridge.name: redirects(bridge) for device in devices for bridge in bridges_above(device)}
    if turned := [name for name, redirected in there.items() if redirected]:
        fix = 'switch ACS off in the BIOS, or see "ACS" in the troubleshooting of NCCL\'s documentation'
        return None, f"{', '.join(turned)} send what GPU and NIC tell each other by the CPU (ACS)", fix
    if None in there.values():
        return None, "root alone sees whether they send all by the CPU (ACS)", "run this as root"
    return True, f"{len(there)} above GPUs and NICs, none of which sends all by the CPU", ""


def verbs_nodes(machine: Machine) -> Verdict:
    nodes = [n for n in machine.names("dev/infiniband") if n.startswith("uverbs")]
    if not nodes:
        return False, "no /dev/infiniband/uverbs*", "modprobe ib_uverbs; in a container pass --device=/dev/infiniband"
    closed = [n for n in nodes if not os.access(machine.root / "dev/infiniband" / n, os.R_OK | os.W_OK)]
    return not closed, ", ".join(nodes), f"make {', '.join(closed)} readable and writable" if closed else ""


def native_verbs(_: Machine) -> Verdict:
    """Check for the engine on libibverbs, which posts work requests."""
    try:
        from .host.native_module import verbs_fault

        fault = verbs_fault()
    except ImportError as error:
        fault = str(error)
    if not fault:
        return True, "the engine on libibverbs", ""
    fix = "install rdma-core's libibverbs1, and libibverbs-dev where Lamina is installed, then install again"
    return False, fault, fix


def libmlx5(_: Machine) -> Verdict:
    """Check that libmlx5 lays out queue pairs for kernels."""
    if fault := mlx5_fault():
        return False, fault, "apt-get install ibverbs-providers libibverbs-dev, then install Lamina again"
    return True, "loads", ""


def pyverbs(machine: Machine) -> Verdict:
    """Check that pyverbs opens the device, also where Lamina was built without libibverbs's headers."""
    try:
        from .rdma.device import RdmaDevice

        device = RdmaDevice(machine.wanted)
    except ImportError as error:
        is_needed = not native_verbs(machine)[0]
        return (False, str(error), "see the other checks") if is_needed else (True, "not needed", "")
    device.close()
    return True, f"opens {device}", ""


def memlock(_: Machine) -> Verdict:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return True, "unlimited", ""
    fix = "ulimit -l unlimited, /etc/security/limits.conf, or --ulimit memlock=-1 for a container"
    return soft >= MEMLOCK_LEAST, f"{soft >> 10} KiB", "" if soft >= MEMLOCK_LEAST else fix


def cuda(machine: Machine) -> Verdict:
    driver = machine.text("proc/driver/nvidia/version").partition("\n")[0]
    gpus = machine.names("proc/driver/nvidia/gpus")
    if not driver:
        return False, "no NVIDIA driver", "install it; CPUs need none of the GPU transports"
    if not find_library("cuda"):
        return False, f"{driver}; libcuda.so does not load", "in a container start it with the NVIDIA runtime"
    return bool(gpus), f"{len(gpus)} GPUs; {driver}", "" if gpus else "no GPU is visible: see nvidia-smi"


def cuda_sharing(machine: Machine) -> Verdict:
    """Check what processes need to share GPU memory. Whether it works, the driver reports when the transport opens."""
    gpus = machine.names("proc/driver/nvidia/gpus")
    if not gpus:
        return False, "no NVIDIA GPU", "none needed for shm and tcp"
    nodes = [n for n in machine.names("dev") if n.startswith("nvidia") and n[6:].isdigit()]
    if len(nodes) < len(gpus):
        return False, f"{len(gpus)} GPUs, {len(nodes)} device nodes", "start the container with the NVIDIA runtime"
    return None, f"{len(gpus)} GPUs", "nvidia-smi topo -p2p rw shows which pairs reach each other; one GPU: start MPS"


def nvrtc(_: Machine) -> Verdict:
    try:
        load(nvrtc_names(), NVRTC_SIGNATURES)
    except ImportError as error:
        return False, str(error), "pip install nvidia-cuda-nvrtc: it compiles the kernels at run time"
    return True, "loads", ""


def nccl(_: Machine) -> Verdict:
    """Check for NCCL's library, its headers, and a compiler that accepts these."""
    try:
        version = NcclLibrary().version
        lacks = why_no_compiler()
    except ImportError as error:
        return False, str(error), "pip install nvidia-nccl-cu13"
    if lacks:
        return False, f"{version}; {lacks}", "pip install nvidia-nccl-cu13, and a CUDA toolkit with nvcc"
    return None, f"{version}, headers, nvcc", "what NICs its device API drives it says as it meets: NCCL_DEBUG=INFO"


def gpu_registration(machine: Machine) -> Verdict:
    """Check how a NIC accesses GPU memory: dma-buf, else nvidia-peermem."""
    release = tuple(int(n) for n in machine.kernel.split("-")[0].split(".")[:2] if n.isdigit())
    is_open = "Open Kernel Module" in machine.text("proc/driver/nvidia/version")
    if release >= DMABUF_KERNEL and is_open:
        return True, f"dma-buf (kernel {machine.kernel}, open NVIDIA modules)", ""
    if any(line.startswith("nvidia_peermem ") for line in machine.text("proc/modules").splitlines()):
        return True, "nvidia-peermem", ""
    why = "no NVIDIA driver" if not machine.text("proc/driver/nvidia/version") else "closed NVIDIA modules"
    return False, f"neither dma-buf ({why}, kernel {machine.kernel}) nor nvidia-peermem", "modprobe nvidia-peermem"


def uar_mapping(machine: Machine) -> Verdict:
    """Check that a GPU context may map the NIC's doorbell page (cudaHostRegister with the I/O memory flag)."""
    if not machine.text("proc/driver/nvidia/version"):
        return False, "no NVIDIA driver", "install it"
    if "PeerMappingOverride=1" in machine.text("proc/driver/nvidia/params"):
        return True, "PeerMappingOverride=1: any user", ""
    if machine.uid == 0:
        return (
            None,
            "root may, unless the container lacks CAP_SYS_ADMIN",
            "run the container privileged if it is refused",
        )
    fix = 'load nvidia with NVreg_RegistryDwords="PeerMappingOverride=1;", or run as root, and the GPU rings itself'
    return None, f"user {machine.uid} is refused (error 800): a thread of this host rings", fix


def packet_size(machine: Machine) -> Verdict:
    """Check the packet size of each usable port: the largest that fits the frames of its network device. InfiniBand
    does not report it.
    """
    try:
        wanted = Wanted.parse(machine.wanted)
    except ValueError as error:
        return False, str(error), f"correct {NAMED_BY}"
    there, most = [], MTU_NAMES[LARGEST]
    least = most
    for port in (port for port in ports(machine.root) if port.fits(wanted)):
        name, folder = f"{port.device}:{port.number}", f"{CLASS}/{port.device}/ports/{port.number}/gid_attrs/ndevs"
        device = machine.text(f"{folder}/{port.gid_index(wanted)}")
        frame = machine.text(f"sys/class/net/{device}/mtu") if device else ""
        room = int(frame) - ROCE_HEADS if frame.isdigit() else 0
        packet = max((n for n in MTU_NAMES.values() if n <= room), default=0)
        least = min(least, packet)
        there.append(f"{name} by {device} (MTU {frame}): {packet} B" if packet else f"{name}: as its subnet says")
    if not there:
        return False, "no port for queue pairs", "see the other checks"
    fix = f"both ends take the smaller one; {FRAMES} on both, and on switches"
    return (True, ", ".join(there), "") if least == most else (None, ", ".join(there), fix)


def ordered_delivery(machine: Machine) -> Verdict:
    """Check that the signal is never seen before the data: only the operator of the network knows."""
    if not machine.names("sys/class/infiniband"):
        return False, "no RDMA device", "see above"
    return (
        None,
        "not visible from a host",
        "no adaptive routing or multipath for our traffic class; no relaxed ordering",
    )


MLX5 = ("mlx5",)
RDMA = ("verbs", *MLX5)
CHECKS: list[tuple[str, tuple[str, ...], Callable[[Machine], Verdict]]] = [
    ("shared memory", ("shm", "auto"), shared_memory),
    ("loopback interface", ("tcp", "auto", "gin", *RDMA), tcp_loopback),
    ("C++ compiler", ("shm", "tcp", "auto", "gin", *MLX5), compiler),
    ("RDMA device", RDMA, rdma_device),
    ("ConnectX", MLX5, connectx),
    ("verbs device nodes", RDMA, verbs_nodes),
    ("native verbs", ("verbs",), native_verbs),
    ("libmlx5", MLX5, libmlx5),
    ("pyverbs", ("verbs",), pyverbs),
    ("locked memory", RDMA, memlock),
    ("CUDA", ("cuda", "gin", *MLX5), cuda),
    ("NCCL", ("gin",), nccl),
    ("NVRTC", ("cuda", *MLX5), nvrtc),
    ("GPU memory between processes", ("cuda",), cuda_sharing),
    ("RDMA port of each GPU", MLX5, gpu_ports),
    ("IOMMU", ("gin", *MLX5), iommu),
    ("PCIe bridges", ("gin", *MLX5), pcie_bridges),
    ("GPU memory registration", MLX5, gpu_registration),
    ("doorbell page", MLX5, uar_mapping),
    ("packet size", RDMA, packet_size),
    ("ordered delivery", MLX5, ordered_delivery),
]


def opens(scheme: str, device: str = "") -> Verdict:
    """Check that the transport opens now, and what it lacks. The cause names the fix. ``device``: an RDMA device."""
    try:
        fabric = open(scheme, key=secrets.token_bytes(32), device=device)
        fabric.close()
    except (ImportError, OSError, ValueError) as error:
        return False, " ".join(str(error).split()), ""
    return True, "; ".join(["yes", *fabric.remarks]), ""


def findings(machine: Machine, schemes: Sequence[str] = ()) -> list[Finding]:
    """Return all checks that concern ``schemes`` (none: all transports), then whether each of them opens. Raises
    ValueError for an unknown transport.
    """
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ValueError(f"--transport {scheme!r} is unknown; choose from {', '.join(SCHEMES)}")
    wanted = set(schemes or SCHEMES)
    answers = []
    for name, needed_by, check in CHECKS:
        concerned = tuple(s for s in needed_by if s in wanted)
        if concerned:
            answers.append(Finding(name, concerned, *check(machine)))
    devices = {scheme: machine.wanted if scheme in BY_RDMA else "" for scheme in SCHEMES if scheme in wanted}
    return answers + [Finding("opens", (scheme,), *opens(scheme, device)) for scheme, device in devices.items()]
