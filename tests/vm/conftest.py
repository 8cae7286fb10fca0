"""One guest for all tests that can share it; skipped by name where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest import Guest
from image import Image, build, missing


@pytest.fixture(scope="session")
def image() -> Image:
    if lack := missing():
        pytest.skip(lack)
    return build()


@pytest.fixture(scope="session")
def guest(image: Image) -> Iterator[Guest]:
    with Guest(image) as guest:
        print(f"\nboot: {guest.boot_s:.1f} s with {guest.accelerator}")
        yield guest
