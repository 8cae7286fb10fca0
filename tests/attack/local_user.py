"""Another user of the host: their processes reach no file, socket or memory of a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from target import serving
from verdict import Verdict, first_failure

from lamina.utils.proc import descendants_of

NOBODY = 65534
INTERPRETERS = ("/usr/bin/python3", "/usr/local/bin/python3")  # that all users may run
# Runs as the other user; prints what it could do, as JSON.
TRY = """
import json, os, socket, sys
pid, journal, shared = int(sys.argv[1]), sys.argv[2], sys.argv[3]
done = []
def tried(what, work):
    try:
        work()
        done.append(what)
    except OSError:
        pass
tried("reads the journal", lambda: os.listdir(journal))
tried("reads the environment", lambda: open(f"/proc/{pid}/environ", "rb").read(1))
tried("reads the memory", lambda: open(f"/proc/{pid}/mem", "rb"))
tried("lists the files", lambda: os.listdir(f"/proc/{pid}/fd"))
tried("ends it", lambda: os.kill(pid, 0))
tried("reads a key file", lambda: open(shared).read())
def talk(name):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        sock.connect("\\0" + name[1:])
        sock.sendall(b"x" * 64)
        if not sock.recv(1):
            raise OSError("it was closed")
for name in sys.argv[4:]:
    tried("is answered at " + name, lambda: talk(name))
print(json.dumps(done))
"""


def attack(folder: Path, *, opened: bool = False) -> Verdict:
    """``opened``: with a journal and a key file that all may read."""
    if os.getuid() != 0:
        return Verdict(None, "needs root, to become another user")
    python = next((path for path in INTERPRETERS if os.access(path, os.X_OK)), os.path.realpath(sys.executable))
    with tempfile.TemporaryDirectory(prefix="lamina-attack-") as place:  # all folders above it are open
        return _attack(Path(place), python, opened=opened)


def _attack(folder: Path, python: str, *, opened: bool) -> Verdict:
    folder.chmod(0o755)
    key = folder / "key"
    key.write_text("k" * 64)
    key.chmod(0o644 if opened else 0o600)
    with serving(folder, f"--journal={folder / 'journal'}") as target:
        if opened:
            (folder / "journal").chmod(0o755)
        names = _abstract_sockets(target.pid or 0)
        words = [python, "-I", "-c", TRY, str(target.pid), str(folder / "journal"), str(key), *names]
        try:
            found = subprocess.run(
                words,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except PermissionError:
            return Verdict(None, f"another user cannot start {python}")
        if found.returncode:
            return Verdict(None, f"another user's Python failed: {found.stderr.strip()[-80:]}")
        done = json.loads(found.stdout)
        checks = {f"another user {done[:1]}": not done, "others are served": target.serves()}
    return first_failure(checks, f"another user reached no file, memory or process, and none of {len(names)} sockets")


def _abstract_sockets(pid: int) -> list[str]:
    """The names, with @, of the abstract sockets of a process and of all that it has started."""
    inodes = set[str]()
    for each in (pid, *descendants_of(pid)):
        for file in Path(f"/proc/{each}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and row[7].startswith("@") and row[6] in inodes})
