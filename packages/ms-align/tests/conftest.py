"""Fixtures shared by the test modules."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from .instruction_sets import write_sets

# Examples may exceed hypothesis's deadline on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `copy`, `reverse`, `pairs` and `model`; read-only."""
    return write_sets(tmp_path_factory.mktemp("sets") / "sets")
