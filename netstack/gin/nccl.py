"""The parts of NCCL that the transport ``gin`` needs, by ctypes: communicators of two, windows, and their device side.

HARDWARE-UNVERIFIED: run against a stand-in of the library (tests/netstack/gpu/fake_nccl.cpp). Structs are those of
nccl.h and nccl_device/host.h of 2.32, which a test compares field by field if the package is installed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

from lamina.netstack.cuda.driver import Driver, Handle, load

LIBNCCL = "LAMINA_LIBNCCL"  # another file to load instead of the installed one
LEAST = 23200  # its device API has strong signals in windows, and sizes for kernels compiled at run time
MAGIC = 0xCAFEBEEF
UNSET = -(1 << 31)
ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
WINDOW = 1 | 2  # symmetric, strictly ordered
FULLY_CONNECTED = 1
AGAIN_S = 1e-3
END_S = 1.0  # time for a communicator's own cleanup before it is aborted


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
    """Return names of the library to try: the named one, that of the Python package, the installed one."""
    if named := os.environ.get(LIBNCCL):
        return [named]
    return [
        *(str(path) for folder in package_folders() for path in folder.glob("nccl/lib/libnccl.so.2")),
        "libnccl.so.2",
    ]


def package_folders() -> list[Path]:
    """Return the folders of NVIDIA's Python packages."""
    spec = find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [] if spec else [])]


class NcclLibrary:
    """The library. Raises ImportError, in one line, if it is missing or too old."""

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
        """Return the name of a new communicator, with the address where its ranks meet, which this process opens."""
        made = Id()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def call(self, name: str, *arguments: object, of: Handle | None = None) -> None:
        """Call a function. Raises NcclError. ``of``: the communicator whose last error explains a failure."""
        status = getattr(self._library, name)(*arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {self.words(status, of)}")

    def words(self, status: int, of: Handle | None = None) -> str:
        last = self._library.ncclGetLastError(of or Handle()) or b""
        return " ".join(filter(None, ((self._library.ncclGetErrorString(status) or b"").decode(), last.decode())))


class Communicator:
    """A communicator of so many ranks, of which this side is ``rank``. The constructor waits for the other ranks until
    ``deadline``, or until ``given_up`` is set; no other call waits longer. ``close`` frees all, and waits for no peer.
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
        self._asking = threading.Lock()  # held while the handle must stay valid
        self._undo: list[tuple[str, object]] = []  # cleanup calls, the last one first
        self._memory: list[c_void_p] = []
        self._is_idle = True  # else NCCL only accepts a query of its state and an abort
        config = Config(ctypes.sizeof(Config), MAGIC, nccl.version)
        for field in Config._fields_:
            if field[1] is c_int:
                setattr(config, field[0], UNSET)
        config.blocking = 0
        try:
            own = Id.from_buffer_copy(name)  # Id(name) would end at the name's first zero, as C's texts do
            self._step("ncclCommInitRankConfig", byref(self._handle), ranks, own, rank, byref(config))
        except BaseException:
            self.close()
            raise

    def properties(self) -> Properties:
        """Return NCCL's properties of it, and of its device side."""
        properties = Properties(ctypes.sizeof(Properties), MAGIC, self._nccl.version)
        self._step("ncclCommQueryProperties", self._handle, byref(properties))
        return properties

    def window(self, nbytes: int) -> tuple[int, int]:
        """Return (address, handle) of GPU memory that all ranks can access; they make it together, of one size."""
        memory, made = c_void_p(), c_void_p()
        self._step("ncclMemAlloc", byref(memory), nbytes)
        self._memory.append(memory)
        self._step("ncclCommWindowRegister", self._handle, memory, nbytes, byref(made), WINDOW)
        self._undo.append(("ncclCommWindowDeregister", made))
        return memory.value or 0, made.value or 0

    def device_side(self, requests: int, contexts: int, traffic_class: int) -> bytes:
        """Return the ncclDevComm for kernels; all ranks make it together. ``requests``: most that may be in flight at
        once in each of ``contexts``; ``traffic_class``: 0 = NCCL's own.
        """
        made = ctypes.create_string_buffer(self.properties().devCommRuntimeVersionSize)
        wanted = Requirements(ctypes.sizeof(Requirements), MAGIC, self._nccl.version)
        wanted.ginForceEnable, wanted.ginContextCount, wanted.ginConnectionType = True, contexts, FULLY_CONNECTED
        wanted.ginQueueDepth, wanted.ginTrafficClass = requests, traffic_class or UNSET
        wanted.ginStrongSignalsRequired = wanted.ginVaSignalsRequired = wanted.useRuntimeVersion = True
        wanted.ginCustomStride = 1
        self._step("ncclDevCommCreate", self._handle, byref(wanted), made)
        self._undo.append(("ncclDevCommDestroy", made))
        return made.raw

    def fault(self) -> str:
        """Return what has failed since; "" if nothing has, or it is closed. From any thread."""
        status = c_int()
        with self._asking:
            if not self._handle:
                return ""
            try:
                self._call("ncclCommGetAsyncError", self._handle, byref(status))
            except NcclError as error:
                return str(error)
            return "" if status.value in (SUCCESS, IN_PROGRESS) else self._nccl.words(status.value, self._handle)

    def close(self) -> None:
        """Free all resources: each call after the last one has ended, or with the communicator, which ends them all;
        then its memory.
        """
        self._deadline = monotonic() + END_S
        with suppress(NcclError):
            while self._undo and self._is_idle:
                name, made = self._undo.pop()
                self._step(name, self._handle, made)
        self._undo.clear()
        with self._asking:
            handle, self._handle = self._handle, Handle()
        if handle:
            self._call("ncclCommAbort", handle)
        while self._memory:
            self._call("ncclMemFree", self._memory.pop())

    def _call(self, name: str, *arguments: object) -> None:
        with self._driver.current():
            self._nccl.call(name, *arguments, of=self._handle)

    def _step(self, name: str, *arguments: object) -> None:
        """Make a call that may continue after its return, and wait for its end. Raises NcclError."""
        self._call(name, *arguments)
        self._is_idle, status = False, c_int(IN_PROGRESS)
        while self._handle:
            self._call("ncclCommGetAsyncError", self._handle, byref(status))
            self._is_idle = status.value != IN_PROGRESS
            if status.value == SUCCESS:
                return
            if self._is_idle:
                raise NcclError(f"{name}: {self._nccl.words(status.value, self._handle)}")
            if self._given_up.is_set() or monotonic() > self._deadline:
                raise NcclError(f"{name}: the peer did not join in time")
            sleep(AGAIN_S)
