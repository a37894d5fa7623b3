"""Fixtures of several test modules."""

from pathlib import Path

import pytest

from .instruction_sets import write_sets


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `copy`, `reverse`, `pairs` and `model`; read-only."""
    return write_sets(tmp_path_factory.mktemp("sets") / "sets")
