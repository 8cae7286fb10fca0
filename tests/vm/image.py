"""The guest's kernel and initial RAM disk, made of this Debian's packages and cached.

``python tests/vm/image.py`` builds them and prints where they are, or says what has to be installed.
"""

from __future__ import annotations

import hashlib
import lzma
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("init.sh")
CACHE = ROOT / "build" / "vm"
KERNEL = "linux-image-amd64"  # not the cloud kernel, which lacks rdma_rxe
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_lat": "perftest",
    "dpkg-deb": "dpkg",
    "setpriv": "util-linux",
}
FILES = {  # the last one where Lamina is built: the engine of verbs is made with it
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    str(PYVERBS / "qp*.so"): "python3-pyverbs",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
}
# crc32_generic: rdma_rxe asks for it by name when a link is added, not when it is loaded
MODULES = (
    "virtio_pci", "virtio_console", "virtio_net", "9pnet_virtio", "9p", "veth", "sch_netem", "crc32_generic",
    "ib_uverbs", "rdma_ucm", "rdma_rxe",
)  # fmt: skip
ETC = ("ld.so.cache", "passwd", "group", "nsswitch.conf", "hosts", "libibverbs.d")
SYSTEM_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # not everybody's PATH has them


@dataclass(frozen=True)
class Image:
    kernel: Path
    initrd: Path
    shares: tuple[Path, ...]  # folders of this machine that the guest sees, read-only, at the same paths


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=":".join(SYSTEM_PATHS))


def missing() -> str:
    """Returns what this machine lacks to run a guest, as a sentence with its fix; empty if nothing."""
    if platform.machine() != "x86_64" or program("apt-get") is None:
        return "the guest needs an x86-64 Debian or Ubuntu"
    packages = {package for name, package in PROGRAMS.items() if program(name) is None}
    packages |= {package for name, package in FILES.items() if not list(Path("/").glob(name[1:]))}
    built = f"qp.cpython-{sys.version_info.major}{sys.version_info.minor}-*"
    if PYVERBS.exists() and find_spec("pyverbs") is None and not list(PYVERBS.glob(built)):
        return (
            f"the distribution's pyverbs is not for Python {platform.python_version()}; use the distribution's Python"
        )
    return f"missing: apt-get install --no-install-recommends {' '.join(sorted(packages))}" if packages else ""


def shared_folders() -> tuple[Path, ...]:
    """The system, the interpreter, the environment and the checkout; none inside another."""
    wanted = {Path(p).resolve() for p in ("/usr", sys.base_prefix, sys.prefix, ROOT)}
    return tuple(sorted(p for p in wanted if not any(parent in wanted for parent in p.parents)))


def build() -> Image:
    """Raises RuntimeError where something is missing, CalledProcessError where the kernel cannot be had."""
    if lack := missing():
        raise RuntimeError(lack)
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel, modules, release = _kernel()
    shares = shared_folders()
    recipe = repr((INIT.read_bytes(), Path(__file__).read_bytes(), str(kernel), shares))
    initrd = CACHE / f"initrd-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if not initrd.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _fill(Path(scratch), _with_dependencies(modules, release), shares)
            _pack(Path(scratch), initrd)
    return Image(kernel, initrd, shares)


def _kernel() -> tuple[Path, Path, str]:
    """(kernel, the folder with its lib/modules, its release) of an installed package, else of a downloaded one."""
    for root in (Path("/"), CACHE):
        for kernel in sorted((root / "boot").glob("vmlinuz-*"), reverse=True):
            release = kernel.name.removeprefix("vmlinuz-")
            if list((root / "lib/modules" / release).glob("**/rdma_rxe.ko*")):
                return kernel, root, release
    _download_kernel()
    return _kernel()


def _download_kernel() -> None:
    """Unpack boot/ and lib/modules/ of the distribution's kernel package into the cache. Needs no root."""
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if not names:
        raise RuntimeError(f"apt knows no package {KERNEL}; run apt-get update")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        subprocess.run(["apt-get", "download", "-qq", names[0]], cwd=scratch, check=True, stderr=subprocess.DEVNULL)
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True)
        release = names[0].removeprefix("linux-image-")
        subprocess.run([str(program("depmod")), "-b", scratch, release], check=True)
        if not list(Path(scratch, "lib/modules", release).glob("**/rdma_rxe.ko*")):
            raise RuntimeError(f"package {names[0]} has no module rdma_rxe")
        for name in ("lib", "boot"):
            shutil.rmtree(CACHE / name, ignore_errors=True)
            (Path(scratch) / name).rename(CACHE / name)


def _fill(root: Path, modules: list[Path], shares: tuple[Path, ...]) -> None:
    """Write the files of the initial RAM disk under ``root``."""
    for folder in ("modules", "etc", "proc", "sys", "dev", "tmp", "run"):
        (root / folder).mkdir()
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    for name in ETC:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, root / "etc" / name)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    shutil.copy(str(program("busybox")), root / "busybox")
    shutil.copy(INIT, root / "init")
    (root / "init").chmod(0o755)
    (root / "shares").write_text("".join(f"{path}\n" for path in shares))
    names = []
    for module in modules:
        name = module.name.removesuffix(".xz")
        names.append(name)
        data = module.read_bytes()
        (root / "modules" / name).write_bytes(lzma.decompress(data) if module.suffix == ".xz" else data)
    (root / "modules/order").write_text("".join(f"{name}\n" for name in names))


def _with_dependencies(root: Path, release: str) -> list[Path]:
    """MODULES and what they need, in the order in which they load."""
    found: dict[Path, None] = {}
    for name in MODULES:
        command = [str(program("modprobe")), "-d", str(root), "-S", release, "--show-depends", name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        found |= {Path(line.split()[1]): None for line in shown.stdout.splitlines() if line.startswith("insmod")}
    return list(found)


def _pack(root: Path, archive: Path) -> None:
    """Write ``root`` as a cpio archive (the kernel's initramfs format)."""
    names = "".join(f"./{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    command = [str(program("cpio")), "--create", "--format=newc", "--quiet", "--owner=0:0"]
    packed = subprocess.run(command, cwd=root, input=names.encode(), capture_output=True, check=True)
    partial = archive.with_suffix(".partial")
    partial.write_bytes(packed.stdout)
    partial.rename(archive)


if __name__ == "__main__":
    try:
        print(build())
    except (RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
