"""torch_npu's wheel on the null runtime: `nox -s ascend` has what these tests need."""

import importlib.util
import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from . import null_runtime

    null_runtime.start()


@pytest.fixture
def golden():
    """Compare text with a golden file; the variable MS_WRITE_GOLDEN writes it instead."""

    def compare(name, text):
        path = GOLDEN / name
        if os.environ.get("MS_WRITE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), (
            f"{name} differs; MS_WRITE_GOLDEN=1 nox -s ascend writes it anew, for review"
        )

    return compare
