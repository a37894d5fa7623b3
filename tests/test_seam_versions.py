"""A seam between packages changes only with its owner's version."""

import pytest

from packages import ROOT
from seam_signatures import SEAMS, frozen, is_released, members_of, version_error, version_of

FROZEN = frozen()


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_has_its_frozen_members(seam: str) -> None:
    """`python tests/seam_signatures.py` freezes it again if its owner's version allows it."""
    package, location = SEAMS[seam]
    assert FROZEN[seam]["owner"] == package
    assert members_of(location) == FROZEN[seam]["members"]
    assert members_of(location)


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_is_not_frozen_with_a_future_version(seam: str) -> None:
    """The frozen version is the owner's version or an older one."""
    assert tuple(FROZEN[seam]["version"]) <= version_of(SEAMS[seam][0])


def test_a_released_seam_changes_only_with_a_higher_minor_version() -> None:
    """Before the release it may change; afterwards the minor version must increase."""
    major, minor = version_of("ms-data")
    frozen_seam = {"members": ["rank: int"], "version": [major, minor]}
    changed = ["count: int", "rank: int"]
    assert version_error("place", frozen_seam, changed, released=False) == ""
    assert "raise its version" in version_error("place", frozen_seam, changed, released=True)
    assert version_error("place", frozen_seam, ["rank: int"], released=True) == ""
    older = {"members": ["rank: int"], "version": [major, minor - 1]}
    assert version_error("place", older, changed, released=True) == ""


def test_a_version_is_released_if_the_changelog_has_it() -> None:
    """Without a version in the changelog nothing is released."""
    text = (ROOT / "packages" / "ms-data" / "CHANGELOG.md").read_text()
    assert is_released("ms-data", version_of("ms-data")) == ("\n## 0.1." in text)


def test_the_page_of_versions_names_every_owner() -> None:
    """The page lists the owners of the seams."""
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(owner in page for owner, _ in SEAMS.values())
