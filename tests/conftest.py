"""Shared by all tests: one thread per process, since the machine's cores are shared by the workers under test."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LAMINA_MLX5_MODEL", "1")  # no NIC here: mlx5 runs against the software one
