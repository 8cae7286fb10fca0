"""The command that installs a package that is missing."""

from __future__ import annotations

import importlib.metadata
import re

DISTRIBUTION = "lamina"


def install_command(*packages: str) -> str:
    """Return pip's command for packages of an extra, in the ranges that pyproject.toml allows. Without Lamina's own
    metadata, as in a copied source tree, it has their names alone.
    """
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    texts = [text.partition(";")[0].strip() for text in required]
    return "pip install " + " ".join(f"'{_with_range(package, texts)}'" for package in packages)


def _with_range(package: str, required: list[str]) -> str:
    for text in required:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", text.replace(" ", "")).groups()  # type: ignore[union-attr]
        if name.lower() == package.lower():
            return package + ",".join(sorted(bounds.split(","), reverse=True))  # the lower one first
    return package
