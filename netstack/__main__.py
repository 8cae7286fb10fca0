"""``python -m lamina.netstack bench``: see ``bench``."""

from __future__ import annotations

import sys

from . import bench

if __name__ == "__main__":
    if sys.argv[1:2] != ["bench"]:
        sys.stderr.write("usage: python -m lamina.netstack bench [--help]\n")
        sys.exit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)
    sys.exit(bench.main(sys.argv[2:]))
