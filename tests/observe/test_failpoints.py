"""A process ends at the event that another process has named, and at no other one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.observe.failpoints import FAILPOINT, Failpoint, recorder
from lamina.observe.trace import NULL_RECORDER, Event, Recorder

CHILD = """
import os, sys
from lamina.observe.trace import Event
from lamina.observe.failpoints import recorder
from lamina.protocol.step_plan import MessageKey, MessageKind
trace, key = recorder(False), MessageKey(MessageKind.Q)
print(os.getpid(), flush=True)
for line in sys.stdin:
    event = Event(int(line))
    trace.add(event, 0.0, key)
    trace.put(event, 0.0, 0.0, key)
    print(event.name, flush=True)
"""


def said(child: subprocess.Popen[str], event: Event) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{event:d}\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_a_process_ends_at_the_event_that_is_named(tmp_path: Path) -> None:
    wire = Failpoint(tmp_path / "wire")
    assert not wire.has_fired
    command, env = [sys.executable, "-c", CHILD], {**os.environ, FAILPOINT: str(tmp_path / "wire")}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        wire.arm(os.getpid(), Event.SEND_Q, 1)
        assert said(child, Event.SEND_Q) == "SEND_Q"  # it is another's
        wire.arm(pid, Event.SEND_Q, 1)
        assert not wire.disarm()
        assert said(child, Event.SEND_Q) == "SEND_Q"
        wire.arm(pid, Event.SEND_KV, 2)
        assert said(child, Event.SEND_Q) == "SEND_Q"
        assert said(child, Event.SEND_KV) == "SEND_KV"
        assert not wire.has_fired
        assert said(child, Event.SEND_KV) == ""
        assert child.wait() == -signal.SIGKILL
    assert wire.has_fired
    assert wire.disarm()
    assert not wire.has_fired


def test_there_is_none_unless_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAILPOINT, raising=False)
    assert recorder(False) is NULL_RECORDER
    assert type(recorder(True)) is Recorder
    assert (NULL_RECORDER.native_buffer, Recorder(1).native_buffer) == (None, b"")


@pytest.mark.parametrize("kind", ["a link", "other", "open", "no folder"])
def test_a_file_that_is_no_tripwire_is_refused_by_the_name_of_the_variable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wire"
    if kind == "a link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "no folder":
        path = tmp_path / "none" / "wire"
    else:
        path.write_bytes(b"hello" if kind == "other" else bytes(24))
        path.chmod(0o600 if kind == "other" else 0o644)
    with pytest.raises(ValueError, match=f"^{FAILPOINT}=.*: unset it; drill and check set it$"):
        Failpoint(path)
    assert not (tmp_path / "elsewhere").exists()
