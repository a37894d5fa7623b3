"""The Chinese site's API pages say in Chinese what today's docstrings say.

Run by `nox -s docs`, where griffe is; skipped elsewhere.
"""

import re
import sys
import tomllib
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "extensions"))

import chinese_docstrings  # noqa: E402
from chinese_docstrings import (  # noqa: E402
    PACKAGES,
    in_chinese,
    left_over,
    shown_by,
    table_of,
    untranslated,
)

CODE = re.compile(r"(`+)(.+?)\1(?!`)")
CHINESE = re.compile(r"[\u4e00-\u9fff\u3002]")  # or a full stop alone, behind a shape
SAMPLE = '''
class Box:
    """Holds things.

    ```python
    Box(3)

    # as it is
    ```

    1. First
       item.
    2. Second item.

    Args:
        size: how many
            it holds.

    Raises:
        ValueError: never.
    """

    def __init__(self, size: int) -> None: ...
'''


@pytest.mark.parametrize("package", PACKAGES)
def test_no_shown_docstring_lacks_its_chinese(package: str) -> None:
    """Changed English has none: `python docs/extensions/chinese_docstrings.py --write` adds it."""
    assert untranslated(package) == []


def test_nothing_is_translated_that_no_page_shows() -> None:
    """The same command drops what is left of docstrings that were changed."""
    assert left_over() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_code_in_the_chinese_is_that_of_the_english(package: str) -> None:
    """Whatever stands between backticks, in any order; and the rest is Chinese."""
    for english, chinese in tomllib.loads(table_of(package).read_text()).items():
        if chinese:
            assert set(CODE.findall(english)) == set(CODE.findall(chinese)), english
            assert CHINESE.search(chinese), english


def loaded(folder: Path) -> "griffe.Class":
    """The class of the sample, read as the pages of the Chinese site read it."""
    (folder / "sample.py").write_text(SAMPLE)
    return griffe.load(
        "sample",
        search_paths=[folder],
        extensions=griffe.load_extensions(chinese_docstrings.ChineseDocstrings),
        docstring_parser=griffe.Parser.google,
    )["Box"]


def test_each_part_of_a_docstring_is_translated_by_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over line ends; code, and what has no Chinese, is as it was."""
    words = {
        "Holds things.": "装东西。",
        "how many it holds.": "装多少。",
        "1. First item.": "1. 一。",
    }
    monkeypatch.setattr(chinese_docstrings, "chinese", lambda: words)
    text, parameters, raises = loaded(tmp_path).docstring.parsed
    code = "```python\nBox(3)\n\n# as it is\n```"
    assert text.value == f"装东西。\n\n{code}\n\n1. 一。\n2. Second item."
    assert [each.description for each in parameters.value] == ["装多少。"]
    assert str(parameters.value[0].annotation) == "int"
    assert [each.description for each in raises.value] == ["never."]
    assert in_chinese("Holds other things.") == "Holds other things."


def test_an_untranslated_and_a_gone_docstring_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exit code says so, and `--write` leaves an empty line for the one and drops the other."""
    monkeypatch.setattr(chinese_docstrings, "PACKAGES", ("ms_data",))
    monkeypatch.setattr(chinese_docstrings, "TABLES", tmp_path)
    monkeypatch.setattr(chinese_docstrings, "shown_by", lambda _: ["A new one.", "An old one."])
    table = tmp_path / "ms_data.zh.toml"
    table.write_text('"An old one." = "旧的。"\n"A gone one." = "没了。"\n')
    chinese_docstrings.chinese.cache_clear()
    monkeypatch.setattr(sys, "argv", ["chinese_docstrings"])
    assert chinese_docstrings.main() == 1
    assert capsys.readouterr().out == "ms_data: A new one.\nleft over: A gone one.\n"
    monkeypatch.setattr(sys, "argv", ["chinese_docstrings", "--write"])
    assert chinese_docstrings.main() == 1
    assert tomllib.loads(table.read_text()) == {"A new one.": "", "An old one.": "旧的。"}
    chinese_docstrings.chinese.cache_clear()


def test_the_check_looks_at_what_a_page_shows() -> None:
    """Summaries, parameters of classes of attrs, methods, errors; nothing that is private."""
    shown = shown_by("ms_profile")
    assert "Events that could not be written." in shown
    assert "None leaves it to `WANDB_MODE`, or to whether W&B is logged in." in shown
    assert "wandb is not installed." in shown
    assert not any(piece.startswith("```") for piece in shown)
