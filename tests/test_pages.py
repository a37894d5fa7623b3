"""READMEs and pages are short, link to files and headings that exist, and are easy to reach."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 250
GENERATED = {"docs/reference/refused-combinations.md", "docs/reference/transformers.md"}
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
EXPLICIT_ID = re.compile(r" *\{: *(?:id=|#)([\w-]+) *\}")


def written_pages() -> list[str]:
    """Paths of all READMEs and pages that people write, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = {path for path in listed.stdout.split("\0") if path and (ROOT / path).exists()}
    return sorted(
        path
        for path in paths - GENERATED
        if not re.match(r".*/(?:CHANGELOG|tests/)|docs/api/", path)
    )


PAGES = written_pages()


def text_of(page: Path) -> str:
    """Text of a page with its includes expanded."""
    text = page.read_text(encoding="utf-8")
    return INCLUDE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), text)


def anchors_of(page: Path) -> set[str]:
    """Ids that GitHub and mkdocs generate for a page's headings."""
    anchors = set()
    for heading in HEADING.findall(FENCE.sub("", text_of(page))):
        explicit = EXPLICIT_ID.search(heading)
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\s-]", "", words).strip()
        # mkdocs merges spaces and hyphens, GitHub replaces each space.
        anchors |= (
            {explicit[1]} if explicit else {re.sub(r"[-\s]+", "-", slug), slug.replace(" ", "-")}
        )
    return anchors


def dead_links(page: Path) -> list[str]:
    """Targets of a page's links that are not a file, or not a heading of that file."""
    dead = []
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(prose):
        path, _, anchor = target.partition("#")
        if re.match(r"https?://|mailto:", target):
            continue
        linked = (page.parent / path).resolve() if path else page
        # A link to a key or an API name leads to an anchor that the site generates.
        generated = "." in anchor or linked.parent.name in {"reference", "api"}
        exists = linked.exists() and (
            not anchor or generated or linked.suffix != ".md" or anchor in anchors_of(linked)
        )
        if not exists:
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_at_most_250_lines(page: str) -> None:
    """A longer page has several subjects and is split."""
    lines = (ROOT / page).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{page} has {lines} lines"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_resolves(page: str) -> None:
    """Files and headings; addresses of the web are not opened."""
    assert dead_links(ROOT / page) == []


def test_a_dead_link_is_reported(tmp_path: Path) -> None:
    """Missing files and headings, except in code."""
    page = tmp_path / "page.md"
    page.write_text("# One: two\n\n[a](#one-two) [b](page.md#none) [c](no.md) `[d](no.md)`\n")
    assert dead_links(page) == ["page.md#none", "no.md"]


@pytest.mark.parametrize("package", ["align", "compress", "data", "kernels", "parallel", "profile"])
def test_every_page_of_a_package_is_linked_from_its_readme(package: str) -> None:
    """Every page is then two clicks from the front page, which links to the READMEs."""
    readme = (ROOT / "packages" / f"ms-{package}" / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "docs" / f"{package}.zh.md").read_text(encoding="utf-8")
    pages = [path for path in PAGES if path.startswith(f"docs/{package}/")]
    assert pages
    for page in pages:
        if page.endswith(".zh.md"):
            assert f"({page.removeprefix('docs/').replace('.zh.md', '.md')}" in chinese, page
        else:
            assert f"(../../{page}" in readme, page


def test_every_page_is_in_the_navigation() -> None:
    """Chinese pages follow the English ones."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in PAGES:
        if page.startswith("docs/") and not page.endswith(".zh.md"):
            assert f"- {page.removeprefix('docs/')}\n" in navigation, page
