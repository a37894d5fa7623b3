"""Datasets shared by several tests."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from .reference_samples import random_documents, write_dataset

# Examples may exceed hypothesis's deadline on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Slow input generation also reflects machine load, not the code under test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def documents() -> list[NDArray[np.int64]]:
    """Forty documents of up to fifty tokens."""
    return random_documents(0, 40, 50)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, documents: list[NDArray[np.int64]]) -> Path:
    """The forty documents in six shards with 16-token frames. Read-only."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", documents)
