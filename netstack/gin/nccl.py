"""What of NCCL the transport ``gin`` needs, by ctypes: communicators of two, windows, and their device side.

HARDWARE-UNVERIFIED: run against a stand-in of the library (tests/netstack/gpu/fake_nccl.cpp). Structs are those of
nccl.h and nccl_device/host.h of 2.32, which a test compares field by field where the package is installed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from lamina.netstack.cuda.driver import CSRC, FLAGS, KERNELS, Compiler, Driver, Handle, load

LIBNCCL = "LAMINA_LIBNCCL"  # another file to load instead of the installed one
LEAST = 23200  # of which the device API has strong signals in windows, and sizes for kernels compiled at run time
MAGIC = 0xCAFEBEEF
UNSET = -(1 << 31)
ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
WINDOW = 1 | 2  # symmetric, strictly ordered
FULLY_CONNECTED = 1
AGAIN_S = 1e-3
NVCC = "LAMINA_NVCC"  # another compiler to run instead of the installed one
COMPILE_S = 600.0


class Id(ctypes.Structure):
    _fields_ = [("internal", c_char * ID_BYTES)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cgaClusterSize", c_int),
        ("minCTAs", c_int), ("maxCTAs", c_int), ("netName", c_char_p), ("splitShare", c_int), ("trafficClass", c_int),
        ("commName", c_char_p), ("collnetEnable", c_int), ("CTAPolicy", c_int), ("shrinkShare", c_int),
        ("nvlsCTAs", c_int), ("nChannelsPerNetPeer", c_int), ("nvlinkCentricSched", c_int), ("graphUsageMode", c_int),
        ("numRmaCtx", c_int), ("maxP2pPeers", c_int), ("graphStreamOrdering", c_int), ("launchOrderImplicit", c_int),
        ("numRmaSig", c_int), ("rmaEagerInit", c_int), ("hostCftMode", c_int), ("nvlsHostMode", c_int),
    ]  # fmt: skip


class Requirements(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("resourceRequirementsList", c_void_p),
        ("teamRequirementsList", c_void_p), ("lsaMultimem", c_bool), ("barrierCount", c_int),
        ("lsaBarrierCount", c_int), ("railGinBarrierCount", c_int), ("lsaLLA2ABlockCount", c_int),
        ("lsaLLA2ASlotCount", c_int), ("ginForceEnable", c_bool), ("ginContextCount", c_int),
        ("ginSignalCount", c_int), ("ginCounterCount", c_int), ("ginConnectionType", c_int),
        ("ginExclusiveContexts", c_bool), ("ginQueueDepth", c_int), ("ginTrafficClass", c_int),
        ("worldGinBarrierCount", c_int), ("ginStrongSignalsRequired", c_bool), ("ginVaSignalsRequired", c_bool),
        ("ginCustomStride", c_int), ("ginType", c_int), ("useRuntimeVersion", c_bool), ("cftCaps", c_int),
        ("cftBarrierCount", c_int),
    ]  # fmt: skip


class Properties(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("rank", c_int), ("nRanks", c_int),
        ("cudaDev", c_int), ("nvmlDev", c_int), ("deviceApiSupport", c_bool), ("multimemSupport", c_bool),
        ("ginType", c_int), ("nLsaTeams", c_int), ("hostRmaSupport", c_bool), ("railedGinType", c_int),
        ("commHash", c_uint64), ("ginMinStride", c_int), ("ginConnectionType", c_int), ("ginSupport", c_bool * 64),
        ("devCommRuntimeVersionSize", c_size_t), ("cftSupport", c_bool), ("cftMulticastSupport", c_bool),
        ("cftCountedSupport", c_bool),
    ]  # fmt: skip


SIGNATURES: dict[str, tuple[type | object, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(Id),),
    "ncclCommInitRankConfig": (POINTER(Handle), c_int, Id, c_int, POINTER(Config)),
    "ncclCommGetAsyncError": (Handle, POINTER(c_int)),
    "ncclCommQueryProperties": (Handle, POINTER(Properties)),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclCommWindowRegister": (Handle, c_void_p, c_size_t, POINTER(c_void_p), c_int),
    "ncclCommWindowDeregister": (Handle, c_void_p),
    "ncclDevCommCreate": (Handle, POINTER(Requirements), c_void_p),
    "ncclDevCommDestroy": (Handle, c_void_p),
    "ncclCommAbort": (Handle,),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (Handle,),
}


class NcclError(OSError):
    """A call of NCCL failed, or did not end in time."""


def names() -> list[str]:
    """Names of the library to try: the named one, that of the Python package, the installed one."""
    if named := os.environ.get(LIBNCCL):
        return [named]
    return [*(str(path) for folder in _folders() for path in folder.glob("nccl/lib/libnccl.so.2")), "libnccl.so.2"]


def header_folders() -> list[Path]:
    """Where nvcc finds NCCL's headers, beside the library, and those of CUDA's packages; nvcc knows its own."""
    named = os.environ.get(LIBNCCL)
    places = [Path(named).parents[1] / "include"] if named else []
    places += [p for folder in _folders() for p in (folder / "nccl/include", *folder.glob("cu1*/include"))]
    return [p for place in places for p in (place, place / "cccl") if p.is_dir()]


def lack_of_compiler() -> str:
    """What of it is missing to compile kernels with NCCL's headers; empty: nothing."""
    if not any((folder / "nccl_device.h").is_file() for folder in header_folders()):
        return "NCCL's headers are not there"
    return "" if _nvcc() else "nvcc, which compiles kernels with NCCL's headers, is not there"


def _nvcc() -> str | None:
    packaged = (str(path) for folder in _folders() for path in folder.glob("cu1*/bin/nvcc"))
    places = os.environ.get(NVCC), *packaged, "nvcc", "/usr/local/cuda/bin/nvcc"
    return next((path for place in places if place and (path := shutil.which(place))), None)


def build(architecture: int) -> bytes:
    """kernels.cu, with links of NCCL's device API, by nvcc: NVRTC does not take NCCL's headers. Raises ImportError for
    what is missing, RuntimeError with the words of nvcc.
    """
    compiler = _nvcc()
    if (why := lack_of_compiler()) or compiler is None:
        raise ImportError(why)
    with TemporaryDirectory() as folder:
        image = Path(folder) / "kernels.cubin"
        flags = [f"-arch=sm_{architecture}", *FLAGS, "-DLAMINA_GIN", f"-I{CSRC}", *(f"-I{p}" for p in header_folders())]
        command = [compiler, *flags, "-cubin", str(KERNELS), "-o", str(image)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{compiler}: {error}") from error
        if done.returncode:
            raise RuntimeError(f"{KERNELS.name} does not compile for sm_{architecture}: {done.stderr.strip()}")
        return image.read_bytes()


BY_NVCC = Compiler("nvidia-cuda-nvcc", build)


def _folders() -> list[Path]:
    spec = find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [] if spec else [])]


class NcclLibrary:
    """The library. Raises ImportError, in one line, where it is missing or too old."""

    def __init__(self) -> None:
        self._library = load(names(), SIGNATURES)
        for text in (self._library.ncclGetErrorString, self._library.ncclGetLastError):
            text.restype = c_char_p
        version = c_int()
        self._library.ncclGetVersion(byref(version))
        self.version = version.value
        if self.version < LEAST:
            raise ImportError(f"NCCL is {self.version}, whose device API is too old: {LEAST} is the least")

    def new_id(self) -> bytes:
        """The name of a communicator that is to be, with the place where its ranks meet, which this process opens."""
        made = Id()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def call(self, name: str, *arguments: object, of: Handle | None = None) -> None:
        """Raises NcclError. ``of``: the communicator whose last words explain a failure."""
        status = getattr(self._library, name)(*arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {self.words(status, of)}")

    def words(self, status: int, of: Handle | None = None) -> str:
        last = self._library.ncclGetLastError(of or Handle()) or b""
        return " ".join(filter(None, ((self._library.ncclGetErrorString(status) or b"").decode(), last.decode())))


class Communicator:
    """Of so many ranks, of which this side is ``rank``. Whoever makes one waits for the others until ``deadline``, or
    until ``given_up`` is set; no call of it waits longer. All is given back by ``close``, which waits for nobody.
    """

    def __init__(
        self,
        nccl: NcclLibrary,
        driver: Driver,
        ranks: int,
        name: bytes,
        rank: int,
        deadline: float,
        given_up: threading.Event,
    ) -> None:
        self._nccl, self._driver = nccl, driver
        self._deadline, self._given_up = deadline, given_up
        self._handle = Handle()
        self._undo: list[Callable[[], None]] = []
        config = Config(ctypes.sizeof(Config), MAGIC, nccl.version)
        for field in Config._fields_:
            if field[1] is c_int:
                setattr(config, field[0], UNSET)
        config.blocking = 0
        try:
            self._step("ncclCommInitRankConfig", byref(self._handle), ranks, Id(name), rank, byref(config))
        except BaseException:
            self.close()
            raise

    def properties(self) -> Properties:
        """What NCCL says of it, and of its device side."""
        told = Properties(ctypes.sizeof(Properties), MAGIC, self._nccl.version)
        self._step("ncclCommQueryProperties", self._handle, byref(told))
        return told

    def window(self, nbytes: int) -> tuple[int, int]:
        """(address, handle) of memory of the GPU's that all ranks reach; they make it together, of one size."""
        memory, made = c_void_p(), c_void_p()
        self._step("ncclMemAlloc", byref(memory), nbytes)
        self._undo.append(lambda: self._call("ncclMemFree", memory))
        self._step("ncclCommWindowRegister", self._handle, memory, nbytes, byref(made), WINDOW)
        self._undo.append(lambda: self._call("ncclCommWindowDeregister", self._handle, made))
        return memory.value or 0, made.value or 0

    def device_side(self, requests: int, traffic_class: int) -> bytes:
        """The ncclDevComm that kernels are given; they make it together. ``requests``: that may be under way at once;
        ``traffic_class``: 0 = NCCL's own.
        """
        made = ctypes.create_string_buffer(self.properties().devCommRuntimeVersionSize)
        wanted = Requirements(ctypes.sizeof(Requirements), MAGIC, self._nccl.version)
        wanted.ginForceEnable, wanted.ginContextCount, wanted.ginConnectionType = True, 1, FULLY_CONNECTED
        wanted.ginQueueDepth, wanted.ginTrafficClass = requests, traffic_class or UNSET
        wanted.ginStrongSignalsRequired = wanted.ginVaSignalsRequired = wanted.useRuntimeVersion = True
        wanted.ginCustomStride = 1
        self._step("ncclDevCommCreate", self._handle, byref(wanted), made)
        self._undo.append(lambda: self._call("ncclDevCommDestroy", self._handle, made))
        return made.raw

    def fault(self) -> str:
        """What has gone wrong since; empty: nothing."""
        status = c_int()
        try:
            self._call("ncclCommGetAsyncError", self._handle, byref(status))
        except NcclError as error:
            return str(error)
        return "" if status.value in (SUCCESS, IN_PROGRESS) else self._nccl.words(status.value, self._handle)

    def close(self) -> None:
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except NcclError:
                continue  # it goes with the communicator
        if self._handle:
            self._call("ncclCommAbort", self._handle)
            self._handle = Handle()

    def _call(self, name: str, *arguments: object) -> None:
        with self._driver.current():
            self._nccl.call(name, *arguments, of=self._handle)

    def _step(self, name: str, *arguments: object) -> None:
        """A call that may go on behind its return. Raises NcclError."""
        self._call(name, *arguments)
        status = c_int(IN_PROGRESS)
        while self._handle:
            self._call("ncclCommGetAsyncError", self._handle, byref(status))
            if status.value == SUCCESS:
                return
            if status.value != IN_PROGRESS:
                raise NcclError(f"{name}: {self._nccl.words(status.value, self._handle)}")
            if self._given_up.is_set() or monotonic() > self._deadline:
                raise NcclError(f"{name}: the peer did not come to it in time")
            sleep(AGAIN_S)
