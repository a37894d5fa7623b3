"""Every page of the site has a Chinese translation, and changed sections are reported."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "extensions"))
import translations
from translations import (
    DOCS,
    FENCE,
    accept,
    pages,
    sections_of,
    stale_sections,
)

PAGES = pages()
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def page_id(page: Path) -> str:
    """Test id of a page."""
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_page_has_a_translation(page: Path) -> None:
    """`nox -s translations` reports which of its sections lag behind the English page."""
    assert translations.translation_of(page).exists(), f"{page} has no translation"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_translation_is_in_chinese(page: Path) -> None:
    """Every section of prose has Chinese characters."""
    for heading, text in sections_of(translations.translation_of(page).read_text()):
        prose = FENCE.sub("", text)
        assert CHINESE.search(prose) or len(prose.split()) < 12, heading


def test_a_changed_section_is_stale(tmp_path: Path) -> None:
    """After `accept`, only the changed section is stale."""
    page = tmp_path / "page.md"
    page.write_text("# A: page\n\nOne.\n\n```bash\n# no heading\n```\n\n## Two\n\nWords.\n")
    page.with_name("page.zh.md").write_text("# 页\n\n一。\n\n## 二\n\n字。\n")
    accept(page)
    assert stale_sections(page) == []
    accept(page)
    assert stale_sections(page) == []
    page.write_text(page.read_text().replace("Words.", "Other words."))
    assert stale_sections(page) == ["## Two"]
    page.write_text(page.read_text().replace("# no heading", "# another"))
    assert stale_sections(page) == ["# A: page", "## Two"]


def test_a_guide_is_stale_if_a_section_of_its_readme_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the changed section is stale."""
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    readme = "# Guide\n\nOne.\n\n## Limits\n\nNone.\n"
    (tmp_path / "README.md").write_text(readme)
    page = tmp_path / "page.md"
    page.write_text('--8<-- "README.md"\n')
    page.with_name("page.zh.md").write_text("# 指南\n\n一。\n\n## 限制\n\n无。\n")
    accept(page)
    assert stale_sections(page) == []
    (tmp_path / "README.md").write_text(readme.replace("None.", "Some."))
    assert stale_sections(page) == ["## Limits"]


def test_an_untranslated_meaning_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed, and the exit code is 1."""
    monkeypatch.setattr(sys, "argv", ["translations"])
    monkeypatch.setattr(translations, "pages", list)
    monkeypatch.setattr(translations, "new_meanings", lambda: ["Rows of a step."])
    assert translations.main() == 1
    assert capsys.readouterr().out == "meanings.zh.toml: Rows of a step.\n"
