"""The model that ships, by its path in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODEL = "examples/tiny_lm/model"
