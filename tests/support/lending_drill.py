"""A drill of lending: one server borrows from a host and from another server. A long stream is read while each of them
is killed or stopped in turn. The tokens must be those of a run without a fault. Exit status 1 where anything is wrong.

    python tests/support/lending_drill.py MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lending_fixture import DebtorServer, DrillSizes, LendingFixture, StreamReader, seconds_until

from lamina.config.option import parse_size

SILENCE_S = 300.0  # that fails a stream, and anything else that does not come
SOON_S = 30.0
WAITS_S = 4.0  # in which a request that needs a new loan gets nothing while there is no ledger
BACK_S = 8.0  # for blocks of a dead debtor, by the ledger: by the end of its link, before that of its lease
EARLY = 8  # tokens before a hit


class Scene(NamedTuple):
    """One event, and its outcome. ``right``: whether the outcome was right in all parts. ``pause_s``: the longest
    silence of the stream, with that before its first token; None = of no stream.
    """

    name: str
    right: bool
    what: str
    pause_s: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status; 2 for bad input. The defaults fit the model that is shipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a directory or a hub id")
    add("--kv-memory", default="640KiB", metavar="SIZE", help="of each server's two memory workers (640KiB)")
    add("--borrow", default="4MiB", metavar="SIZE", help="memory that one borrows and the other lends (4MiB)")
    add("--prompt", type=int, default=1400, metavar="N", help="tokens of the prompt, more than fit (1400)")
    add("--tokens", type=int, default=400, metavar="N", help="tokens of the answer (400)")
    add("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args(argv)
    try:
        return run_drill(args)
    except ValueError as error:
        sys.stderr.write(f"lending_drill: {error}\n")
        return 2


def run_drill(args: argparse.Namespace) -> int:
    """Exit status. Raises ValueError for bad input, OSError where something does not start."""
    sizes = DrillSizes(parse_size(args.kv_memory, "--kv-memory"), parse_size(args.borrow, "--borrow"))
    for name in ("prompt", "tokens"):
        if getattr(args, name) < 2 * EARLY:
            raise ValueError(f"--{name} must be at least {2 * EARLY}, not {getattr(args, name)}")
    scenes, street = list[Scene](), LendingFixture(args.model, sizes)
    try:
        drill = LendingDrill(street, args.prompt, args.tokens)
        for name, play in SCENES.items():
            scenes.append(play(drill)._replace(name=name))
            if not args.json:
                print(line_of(scenes[-1]), flush=True)
    finally:
        left = street.end()
    right = sum(scene.right for scene in scenes)
    if args.json:
        print(json.dumps({"scenes": [scene._asdict() for scene in scenes], "left": left}))
    else:
        print(f"{right} of {len(scenes)} as it should be, {left} processes left")
    return int(right < len(scenes) or left > 0)


def line_of(scene: Scene) -> str:
    """A line of text."""
    pause = "" if scene.pause_s is None else f"silent for {scene.pause_s:.1f} s at most: "
    return f"{'right' if scene.right else 'WRONG':5}  {scene.name:22} {pause}{scene.what}"


class LendingDrill:
    """The same long request again and again."""

    def __init__(self, street: LendingFixture, prompt: int, tokens: int) -> None:
        self._fixture = street
        ids = [(7 * n + 3) % 300 + 5 for n in range(prompt)]
        self._body: dict[str, Any] = {
            "prompt": ids, "temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        self._wanted: list[int] = []

    def run_undisturbed(self) -> Scene:
        """A run without a fault."""
        reading = self._begun(self._fixture.debtor)
        lent = self._fixture.lent()
        self._wanted = reading.join().ids.get(0, [])
        right = len(self._wanted) == self._body["max_tokens"] and lent.get(self._fixture.creditor_name, 0) > 0
        return self._scene(reading, right, f"borrowed {_said(lent)}")

    def kill_creditor(self) -> Scene:
        """The host that lends dies: the sequence goes on with the memory of the other one."""
        reading = self._begun(self._fixture.debtor)
        before = self._fixture.lent()
        self._fixture.creditor.end()
        dead, lent = self._fixture.creditor_name, dict[str, int]()

        def borrows_anew() -> bool:
            """True once another creditor lends. The ledger lists the loans of the dead one for a while."""
            lent.update((name, blocks) for name, blocks in self._fixture.lent().items() if name != dead)
            return any(lent.values())

        again = seconds_until(lambda: borrows_anew() or reading.has_ended, SILENCE_S)
        right = before.get(dead, 0) > 0 and again is not None and any(lent.values())
        return self._scene(reading, right, f"{_said(before)} was lost, and then borrowed {_said(lent)}")

    def need_lent_memory(self) -> Scene:
        """The server that lends needs its memory itself, for a later request: this waits for the debtor's end."""
        reading = self._begun(self._fixture.debtor)
        lent = self._fixture.lent()
        own = StreamReader(self._fixture.lender.url, self._body, SILENCE_S)
        first = seconds_until(lambda: own.tokens or own.has_ended, SILENCE_S)
        at = reading.tokens
        same = own.join().ids.get(0) == self._wanted
        right = same and any(lent.values()) and at == len(self._wanted)
        what = f"its owner had {_said(lent)} back after {first or 0.0:.1f} s, at token {at} of the debtor's"
        return self._scene(reading, right, what)

    def kill_ledger(self) -> Scene:
        """The ledger dies: loans go on, new ones wait."""
        reading = self._begun(self._fixture.debtor)
        self._fixture.ledger.end()
        what = "the loan went on; the next one waited until it was there again"
        scene = self._scene(reading, right=True, what=what)
        back = seconds_until(lambda: not borrowed_bytes(self._fixture.debtor), SOON_S)
        waiting = StreamReader(self._fixture.debtor.url, self._body, SILENCE_S)
        early = seconds_until(lambda: waiting.tokens or waiting.has_ended, WAITS_S)
        self._fixture.start_ledger(self._fixture.place)
        same = waiting.join().ids.get(0) == self._wanted
        right = scene.right and back is not None and early is None and same
        return scene._replace(right=right)

    def cut_off(self) -> Scene:
        """The host that lends falls silent as KV is to move there, for longer than its lease."""
        self._fixture.start_creditor()
        seconds_until(lambda: self._fixture.creditor_name in self._fixture.lent(), SOON_S)
        self._await_rest()
        reading, said = StreamReader(self._fixture.debtor.url, self._body, SILENCE_S), self._fixture.debtor.has_logged
        seconds_until(lambda: said("memory workers: 2 -> 3", reading.has_begun) or reading.has_ended, SILENCE_S)
        go_on = self._fixture.stop(self._fixture.creditor)
        try:
            scene = self._scene(reading, said("memory workers: 2 -> 3", reading.has_begun), "")
        finally:
            go_on()
        free = seconds_until(lambda: not self._fixture.lent().get(self._fixture.creditor_name, 1), SOON_S)
        what = f"silent until the last token; it had its blocks again {free or 0.0:.1f} s after it went on"
        return scene._replace(right=scene.right and free is not None, what=what + scene.what)

    def kill_debtor(self) -> Scene:
        """All its leases end."""
        reading = self._begun(self._fixture.debtor)
        lent = self._fixture.lent()
        os.kill(self._fixture.debtor.pid_of("engine"), signal.SIGKILL)
        back = seconds_until(lambda: not any(self._fixture.lent().values()), SOON_S)
        reading.join()
        right = any(lent.values()) and back is not None and back < BACK_S
        return Scene("", right, f"{_said(lent)} came back, as the ledger knew {back or SOON_S:.1f} s later")

    def _begun(self, server: DebtorServer) -> StreamReader:
        """A stream of which some tokens have come, while nothing was on loan before."""
        self._await_rest()
        reading = StreamReader(server.url, self._body, SILENCE_S)
        seconds_until(lambda: reading.tokens >= EARLY or reading.has_ended, SILENCE_S)
        return reading

    def _await_rest(self) -> None:
        """Wait until nothing is on loan: memory that is not needed goes back after a while."""
        seconds_until(lambda: not any(self._fixture.lent().values()), SILENCE_S)

    def _scene(self, reading: StreamReader, right: bool, what: str) -> Scene:
        """Wait for the stream's end, and compare its tokens with those of the run without a fault."""
        told = reading.join()
        same = not told.error and told.ids.get(0) == self._wanted
        pause = told.pause_after(reading.has_begun)
        return Scene("", right and same, what + (f"; other tokens: {told.error}" if not same else ""), pause)


def borrowed_bytes(server: DebtorServer) -> float:
    """Bytes that ``server`` borrows, by its metrics."""
    lines = [line for line in server.metrics().splitlines() if "lamina:borrowed_bytes{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _said(lent: dict[str, int]) -> str:
    return ", ".join(f"{blocks} MiB of {name}" for name, blocks in sorted(lent.items()) if blocks) or "nothing"


SCENES: dict[str, Callable[[LendingDrill], Scene]] = {
    "nobody is hit": LendingDrill.run_undisturbed,
    "creditor killed": LendingDrill.kill_creditor,
    "lent memory needed": LendingDrill.need_lent_memory,
    "ledger killed": LendingDrill.kill_ledger,
    "creditor cut off": LendingDrill.cut_off,
    "debtor killed": LendingDrill.kill_debtor,
}


if __name__ == "__main__":
    sys.exit(main())
