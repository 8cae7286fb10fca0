"""YAML files that people write, and the tables in them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from .install_command import install_command


def read_yaml(path: str, where: str = "") -> Any:
    """Return the contents of a file. ``where``: its name in errors. Raises ValueError, ImportError without PyYAML."""
    where = where or path
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{where} needs PyYAML: {install_command('pyyaml')}") from error
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read: {' '.join(str(error).split())}") from error


def yaml_table(table: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Return ``table``, whose entries must all be in ``known``. Raises ValueError that names ``where``."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}: must be a table with {', '.join(sorted(known))}")
    if unknown := sorted(str(k) for k in set(table) - set(known)):
        raise ValueError(f"{where}: unknown entry {unknown[0]}; known: {', '.join(sorted(known))}")
    return table
