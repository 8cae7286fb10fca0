"""A plugin of pytest: this process is on a machine of mlx5_stand_in.py, whose NICs move by themselves."""

from __future__ import annotations

import ctypes

FAKE = ctypes.CDLL(None)  # what is preloaded
