"""A seam between packages changes with its owner's version, and never in silence."""

import pytest

from packages import ROOT
from seam_signatures import SEAMS, complaint, frozen, is_released, members_of, version_of

FROZEN = frozen()


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_has_its_frozen_members(seam: str) -> None:
    """`python tests/seam_signatures.py` freezes it anew, where its owner's version allows it."""
    package, place = SEAMS[seam]
    assert FROZEN[seam]["owner"] == package
    assert members_of(place) == FROZEN[seam]["members"]
    assert members_of(place)


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_was_not_frozen_under_a_version_to_come(seam: str) -> None:
    """The version beside it is the owner's, or an older one."""
    assert tuple(FROZEN[seam]["version"]) <= version_of(SEAMS[seam][0])


def test_a_seam_changes_only_with_a_higher_number_once_it_is_released() -> None:
    """Before the release it may change; after it the second number must rise."""
    major, minor = version_of("ms-data")
    was = {"members": ["rank: int"], "version": [major, minor]}
    changed = ["count: int", "rank: int"]
    assert complaint("place", was, changed, released=False) == ""
    assert "raise its version" in complaint("place", was, changed, released=True)
    assert complaint("place", was, ["rank: int"], released=True) == ""
    older = {"members": ["rank: int"], "version": [major, minor - 1]}
    assert complaint("place", older, changed, released=True) == ""


def test_a_release_is_what_the_changelog_holds() -> None:
    """As long as a changelog has no version, nothing is released."""
    text = (ROOT / "packages" / "ms-data" / "CHANGELOG.md").read_text()
    assert is_released("ms-data", version_of("ms-data")) == ("\n## 0.1." in text)


def test_the_page_of_versions_names_every_owner() -> None:
    """Who owns which seam stands on the page."""
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(owner in page for owner, _ in SEAMS.values())
