"""Attacks a real server on loopback in every way that SECURITY.md names, and prints a table: held, or fell.

    python tests/attack [NAMES]

Exit status 1 if one fell. No attack leaves this host, and each has a limit of time.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PATHS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
LIMIT_S = 300


def main(names: list[str]) -> int:
    from all_attacks import ATTACKS
    from verdict import Verdict

    if unknown := [name for name in names if name not in {attack.name for attack in ATTACKS}]:
        print(f"there is no attack {unknown[0]}: {', '.join(attack.name for attack in ATTACKS)}", file=sys.stderr)
        return 2
    fell = 0
    print(f"{'attack':<22} {'result':<10} {'s':>5}  evidence")
    for attack in ATTACKS:
        if names and attack.name not in names:
            continue
        began = time.monotonic()
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(LIMIT_S)
        try:
            with tempfile.TemporaryDirectory(prefix="lamina-attack-") as folder:
                verdict = attack.run(Path(folder))
        except Exception as error:  # noqa: BLE001 - of the server or of the attack: neither has held
            verdict = Verdict(False, f"{type(error).__name__}: {error}".partition("\n")[0][:160])
        finally:
            signal.alarm(0)
        word = {True: "held", False: "FELL", None: "not tried"}[verdict.held]
        fell += verdict.held is False
        print(f"{attack.name:<22} {word:<10} {time.monotonic() - began:5.0f}  {verdict.evidence}", flush=True)
    return 1 if fell else 0


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no end after {LIMIT_S} s")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), *(str(ROOT / path) for path in PATHS), str(Path(__file__).parent)]
    sys.exit(main(sys.argv[1:]))
