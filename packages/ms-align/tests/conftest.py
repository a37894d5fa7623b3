"""Sets that several tests read."""

from pathlib import Path

import pytest

from .instruction_sets import write_sets


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`copy`, `reverse`, `pairs` and `model`; not to be changed."""
    return write_sets(tmp_path_factory.mktemp("sets") / "sets")
