"""The Chinese pages of the site say what the English ones do, section by section."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "extensions"))
import translations
from translations import (
    DOCS,
    FENCE,
    accept,
    english_of,
    pages,
    sections_of,
    stale_sections,
)

PAGES = pages()
NAME = re.compile(r"`[^`]+`")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def names(page: Path) -> str:
    """A page as tests name it."""
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_translation_is_of_todays_words(page: Path) -> None:
    """`python docs/extensions/translations.py --accept PAGE` once the Chinese was mended."""
    assert translations.translation_of(page).exists(), f"{page} has no translation"
    assert stale_sections(page) == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_both_pages_have_the_same_headings_code_links_and_rows(page: Path) -> None:
    """Levels of headings, code to the letter, where links lead, rows of tables."""
    texts = [english_of(page), translations.translation_of(page).read_text()]
    shapes = []
    for text in texts:
        plain = FENCE.sub("", text)
        shapes.append(
            {
                "levels": [heading.count("#") for heading, _ in sections_of(text)],
                "code": FENCE.findall(text),
                "links": sorted(
                    re.sub(r"#.*", "", target) for target in re.findall(r"\]\(([^)]+)\)", plain)
                ),
                "rows": len(re.findall(r"^\|", plain, re.MULTILINE)),
                "marks": re.findall(r"^<!-- .* -->$", plain, re.MULTILINE),
            }
        )
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_no_name_in_the_text_is_left_out(page: Path) -> None:
    """What stands between backticks on the English page stands as often on the Chinese one."""
    english, chinese = (
        Counter(NAME.findall(" ".join(FENCE.sub("", text).split())))
        for text in (english_of(page), translations.translation_of(page).read_text())
    )
    assert english - chinese == Counter()


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_translation_is_in_chinese(page: Path) -> None:
    """Every section of prose holds Chinese characters; the English page holds none."""
    for heading, text in sections_of(translations.translation_of(page).read_text()):
        prose = FENCE.sub("", text)
        assert CHINESE.search(prose) or len(prose.split()) < 12, heading


def test_a_changed_section_is_found(tmp_path: Path) -> None:
    """The changed section alone of a page whose translation was accepted is stale."""
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


def test_a_guide_is_held_by_the_sections_of_its_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the README makes its section stale, a change of its tree of files none."""
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    readme = "# Guide\n\nOne.\n\n## The tree\n\nFiles.\n\n## Limits\n\nNone.\n"
    (tmp_path / "README.md").write_text(readme)
    page = tmp_path / "page.md"
    page.write_text('--8<-- "README.md"\n')
    page.with_name("page.zh.md").write_text("# 指南\n\n一。\n\n## 限制\n\n无。\n")
    accept(page)
    assert stale_sections(page) == []
    (tmp_path / "README.md").write_text(readme.replace("Files.", "More."))
    assert stale_sections(page) == []
    (tmp_path / "README.md").write_text(readme.replace("None.", "Some."))
    assert stale_sections(page) == ["## Limits"]


def test_a_meaning_without_chinese_is_stale_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed, and the exit code says so."""
    monkeypatch.setattr(sys, "argv", ["translations"])
    monkeypatch.setattr(translations, "pages", list)
    monkeypatch.setattr(translations, "new_meanings", lambda: ["Rows of a step."])
    assert translations.main() == 1
    assert capsys.readouterr().out == "meanings.zh.toml: Rows of a step.\n"
