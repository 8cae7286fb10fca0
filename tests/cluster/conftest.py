"""Fixtures of tests of workers on several hosts."""

from __future__ import annotations

import pytest
from local_text import Known, generate


@pytest.fixture(scope="session")
def known() -> Known:
    return generate()
