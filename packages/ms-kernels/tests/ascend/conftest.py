"""Run torch_npu's wheel on the null runtime; `nox -s ascend` installs the requirements."""

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
    """Return a function that compares text with a golden file; MS_WRITE_GOLDEN rewrites it."""

    def compare(name, text):
        path = GOLDEN / name
        if os.environ.get("MS_WRITE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), (
            f"{name} differs; MS_WRITE_GOLDEN=1 nox -s ascend rewrites it for review"
        )

    return compare
