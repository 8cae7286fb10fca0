"""The parts of the CUDA driver (libcuda) and of NVRTC that the device side needs, by ctypes: no toolkit, no package, no
compiler.

HARDWARE-UNVERIFIED: run against a stand-in of the driver on a CPU (tests/netstack/gpu/fake_cuda.cpp), which is compiled
against the declarations of cuda.h. Names and constants are those of the CUDA Driver API reference.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from pathlib import Path

from .kept_kernels import digest_of, kept_or_built, sources

LIBCUDA, LIBNVRTC = "LAMINA_LIBCUDA", "LAMINA_LIBNVRTC"  # other files to load instead of the installed ones
NVRTC_PACKAGE = "nvidia-cuda-nvrtc"
CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = CSRC / "netstack" / "kernels" / "kernels.cu"
THREADS = 256  # of a kernel's block; kBlockThreads of kernels.cu
FLAGS = ("-std=c++17",)  # of every compilation, in tests too
CC_MAJOR, CC_MINOR, VMM, POSIX_HANDLES = 75, 76, 102, 103  # CUdevice_attribute
NIC_REACHES_VMM, NIC_WRITE_ORDER, DMA_BUF = 110, 118, 124  # the same
PINNED, DEVICE, FILE_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3
HOST_PORTABLE, HOST_MAPPED, HOST_IO_MEMORY = 1, 2, 4
NON_BLOCKING, RELAXED = 1, 2  # CUstream_flags, CUstreamCaptureMode
NO_TIMING = 2  # CUevent_flags
PCI_BYTES = 32  # "0000:81:00.0", its end, and space for longer domains
Handle = c_void_p


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", c_int), ("handles", c_int), ("location", Location), ("win32", c_void_p), ("flags", _Flags),
    ]  # fmt: skip


class AccessDescription(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


SIGNATURES: dict[str, tuple[type | object, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(Handle), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (Handle,),
    "cuCtxPopCurrent_v2": (POINTER(Handle),),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemGetHandleForAddressRange": (c_void_p, c_uint64, c_size_t, c_int, c_uint64),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuModuleLoadData": (POINTER(Handle), c_char_p),
    "cuModuleGetFunction": (POINTER(Handle), Handle, c_char_p),
    "cuModuleUnload": (Handle,),
    "cuStreamCreate": (POINTER(Handle), c_uint),
    "cuStreamSynchronize": (Handle,),
    "cuStreamDestroy_v2": (Handle,),
    "cuStreamWaitEvent": (Handle, Handle, c_uint),
    "cuEventCreate": (POINTER(Handle), c_uint),
    "cuEventRecord": (Handle, Handle),
    "cuEventSynchronize": (Handle,),
    "cuEventDestroy_v2": (Handle,),
    "cuLaunchKernel": (Handle, *[c_uint] * 7, Handle, POINTER(c_void_p), POINTER(c_void_p)),
    "cuStreamBeginCapture_v2": (Handle, c_int),
    "cuStreamEndCapture": (Handle, POINTER(Handle)),
    "cuGraphInstantiateWithFlags": (POINTER(Handle), Handle, c_uint64),
    "cuGraphLaunch": (Handle, Handle),
    "cuGraphDestroy": (Handle,),
    "cuGraphExecDestroy": (Handle,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
NVRTC_SIGNATURES: dict[str, tuple[type | object, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcCreateProgram": (POINTER(Handle), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (Handle, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (Handle, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (Handle, c_char_p),
    "nvrtcGetCUBINSize": (Handle, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (Handle, c_char_p),
    "nvrtcDestroyProgram": (POINTER(Handle),),
}


class CudaError(OSError):
    """A call of the driver failed."""


def load(names: list[str], signatures: dict[str, tuple[type | object, ...]], fix: str = "") -> ctypes.CDLL:
    """Return the first of ``names`` that loads. Raises ImportError, which ends with the ``fix``."""
    cause: Exception | None = None
    for name in names:
        try:
            library = ctypes.CDLL(name)
            for function, arguments in signatures.items():
                getattr(library, function).argtypes = arguments
        except (OSError, AttributeError) as error:  # AttributeError: it is too old for a function
            cause = error
            continue
        return library
    raise ImportError("; ".join(filter(None, (f"{names[0]} does not load ({cause})", fix))))


def nvrtc_names() -> list[str]:
    """Return names of NVRTC's library to try: the named one, that of Python packages, the installed one."""
    if named := os.environ.get(LIBNVRTC):
        return [named]
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [] if spec else [])]
    packaged = [str(path) for folder in folders for path in sorted(folder.glob("**/libnvrtc.so.*"))]
    return [*packaged, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@cache
def compiled(architecture: int, names: tuple[str, ...], options: tuple[str, ...] = ()) -> bytes:
    """Return kernels.cu for sm_``architecture``, kept or compiled by the first of ``names`` that loads. Raises
    ImportError for what is missing, RuntimeError with NVRTC's log.
    """
    if not KERNELS.is_file():
        raise ImportError(f"its kernels' source, {KERNELS}, is not there: run from a checkout")
    nvrtc = load(list(names), NVRTC_SIGNATURES, f"pip install {NVRTC_PACKAGE}")
    flags = [f"--gpu-architecture=sm_{architecture}", *FLAGS, f"-I{CSRC}", *options]
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    facts = ["NVRTC", str(nvrtc._name), f"{major.value}.{minor.value}", *flags, digest_of(sources(CSRC))]
    return kept_or_built(facts, lambda: _compiled_by(nvrtc, architecture, flags))


def _compiled_by(nvrtc: ctypes.CDLL, architecture: int, flags: list[str]) -> bytes:
    program = Handle()
    text = KERNELS.read_bytes()
    nvrtc.nvrtcCreateProgram(byref(program), text, KERNELS.name.encode(), 0, None, None)
    try:
        given = (c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), given):
            size = c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{KERNELS.name} does not compile for sm_{architecture}: {log.value.decode()}")
        size = c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


@dataclass(frozen=True)
class Compiler:
    """``build``: compiles kernels.cu for an architecture; raises ImportError and RuntimeError. ``package``: provides
    it.
    """

    package: str
    build: Callable[[int], bytes]


BY_NVRTC = Compiler(NVRTC_PACKAGE, lambda architecture: compiled(architecture, tuple(nvrtc_names())))


class Shared:
    """Device memory that another process may map: the allocation lives until its last mapping is gone."""

    def __init__(self, driver: Driver, nbytes: int, fd: int = -1) -> None:
        """Make one of at least ``nbytes``, or map the one of ``fd`` (which stays the caller's)."""
        self._driver = driver
        self.size = -(-nbytes // driver.granularity) * driver.granularity
        handle, address = c_uint64(), c_uint64()
        with ExitStack() as undo:
            if fd < 0:
                driver.call("cuMemCreate", byref(handle), self.size, byref(driver.properties), 0)
            else:
                driver.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), FILE_DESCRIPTOR)
            self._handle = handle.value
            undo.callback(driver.call, "cuMemRelease", self._handle)
            driver.call("cuMemAddressReserve", byref(address), self.size, 0, 0, 0)
            self.address = address.value
            undo.callback(driver.call, "cuMemAddressFree", self.address, self.size)
            driver.call("cuMemMap", self.address, self.size, 0, self._handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self.address, self.size)
            access = AccessDescription(Location(DEVICE, driver.index), READ_WRITE)
            driver.call("cuMemSetAccess", self.address, self.size, byref(access), 1)
            self.close = undo.pop_all().close

    def export(self) -> int:
        """Return a descriptor, owned by the caller, for a peer's Shared."""
        fd = c_int(-1)
        self._driver.call("cuMemExportToShareableHandle", byref(fd), self._handle, FILE_DESCRIPTOR, 0)
        return fd.value


class Pinned:
    """Host memory that kernels access at the same address. It lives as long as a view of it does."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self.view = memoryview(mmap(-1, max(nbytes, 1)))
        self.address = ctypes.addressof(c_ubyte.from_buffer(self.view))
        driver.call("cuMemHostRegister_v2", self.address, self.view.nbytes, HOST_PORTABLE | HOST_MAPPED)

    def close(self) -> None:
        self._driver.call("cuMemHostUnregister", self.address)


class CudaStream:
    """A queue of launches, in order."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = Handle()
        driver.call("cuStreamCreate", byref(self.handle), NON_BLOCKING)

    @property
    def number(self) -> int:
        """The handle as an integer."""
        return self.handle.value or 0

    def synchronize(self) -> None:
        self._driver.call("cuStreamSynchronize", self.handle)

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Record the launches on this stream in a graph, which is ready after the block."""
        graph, ready = Handle(), CudaGraph(self._driver)
        self._driver.call("cuStreamBeginCapture_v2", self.handle, RELAXED)
        yield ready
        self._driver.call("cuStreamEndCapture", self.handle, byref(graph))
        self._driver.call("cuGraphInstantiateWithFlags", byref(ready.handle), graph, 0)
        self._driver.call("cuGraphDestroy", graph)

    def close(self) -> None:
        """Wait for all launches, then destroy the stream."""
        self.synchronize()
        self._driver.call("cuStreamDestroy_v2", self.handle)


class CudaEvent:
    """A point of a stream for which other streams can wait. Streams are handles."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handle = Handle()
        driver.call("cuEventCreate", byref(self._handle), NO_TIMING)

    def record(self, stream: int) -> None:
        """Set the event at the present point of ``stream``; an earlier point no longer counts."""
        self._driver.call("cuEventRecord", self._handle, stream)

    def wait(self, stream: int) -> None:
        """Make later launches on ``stream`` wait for the point; they do not wait if none is recorded."""
        self._driver.call("cuStreamWaitEvent", stream, self._handle, 0)

    def close(self) -> None:
        """Wait for the point, then destroy the event."""
        self._driver.call("cuEventSynchronize", self._handle)
        self._driver.call("cuEventDestroy_v2", self._handle)


class CudaGraph:
    """Launches of a stream, as one."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = Handle()

    def replay(self, stream: CudaStream) -> None:
        self._driver.call("cuGraphLaunch", self.handle, stream.handle)

    def close(self) -> None:
        self._driver.call("cuGraphExecDestroy", self.handle)


class Driver:
    """One GPU's primary context, with our kernels. Raises ImportError, in one line, for what is missing."""

    def __init__(self, index: int = 0, compiler: Compiler = BY_NVRTC) -> None:
        self.index = index
        self._library = load([os.environ.get(LIBCUDA) or "libcuda.so.1"], SIGNATURES)
        device, context = c_int(), Handle()
        try:
            self._check("cuInit", self._library.cuInit(0))
            self._check("cuDeviceGet", self._library.cuDeviceGet(byref(device), index))
            self.device = device.value
            major, minor, vmm, handles = map(self.attribute, (CC_MAJOR, CC_MINOR, VMM, POSIX_HANDLES))
            self._check("cuDevicePrimaryCtxRetain", self._library.cuDevicePrimaryCtxRetain(byref(context), self.device))
        except CudaError as error:
            raise ImportError(f"no GPU that can be used: {error}") from error
        self._context = context
        self.architecture = 10 * major + minor
        self.shares_memory = bool(vmm and handles)
        self.properties = AllocationProperties(PINNED, FILE_DESCRIPTOR, Location(DEVICE, index))
        self.properties.flags.rdma = self.attribute(NIC_REACHES_VMM)
        granularity, module = c_size_t(), Handle()
        try:
            if self.shares_memory:
                self.call("cuMemGetAllocationGranularity", byref(granularity), byref(self.properties), 0)
            self.call("cuModuleLoadData", byref(module), compiler.build(self.architecture))
        except (ImportError, RuntimeError, CudaError) as error:
            self._library.cuDevicePrimaryCtxRelease_v2(self.device)
            fix = "" if isinstance(error, ImportError) else f"; pip install an {compiler.package} that fits the driver"
            raise ImportError(f"{error}{fix}") from error
        self.granularity = granularity.value or 1
        self._module = module
        self.functions: dict[str, Handle] = {}  # kernels that are loaded, by name

    def attribute(self, number: int) -> int:
        value = c_int()
        self._check("cuDeviceGetAttribute", self._library.cuDeviceGetAttribute(byref(value), number, self.device))
        return value.value

    @property
    def pci_address(self) -> str:
        """The name of the device in Linux's /sys, "0000:81:00.0"."""
        text = ctypes.create_string_buffer(PCI_BYTES)
        self._check("cuDeviceGetPCIBusId", self._library.cuDeviceGetPCIBusId(text, PCI_BYTES, self.device))
        return text.value.decode().lower()

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver in our context, which need not be this thread's. Raises CudaError."""
        with self.current():
            self._check(name, getattr(self._library, name)(*arguments))

    def allocate(self, data: bytes, nbytes: int = 0) -> int:
        """Return the address, for ``free``, of ``nbytes`` or more of device memory that begin with ``data``."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), max(len(data), nbytes))
        self.write(address.value, data)
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def write(self, address: int, data: bytes) -> None:
        """Write ``data``. After the call a peer's NIC and kernels of any stream see it, and all that was set before."""
        self.call("cuMemcpyHtoD_v2", address, data, len(data))
        self.call("cuStreamSynchronize", None)  # the copy may return before (CUDA, "API synchronization behavior")

    def read(self, address: int, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, address, nbytes)
        return data.raw

    def load(self, kernel: str) -> Handle:
        """Return the kernel ``lamina_<kernel>``. Load it before it is captured."""
        function = self.functions.get(kernel)
        if function is None:
            function = Handle()
            self.call("cuModuleGetFunction", byref(function), self._module, f"lamina_{kernel}".encode())
            self.functions[kernel] = function
        return function

    def launch(self, stream: int, kernel: str, *arguments: int, blocks: int = 1) -> None:
        """Launch ``lamina_<kernel>``, whose parameters all have 8 bytes. ``stream``: a handle."""
        function = self.load(kernel)
        values = [c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, stream, pointers, None)

    def close(self) -> None:
        if self._module:
            self.call("cuModuleUnload", self._module)
            self._module = Handle()
            self._library.cuDevicePrimaryCtxRelease_v2(self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make our context this thread's in the block."""
        self._check("cuCtxPushCurrent", self._library.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(byref(Handle()))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({status})")
