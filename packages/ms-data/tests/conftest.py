"""Datasets that several tests read."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from .truth import random_documents, write_dataset

# A test case may take longer than hypothesis allows when the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# How long it takes to draw and try inputs says how busy the machine is, and nothing of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def documents() -> list[NDArray[np.int64]]:
    """Forty documents of up to fifty tokens."""
    return random_documents(0, 40, 50)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, documents: list[NDArray[np.int64]]) -> Path:
    """The forty documents in six shards with frames of sixteen tokens; not to be changed."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", documents)
