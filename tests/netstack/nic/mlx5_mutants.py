"""Mutation testing of the headers of the device side: every mutant must fail against the software NIC, or be argued.

``python tests/netstack/nic/mlx5_mutants.py`` makes them all, compiles each against the proof program and runs it. A
survivor that equals the original is in mlx5_survivors.txt, with its reason. Any other survivor makes the exit status 1,
and so does an entry of that list that was killed after all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
HEADERS = tuple(f"netstack/{name}.h" for name in ("device", "mlx5", "mlx5_channel", "memory_channel", "proxy/proxy"))
MODEL = ROOT / "tests" / "soft_nic"
INCLUDES = (f"-I{CSRC}", f"-I{MODEL.parent}")
ARGUED = Path(__file__).with_name("mlx5_survivors.txt")
POSTS = "20000"
COMPILE_S, RUN_S = 600.0, 30.0
# A word beyond an array ends the program: it is undefined, and a compiler may take it for never.
FLAGS = ("-std=c++17", "-O1", "-w", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")

# (what to look for in a line of code, what to put there); one mutant for each place
RULES = [
    (r"bus\.acquire\(", "bus.load("),
    (r"bus\.release\(", "bus.put("),
    (r"bus\.(fence|release)\(", r"bus.\1_near("),
    (r"bus\.(fence|release)_near\(", r"bus.\1("),
    (r"\((c|q)\.near\)", r"(!\1.near)"),
    (r"bus\.acquire_near\(", "bus.load("),
    (r"bus\.release_near\(", "bus.put("),
    (r"\bbe(32|64)\((?!u\d\d x\))", "("),
    (r" \+ 1\b", ""),
    (r" \+ 1\b", " + 2"),
    (r" - 1\b", ""),
    (r" \+ (?=[a-z])", " - "),
    (r" - (?=[a-z])", " + "),
    (r" \+= ", " -= "),
    (r" < ", " <= "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" & 1\b", " & 0"),
    (r" & (?=[(q])", " | "),
    (r" << (\d+)", r" >> \1"),
    (r" >> (\d+)", r" << \1"),
    (r"0xffffff\b", "0xffff"),
    (r"0xffff\b", "0x7fff"),
    (r"= 0x08;", "= 0x09;"),
    (r"0x80000000u", "0x40000000u"),
    (r"kSegments = 3", "kSegments = 2"),
    (r"kSegments = 3", "kSegments = 4"),
    (r"kWordsSegments = 4", "kWordsSegments = 3"),
    (r"kWordsSegments = 4", "kWordsSegments = 5"),
    (r"kWordsSegments\b(?! =)", "kSegments"),
    (r"\bkCreditAt = 8", "kCreditAt = 64"),
    (r"kBulkCreditAt = 16", "kBulkCreditAt = 24"),
    (r"\bkBulkCreditAt(?! =)", "kCreditAt"),
    (r"kBulk\b", "kFirst"),
    (r"kFirst\b", "kAlone"),
    (r"(\w+)_of\(c\)", "c"),
    (r"told\.first", "told.bulk"),
    (r"told\.bulk", "told.first"),
    (r"first\.credits", "c.credits"),
    (r"kSend = 1", "kSend = 0"),
    (r"kCqeDone = 0x0, kCqeError = 0xd", "kCqeDone = 0xd, kCqeError = 0x0"),
    (r"kCqeInvalid = 0xf", "kCqeInvalid = 0xe"),
    (r", kSignalled\)", ", 0)"),
    (r", kInline\b|\| kInline", ""),
    (r"\.completed\b", ".polled"),
    (r"\.credited\b", ".published"),
    (r"\.reported\b", ".received"),
    (r"\.released\b", ".received"),
    (r"kNoDoorbell = ~0ull", "kNoDoorbell = 0"),
    (r"known", "most"),
    (r" % ", " / "),
]  # fmt: skip
FUNCTION = re.compile(r"^ *LAMINA_HD .*?(\w+)\(")
STATEMENT = re.compile(
    r"^\s*(bus\.|place\(|order\(|commit\(|write_header\(|tell\(|p\.|"
    r"if \(.*\) return |if \(.*\) continue|q\.|c\.|wqe\.|status = |\*).*;$"
)


@dataclass(frozen=True)
class Mutant:
    header: str  # below csrc/
    line: int  # from 1
    function: str
    before: str
    after: str  # empty: the line is deleted
    nth: int = 1  # of those of this function that read the same

    @property
    def name(self) -> str:
        place = f"{self.header.rpartition('/')[2]} {self.function}"
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{place}: {self.before.strip()} -> {self.after.strip() or 'deleted'}{nth}"

    def source(self) -> str:
        lines = (CSRC / self.header).read_text().splitlines()
        lines[self.line - 1] = self.after
        return "\n".join(lines) + "\n"


def live_lines(header: str) -> Iterator[tuple[int, str, str]]:
    """(number, function, code) of what the proof compiles: no comments, no directives, not the processor (Bus)."""
    in_bus = on_device = False
    function = ""
    for number, line in enumerate((CSRC / header).read_text().splitlines(), start=1):
        in_bus = in_bus or line == "struct Bus {"
        on_device = on_device or line == "#if defined(__CUDA_ARCH__)"
        code = line.split("//")[0].rstrip()
        if defined := FUNCTION.match(code):
            function = defined[1]
        if not in_bus and not on_device and code and not code.startswith(("#", "namespace", "using", "template", "}")):
            yield number, function, code
        on_device = on_device and line not in ("#else", "#endif")
        in_bus = in_bus and line != "};"


def mutants() -> list[Mutant]:
    """All of them, in the order of the source."""
    found: dict[Mutant, Mutant] = {}
    alike: Counter[str] = Counter()

    def add(mutant: Mutant) -> None:
        if mutant not in found:
            alike[mutant.name] += 1
            found[mutant] = replace(mutant, nth=alike[mutant.name])

    for header in HEADERS:
        for number, function, code in live_lines(header):
            if STATEMENT.match(code) and "const " not in code:
                add(Mutant(header, number, function, code, ""))
            for pattern, replacement in RULES:
                for match in re.finditer(pattern, code):
                    after = code[: match.start()] + match.expand(replacement) + code[match.end() :]
                    if after != code:
                        add(Mutant(header, number, function, code, after))
    return list(found.values())


def argued() -> dict[str, str]:
    """Name of a survivor -> why no program can tell it from the original."""
    entries = [e.split("\n", 1) for e in ARGUED.read_text().strip().split("\n\n") if not e.startswith("#")]
    return {name: " ".join(why.split()) for name, why in entries}


class Proof:
    """Compiles and runs the proof program, with one header replaced."""

    def __init__(self, scratch: Path, compiler: str = "g++") -> None:
        self._scratch = scratch
        self._command = [compiler, *FLAGS]
        self._model = scratch / "nic.o"
        build = [*self._command, *INCLUDES, "-c", str(MODEL / "nic.cpp"), "-o", str(self._model)]
        subprocess.run(build, check=True, timeout=COMPILE_S)

    def build(self, mutant: Mutant | None) -> Path | None:
        """The program; None where it does not compile."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        if mutant is not None:
            header = folder / mutant.header
            header.parent.mkdir(parents=True)
            header.write_text(mutant.source())
        build = [*self._command, f"-I{folder}", *INCLUDES, str(MODEL / "prove.cpp"), str(self._model)]
        done = subprocess.run(
            [*build, "-o", str(folder / "prove")], capture_output=True, timeout=COMPILE_S, check=False
        )
        return None if done.returncode else folder / "prove"

    def fate(self, mutant: Mutant | None) -> str:
        """'survived', 'did not compile', or how it was killed. None is the original."""
        program = self.build(mutant)
        if program is None:
            return "did not compile"
        try:
            run = subprocess.run([str(program), POSTS], capture_output=True, text=True, timeout=RUN_S, check=False)
        except subprocess.TimeoutExpired:
            return "killed: ran too long"
        return "survived" if run.returncode == 0 else f"killed: {run.stdout.strip() or run.returncode}"


def main(words: list[str]) -> int:
    """Make the mutants whose name contains one of ``words`` (none: all); the exit status."""
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(Path(folder))
        if (fate := proof.fate(None)) != "survived":
            print(f"the original fails: {fate}")
            return 1
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            fates = dict(zip(chosen, pool.map(proof.fate, chosen), strict=True))
    reasons = argued()
    survivors = {m.name for m, fate in fates.items() if fate == "survived"}
    compiled = [m for m, fate in fates.items() if fate != "did not compile"]
    wrong = [f"SURVIVED {name}" for name in sorted(survivors - reasons.keys())]
    if not words:
        wrong += [f"ARGUED BUT NOT A SURVIVOR {name}" for name in sorted(reasons.keys() - survivors)]
    print(*wrong, sep="\n")
    print(f"{len(compiled)} mutants, {len(compiled) - len(survivors)} killed, {len(survivors)} survived, of these "
          f"{len(survivors & reasons.keys())} argued")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
