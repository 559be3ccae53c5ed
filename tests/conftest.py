"""Settings of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # other work on the machine must not fail a test
settings.load_profile("shared machine")

os.environ.setdefault("RELAYLM_FAMILY", "wiki-char")  # the smallest bundled family: commands without --family are quick


@pytest.fixture(autouse=True)
def same_working_directory() -> Iterator[None]:
    """A test that leaves the process in another folder would change what later tests of its worker find there."""
    before = Path.cwd()
    yield
    assert Path.cwd() == before
