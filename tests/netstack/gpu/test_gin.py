"""The transport gin without NCCL, a NIC or a GPU: over stand-ins. Its kernels and structs are compared with NCCL's
headers.

The contract runs over it in tests/contract/test_transports.py, as "gin on a CPU".

Covers: netstack/gin/nccl.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_stand_in
import pytest
from programs import CSRC, build, run
from test_namespaces import Cable, cable, pull_out  # noqa: F401 - a fixture
from wiring import KEY, ROOT, SOON_S, connect, send

from lamina import netstack
from lamina.netstack.bootstrap import handshake
from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Hello
from lamina.netstack.bootstrap.listener import StreamListener
from lamina.netstack.bootstrap.self_test import SELF_TEST_TAG
from lamina.netstack.contract.fabric import DEATH_NOTICED_S, HOST_NOTICED_S
from lamina.netstack.cuda.channel_memory import inbox_bytes
from lamina.netstack.cuda.driver import CudaStream, Driver, Pinned
from lamina.netstack.cuda.kernel_launches import KERNELS_OF_CALLS
from lamina.netstack.gin import compiler, gin, nccl
from lamina.netstack.host.native_module import ABORTED, OK, TIMEOUT
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.rdma.verbs import ASKS

SMALL = netstack.Geometry(slots=3, slot_bytes=257)
HERE = Path(__file__).resolve().parent


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The stand-in, which is empty again after each test."""
    with cuda_stand_in.scheme_of(cuda_stand_in.GIN_STAND_IN):
        library = ctypes.CDLL(os.environ["LAMINA_LIBNCCL"])
        before = library.fake_cuda_live(), library.fake_nccl_live()
        yield library
        deadline = time.monotonic() + SOON_S  # what was begun in vain is given back by a thread
        while (after := (library.fake_cuda_live(), library.fake_nccl_live())) != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert after == before


@pytest.fixture
def fabric(library: ctypes.CDLL) -> Iterator[netstack.Fabric]:
    with closing(netstack.open("gin", key=KEY)) as fabric:
        yield fabric


def headers() -> list[Path]:
    """NCCL's own, and CUDA's. Skips where they are not."""
    folders = [*compiler.header_folders(), Path("/usr/local/cuda/include"), Path("/usr/local/cuda/include/cccl")]
    if not any((folder / "nccl_device.h").is_file() for folder in folders):
        pytest.skip("no NCCL headers: pip install nvidia-nccl-cu13")
    return folders


def test_two_processes_move_bytes(library: ctypes.CDLL) -> None:
    """The command is that of two hosts, with calls and kernels: every payload is compared."""
    line = [sys.executable, "-m", "lamina.netstack", "bench", "--transport", "gin", "--pattern", "rtt", "--json"]
    flags = ["--sizes", "8,4KiB", "--count", "20", "--warm-up", "2"]
    for more in ([], ["--device", "cuda"]):
        done = subprocess.run(
            [*line, *flags, *more], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in done.stdout.splitlines()]
        drivers = ["device", "kernel"] if more else ["python"]
        assert [(row["driver"], row["size"]) for row in rows] == [(d, s) for d in drivers for s in (8, 4096)]
        assert all(row["verified"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("weakened", [False, True])
def test_messages_are_in_order_where_the_network_is_not(weakened: bool, tmp_path: Path) -> None:
    """A weak signal, which follows its own put alone, counts a message that came before another one."""
    headers = CSRC
    if weakened:
        headers = tmp_path / "csrc"
        shutil.copytree(CSRC / "netstack", headers / "netstack")
        header = headers / "netstack" / "gin_channel.h"
        text = header.read_text()
        header.write_text(text.replace("ncclGin_StrongVASignalAdd", "ncclGin_WeakVASignalAdd"))
        assert header.read_text() != text
    flags = ["-O1", "-Wno-unknown-pragmas", "-Wno-unused-function", f"-I{HERE}", f"-I{cuda_stand_in.HEADERS}"]
    program = build(tmp_path, HERE / "gin_order.cpp", *flags, headers=headers)
    if not weakened:
        assert run(program, "200") == "messages 200\n"
        return
    done = subprocess.run([str(program), "200"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "out of its order" in done.stdout or "a byte came wrong" in done.stdout


def test_what_nccl_reports_ends_the_channel_on_both_sides(library: ctypes.CDLL, fabric: netstack.Fabric) -> None:
    a, b = connect(fabric, geometry=SMALL)
    library.fake_nccl_fail(6)
    start = time.monotonic()
    try:
        with pytest.raises(netstack.PeerFault, match="NCCL reports: remote process exited") as fault:
            a.wait_signal(timeout_s=SOON_S)
        assert "\n" not in str(fault.value)
    finally:
        library.fake_nccl_fail(0)
    with pytest.raises(netstack.PeerFault, match="the peer aborted: NCCL reports"):
        b.wait_signal(timeout_s=SOON_S)
    assert time.monotonic() - start < 10 * DEATH_NOTICED_S


def test_kernels_that_wait_hear_of_what_nccl_reports(library: ctypes.CDLL, fabric: netstack.Fabric) -> None:
    """Before their time is over, though no call of the host looks."""
    a, b = connect(fabric, geometry=SMALL)
    assert isinstance(b, gin.GinChannel)
    side = b.hand_to_device()
    mail, stream = Pinned(side.driver, 4096), CudaStream(side.driver)
    at = mail.address
    library.fake_nccl_fail(6)
    try:
        side.receive_due(stream.number, at + 1024, at, at + 16, at + 64, int(1e9 * SOON_S), at + 48)
        stream.synchronize()
        status = int.from_bytes(mail.view[48:52], "little")
        assert status == ABORTED
        with pytest.raises(netstack.PeerFault, match="NCCL reports: remote process exited"):
            side.check(status)
    finally:
        library.fake_nccl_fail(0)
    mail.close()
    stream.close()
    a.close()
    b.close()


def connections() -> Iterator[tuple[int, int]]:
    """Yields SO_KEEPALIVE and TCP_USER_TIMEOUT of each connected TCP socket of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family == socket.AF_INET and sock.getpeername():
                    options = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    alive, patience_ms = (sock.getsockopt(*option) for option in options)
                    yield alive, patience_ms


def test_a_life_line_asks_whether_its_host_is_there(fabric: netstack.Fabric) -> None:
    ends = connect(fabric, geometry=SMALL)
    asking = [patience_ms for alive, patience_ms in connections() if alive]
    assert len(asking) == len(ends)
    assert all(0 < patience_ms < 1000 * HOST_NOTICED_S for patience_ms in asking)


@pytest.mark.slow
def test_a_host_that_vanishes_is_noticed_by_a_peer_that_only_waits(library: ctypes.CDLL, cable: Cable) -> None:  # noqa: F811
    pull_out(cable, "gin", os.environ)


def test_a_close_waits_for_what_was_put_and_for_a_dead_network_not_long(
    library: ctypes.CDLL, fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = connect(fabric, geometry=SMALL)
    send(a, b"last words")
    a.close()
    assert b.wait_signal(timeout_s=SOON_S).data == b"last words"
    library.fake_nccl_stop(True)
    try:
        a, b = connect(fabric, geometry=SMALL)
        send(a, b"nobody carries this")
        monkeypatch.setattr("lamina.netstack.cuda.kernel_channel.STALL_NS", 10**4)
        a.close()
        with pytest.raises(netstack.PeerFault, match="the peer closed the channel"):
            b.wait_signal(timeout_s=SOON_S)
    finally:
        library.fake_nccl_stop(False)


@pytest.mark.parametrize("looks", [1, 5, 10**9], ids=["soon", "later", "never"])
def test_memory_goes_once_nothing_of_a_communicator_uses_it(
    looks: int, library: ctypes.CDLL, fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may take its time to end a device side or a window; until then it takes no other call. Whatever does not end
    goes with the communicator."""
    monkeypatch.setattr(nccl, "END_S", 0.05)
    misused, live = library.fake_nccl_misused(), library.fake_nccl_live()
    a, b = connect(fabric, geometry=SMALL)
    library.fake_nccl_slow(looks)
    try:
        a.close()
        b.close()
    finally:
        library.fake_nccl_slow(0)
    assert (library.fake_nccl_misused(), library.fake_nccl_live()) == (misused, live)


@pytest.mark.long
@pytest.mark.parametrize("step", ["FAKE_NCCL_REGISTERS_NOTHING", "FAKE_NCCL_MAKES_NO_DEVICE_SIDE"])
def test_what_is_given_up_half_made_is_aborted_as_it_is(
    step: str, library: ctypes.CDLL, fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(step, "1")
    monkeypatch.setattr(gin, "MAKE_S", 0.2)
    misused = library.fake_nccl_misused()
    with pytest.raises(netstack.HandshakeError, match="the peer did not join in time"):
        connect(fabric, geometry=SMALL)
    deadline = time.monotonic() + SOON_S
    while any(thread.name == "lamina-gin" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert library.fake_nccl_misused() == misused


def test_who_waits_for_nccl_holds_up_nobody(fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector has made its communicator, the listener has not yet; another peer gets in meanwhile."""
    assert isinstance(fabric, gin.GinFabric)
    made, may_end = threading.Event(), threading.Event()

    class Slow(nccl.Communicator):
        """Is not made on the listener's side until it may be."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._listens = arguments[4] == 1  # its rank

        def device_side(self, *arguments: Any) -> bytes:
            if self._listens:
                assert may_end.wait(SOON_S)
            else:
                made.set()
            return super().device_side(*arguments)

    monkeypatch.setattr(gin, "Communicator", Slow)
    terms = netstack.Terms(outbound=SMALL, inbound=SMALL)
    listener = fabric.listen()
    with closing(TcpFabric(KEY)) as tcp, ThreadPoolExecutor(2) as pool:
        tcp.join(listener)
        accepting = pool.submit(lambda: [listener.accept(timeout_s=SOON_S) for _ in range(2)])
        connecting = pool.submit(fabric.connect, listener.url, terms, timeout_s=SOON_S)
        try:
            assert made.wait(SOON_S)
            friend = tcp.connect(listener.url.replace("gin", "tcp"), terms, timeout_s=SOON_S)
        finally:
            may_end.set()
        ends = [friend, connecting.result(SOON_S)]
        for n, (end, other) in enumerate(zip(ends, accepting.result(SOON_S), strict=True)):
            send(end, b"%d" % n)
            assert other.wait_signal(timeout_s=SOON_S).data == b"%d" % n


def test_a_peer_that_leaves_meanwhile_is_given_up_at_once(
    fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for until NCCL has had its time, nor taken for silent."""
    monkeypatch.setenv("FAKE_NCCL_MEETS_NOBODY", "1")
    monkeypatch.setattr(gin, "MAKE_S", 1e6)
    listener = fabric.listen()
    assert isinstance(listener, StreamListener)
    hello, deadline = Hello(scheme="gin", outbound=SMALL, inbound=SMALL), time.monotonic() + SOON_S

    def leave() -> None:
        host, port = listener.url.rpartition("/")[2].split(":")
        with socket.create_connection((host, int(port)), SOON_S) as sock:
            session = handshake.run(sock, handshake.offer(KEY, hello), listener.url, deadline=deadline)
            card = gin.CARD.pack(gin.MAGIC, 23203, b"fakenccl\2\0/fake-nccl-of-nobody")
            handshake.run(
                sock, exchange_cards(session, card, lambda _: None, listening=False), listener.url, deadline=deadline
            )

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leave)
        while listener.half_open or not left.done():
            with pytest.raises(netstack.ChannelTimeout):
                listener.accept(timeout_s=0.05)
        left.result()
    assert listener.refusal == "ncclCommInitRankConfig: the peer did not join in time"


@pytest.mark.parametrize("contexts", [2, 1])
def test_bulk_has_a_context_of_its_own_where_nccl_makes_two(
    contexts: int, library: ctypes.CDLL, fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages come on the first context while that of bulk stands still; where there is only one, it carries both."""
    if contexts == 1:
        monkeypatch.setenv("FAKE_NCCL_HAS_ONE_CONTEXT", "1")
    library.fake_nccl_hold(1)
    try:
        a, b = connect(fabric, geometry=SMALL, kernels=True)
    finally:
        library.fake_nccl_hold(-1)
    assert isinstance(a, gin.GinChannel)
    assert isinstance(b, gin.GinChannel)
    sides = a.hand_to_device(), b.hand_to_device()
    driver = sides[0].driver
    mail, streams = Pinned(driver, 4096), [CudaStream(driver) for _ in range(2)]
    at = mail.address
    mail.view[:8] = (5).to_bytes(8, "little")
    for sends, takes in zip((sides[0].bulk, sides[0]), (sides[1].bulk, sides[1]), strict=True):
        mail.view[512:517] = b"bulk!" if sends is sides[0].bulk else b"first"
        sends.send(streams[0].number, at + 512, at, at + 16, int(1e9 * SOON_S), at + 48)
        streams[0].synchronize()
        if sends is sides[0]:
            takes.receive_due(streams[1].number, at + 1024, at, at + 16, at + 64, int(1e9 * SOON_S), at + 52)
            streams[1].synchronize()
            assert bytes(mail.view[48:56]) == bytes(8)
            assert mail.view[1024:1029] == b"first"
    rest = at + 2048, at, at + 16, at + 64, int(1e9 * (SOON_S if contexts == 1 else 0.05)), at + 56
    sides[1].bulk.receive_due(streams[1].number, *rest)
    streams[1].synchronize()
    assert int.from_bytes(mail.view[56:60], "little") == (OK if contexts == 1 else TIMEOUT)
    assert mail.view[2048:2053] == (b"bulk!" if contexts == 1 else bytes(5))
    monkeypatch.setattr("lamina.netstack.cuda.kernel_channel.STALL_NS", 10**4)
    for end in (a, b):
        end.close()
    for part in (*streams, mail):
        part.close()


@pytest.mark.parametrize("listening", [False, True])
def test_a_window_for_hosts_has_no_place_for_bulk(listening: bool) -> None:
    session = AuthenticatedTerms(scheme="gin", outbound=SMALL, inbound=netstack.Geometry(slots=9, slot_bytes=5000))
    lanes, nbytes = gin.places_of(session, listening=listening)
    more, more_bytes = gin.places_of(replace(session, kernels=True), listening=listening)
    assert lanes == more[:1]
    assert len(more) == 2
    inbox = -(-inbox_bytes(SMALL) // gin.PAGE) * gin.PAGE
    assert (more[1].to, more[1].origin)[:: -1 if listening else 1] == (nbytes, nbytes + inbox)
    assert more_bytes == nbytes + inbox + gin.PAGE, "the inbox of bulk, and credits of it"


def test_gin_answers_no_trials(fabric: netstack.Fabric) -> None:
    """Each trial would cost a communicator and GPU memory, at the request of any holder of the key, and no peer asks
    for one.
    """
    assert isinstance(fabric, gin.GinFabric)
    trial = Hello(scheme=f"gin{ASKS}", outbound=SELF_TEST_TAG, inbound=SELF_TEST_TAG)
    with closing(TcpFabric(KEY)) as tcp, ThreadPoolExecutor(1) as pool:
        listener = tcp.listen()
        fabric.join(listener)
        host, port = listener.url.rpartition("/")[2].split(":")
        accepting = pool.submit(listener.accept, timeout_s=SOON_S)
        with (
            socket.create_connection((host, int(port)), SOON_S) as sock,
            pytest.raises(netstack.HandshakeError, match="does not speak gin"),
        ):
            handshake.run(sock, handshake.offer(KEY, trial), listener.url, deadline=time.monotonic() + SOON_S)
        listener.close()
        with pytest.raises(netstack.ChannelAborted):
            accepting.result(SOON_S)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FAKE_NCCL_VERSION", "22903", "NCCL is 22903, whose device API is too old: 23200 is the least"),
        ("LAMINA_LIBNCCL", "/nowhere/lib/libnccl.so.2", r"libnccl.so.2 does not load"),
        ("LAMINA_NVCC", "/bin/false", r"kernels.cu does not compile for sm_90: "),
        ("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1", r"libcuda.so.1 does not load"),
        ("LAMINA_CUDA_DEVICE", "first", r"LAMINA_CUDA_DEVICE is the number of a GPU, such as 0, not 'first'"),
        ("LAMINA_RDMA_PARTITION", "0x8001", r"LAMINA_RDMA_PARTITION is not for NCCL: set NCCL_IB_PKEY_VALUE"),
        ("LAMINA_RDMA_SERVICE_LEVEL", "3", r"LAMINA_RDMA_SERVICE_LEVEL is not for NCCL: set NCCL_IB_SL"),
        ("LAMINA_RDMA_TIMEOUT", "18", r"LAMINA_RDMA_TIMEOUT is not for NCCL: set NCCL_IB_TIMEOUT"),
        ("LAMINA_RDMA_TRAFFIC_CLASS", "many", r"LAMINA_RDMA_TRAFFIC_CLASS is a number"),
    ],
)
def test_what_is_missing_is_one_line_with_the_fix(
    variable: str, value: str, words: str, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ImportError, match=words) as refusal:
        netstack.open("gin", key=KEY)
    fix = "pip install nvidia-nccl-cu13 and a CUDA toolkit with nvcc, or take --transport mlx5 or verbs"
    assert str(refusal.value).endswith(fix)
    assert "\n" not in str(refusal.value)


def test_a_compiler_that_fails_says_its_first_words_in_one_line(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\nprintf 'a note\\nk.cu(1): error: the first\\n\\nk.cu(2): error: the last\\n' >&2; exit 1\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("LAMINA_NVCC", str(nvcc))
    with pytest.raises(ImportError, match=r"for sm_90: k.cu\(1\): error: the first; pip install an nvidia-cuda") as e:
        netstack.open("gin", key=KEY)
    assert "\n" not in str(e.value)


def test_a_compiler_that_is_missing_is_named(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    with pytest.raises(ImportError, match="here: nvcc, which compiles kernels with NCCL's headers, is not there; pip"):
        netstack.open("gin", key=KEY)


def test_headers_that_are_missing_are_not_called_a_compiler(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "header_folders", list)
    with pytest.raises(ImportError, match="here: NCCL's headers are not there; pip install nvidia-nccl-cu13 and") as e:
        netstack.open("gin", key=KEY)
    assert "nvidia-cuda-nvcc" not in str(e.value)


@pytest.mark.long
def test_a_peer_whose_nccl_finds_no_nic_is_told_why(fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_HAS_NO_GIN", "1")
    with pytest.raises(netstack.HandshakeError, match=r"NCCL finds no NIC that kernels can use.*NCCL_DEBUG=INFO"):
        connect(fabric, geometry=SMALL)


@pytest.mark.long
def test_a_peer_that_comes_to_no_communicator_is_given_up(
    fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_MEETS_NOBODY", "1")
    monkeypatch.setattr(gin, "MAKE_S", 0.2)
    with pytest.raises(netstack.HandshakeError, match=r"ncclCommInitRankConfig: the peer did not join in time"):
        connect(fabric, geometry=SMALL)


def test_a_peer_of_another_nccl_is_refused_by_name(fabric: netstack.Fabric) -> None:
    """Each of the two would take a struct of the other's version for its own."""
    listener = fabric.listen()
    library = nccl.NcclLibrary()
    provider = gin.GinProvider(Driver(0, compiler.BY_NVCC), library, traffic_class=0)
    library.version = 23301
    with closing(gin.GinFabric(KEY, way=provider)) as other, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=3.0)
        with pytest.raises(netstack.HandshakeError):
            other.connect(listener.url, netstack.Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
        with pytest.raises(netstack.ChannelTimeout, match="its NCCL is 23301, ours is 23203: install one on both"):
            accepted.result(SOON_S)


def test_structs_and_functions_are_those_of_the_headers(tmp_path: Path) -> None:
    """Field by field, of the version that is installed."""
    structs: dict[str, type[ctypes.Structure]] = {
        "ncclConfig_t": nccl.Config, "ncclDevCommRequirements_t": nccl.Requirements,
        "ncclCommProperties_t": nccl.Properties,
    }  # fmt: skip
    lines = [
        line
        for name, struct in structs.items()
        for line in (f"STRUCT({name});", *(f"FIELD({name}, {field[0]});" for field in struct._fields_))
    ]
    (tmp_path / "fields.h").write_text("\n".join(lines))
    includes = [f"-I{folder}" for folder in headers()]
    program = build(tmp_path, HERE / "nccl_check.cpp", *includes, f'-DFIELDS="{tmp_path}/fields.h"', headers=tmp_path)
    there = [
        line
        for name, struct in structs.items()
        for line in (
            f"{name} {ctypes.sizeof(struct)}",
            *(f"{f[0]} {getattr(struct, f[0]).offset} {getattr(struct, f[0]).size}" for f in struct._fields_),
        )
    ]
    assert run(program).splitlines() == there


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_compile_with_the_headers(architecture: int) -> None:
    """The call is that of the product, and gives no warning."""
    headers()
    try:
        image = compiler.build(architecture)
    except ImportError as error:
        pytest.skip(str(error))
    assert image[:4] == b"\x7fELF"
    for name in (*KERNELS_OF_CALLS, "reserve", "put", "take", "release", "rounds", "flush"):
        assert f"lamina_gin_{name}".encode() in image
