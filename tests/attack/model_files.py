"""A model's directory that names code, pickles and hubs, or whose headers lie: nothing runs, and one line says why."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shipped import MODEL, ROOT
from verdict import Verdict, first_failure

MEMORY = 6 << 30  # bytes of address space
LIMIT_S = 120


class _Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._marker), "w")


def attack(folder: Path, *, trusts: bool = False) -> Verdict:
    """``trusts``: with --trust-remote-code, by which a model's code does run."""
    marker, checks = folder / "ran", dict[str, bool]()
    for name, make in HOSTILE[:1] if trusts else HOSTILE:
        model = make(folder / name, marker)
        done = _generate(model, *(["--trust-remote-code"] if trusts else []))
        lines = [line for line in done.stderr.splitlines() if line.startswith("lamina-launch")]
        checks[f"{name}: no code ran"] = not marker.exists()
        checks[f"{name}: it ends, not by a signal ({done.returncode})"] = done.returncode in (0, 1, 2)
        checks[f"{name}: a refusal is one line"] = done.returncode == 0 or len(lines) <= 1
        checks[f"{name}: no traceback"] = "Traceback" not in done.stderr
    return first_failure(checks, f"{len(HOSTILE)} directories ran nothing")


def _generate(model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = ["lamina-launch", "generate", str(model), "--prompt", "import", "--max-tokens", "2"]
    limited = f"import resource, runpy, sys; resource.setrlimit({resource.RLIMIT_AS}, ({MEMORY}, {MEMORY})); "
    limited += "sys.argv = sys.argv[1:]; runpy.run_module('lamina.cli.launch', run_name='__main__', alter_sys=True)"
    words = [sys.executable, "-c", limited, *command, *more]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, -1, "", f"no end after {LIMIT_S} s")


def _copy(to: Path) -> Path:
    shutil.copytree(ROOT / MODEL, to)
    return to


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def code(to: Path, marker: Path) -> Path:
    """Python of the model's own, for its configuration and its class."""
    model = _copy(to)
    text = "from transformers import {0} as Base\nopen({1!r}, 'w')\nclass {2}(Base):\n    pass\n"
    (model / "configuration_own.py").write_text(text.format("LlamaConfig", str(marker), "OwnConfig"))
    (model / "modeling_own.py").write_text(text.format("LlamaForCausalLM", str(marker), "OwnModel"))
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    _change(model / "config.json", auto_map=named, model_type="own", architectures=["OwnModel"])
    return model


def tokenizer_code(to: Path, marker: Path) -> Path:
    """Python of the model's own, for its tokenizer."""
    model = _copy(to)
    (model / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own:\n    pass\n")
    _change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    return model


def pickled(to: Path, marker: Path) -> Path:
    """Weights that are a pickle."""
    model = _copy(to)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs(marker)))
    return model


def attention(to: Path, marker: Path) -> Path:
    """A kernel of a hub, as its attention."""
    model = _copy(to)
    _change(model / "config.json", attn_implementation="kernels-community/evil", _attn_implementation="evil/kernel")
    return model


def template(to: Path, marker: Path) -> Path:
    """A template that reaches for the interpreter's builtins."""
    model = _copy(to)
    inner = "''.__class__.__mro__[1].__subclasses__()"
    outer = f"cycler.__init__.__globals__.os.system('touch {marker}')"
    (model / "chat_template.jinja").write_text(f"{{{{ {inner} }}}}{{{{ {outer} }}}}")
    return model


def deep(to: Path, marker: Path) -> Path:
    """A configuration that is nested without end."""
    model = _copy(to)
    (model / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    return model


def header(to: Path, marker: Path) -> Path:
    """Safetensors whose header claims more bytes than there are."""
    model = _copy(to)
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return model


def gguf(to: Path, marker: Path) -> Path:
    """A GGUF file with 2^60 tensors and keys."""
    to.mkdir()
    (to / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))
    return to / "model.gguf"


HOSTILE = [(f.__name__, f) for f in (code, tokenizer_code, pickled, attention, template, deep, header, gguf)]
