"""Code that several packages need has one source, and each copy of it is that source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from copies import COPIES, SOURCE, wanted


def test_every_copy_is_its_source() -> None:
    """`nox -s copies` would change nothing."""
    assert [path for path, text in wanted().items() if path.read_text() != text] == []


def test_every_source_has_a_copy() -> None:
    """Nothing lies in shared_source/ that no package uses."""
    assert sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")) == sorted(COPIES)
