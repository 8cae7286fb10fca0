"""The end of a guest whose tests are killed. Needs no QEMU: a program that sleeps takes its place."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from image import program

SOON_S = 20.0  # on a busy machine
PARENT = """
import signal
from pathlib import Path
from guest import Guest
from image import Image

class Sleeper(Guest):
    def _command(self):
        return ["sh", "-c", "echo $$; exec sleep 300"]

sleeper = Sleeper(Image(Path(), Path(), ()))
sleeper._start()
print(sleeper._process.stdout.readline().decode(), end="", flush=True)
signal.pause()
"""


@pytest.mark.no_retry
@pytest.mark.skipif(program("setpriv") is None, reason="no setpriv: install util-linux")
def test_a_guest_ends_with_the_process_that_has_started_it() -> None:
    """Also where that is killed, and can end nothing itself."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        guest = os.pidfd_open(int(parent.stdout.readline()))
        try:
            ended = select.poll()
            ended.register(guest, select.POLLIN)
            assert not ended.poll(0)
            parent.kill()
            assert ended.poll(SOON_S * 1000), "it lives on"
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(guest, signal.SIGKILL)
            os.close(guest)
