"""Another user of the host: their processes reach no file, socket or memory of a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from target import serving
from verdict import Verdict, first_failure

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
for line in open("/proc/net/unix").read().splitlines()[1:]:
    name = line.split()[7:8]
    if name and name[0].startswith("@") and "lamina" in name[0]:
        def talk(name=name[0]):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(3)
                sock.connect("\\0" + name[1:])
                sock.sendall(b"x" * 64)
                if sock.recv(1):
                    raise SystemExit
        try:
            talk()
        except SystemExit:
            done.append("is answered at " + name[0])
        except OSError:
            pass
print(json.dumps(done))
"""


def attack(folder: Path, *, opened: bool = False) -> Verdict:
    """``opened``: with a journal and a key file that all may read."""
    if os.getuid() != 0:
        return Verdict(None, "needs root, to become another user")
    python = next((path for path in INTERPRETERS if os.access(path, os.X_OK)), os.path.realpath(sys.executable))
    folder.chmod(0o755)
    key = folder / "key"
    key.write_text("k" * 64)
    key.chmod(0o644 if opened else 0o600)
    with serving(folder, f"--journal={folder / 'journal'}") as target:
        if opened:
            (folder / "journal").chmod(0o755)
        words = [python, "-I", "-c", TRY, str(target.pid), str(folder / "journal"), str(key)]
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
    return first_failure(checks, "another user reached no file, memory, process or socket")
