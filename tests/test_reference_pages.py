"""The reference pages list every key of every run file and the messages in the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "extensions"))
from error_messages import messages_of, remedies
from generated import MARK, chinese_meanings, with_tables
from run_keys import Row, commands

from packages import PACKAGES, ROOT

REFERENCE = ROOT / "docs" / "reference"
COMMANDS = commands()


def rows_of(command: str) -> list[Row]:
    """All keys of a command's run file."""
    return [row for section in COMMANDS[command]() for row in section.rows]


def marks_of(page: str) -> list[tuple[str, str]]:
    """Marks of a reference page, which tables replace."""
    return MARK.findall((REFERENCE / page).read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_a_meaning_and_a_type(command: str) -> None:
    """A key without a docstring or type would leave an empty cell in the table."""
    rows = rows_of(command)
    assert rows
    assert [row.name for row in rows if not row.meaning] == []
    assert [row.name for row in rows if not row.types] == []


def events_of(package: str) -> set[str]:
    """Names of the events that a package's source emits."""
    names = set()
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                function = ast.unparse(call.func).rpartition(".")[2]
                event = call.args[0] if function in ("emit", "event") and call.args else None
                keywords = {word.arg: word.value for word in call.keywords}
                event = keywords.get("event") if function == "Notice" else event
                if isinstance(event, ast.Constant) and isinstance(event.value, str):
                    names.add(event.value)
    return names


@pytest.mark.parametrize("page", ["counts.md", "counts.zh.md"])
@pytest.mark.parametrize(("package", "minimum"), [("ms-parallel", 14), ("ms-align", 18)])
def test_every_event_is_on_the_page_of_counts(page: str, package: str, minimum: int) -> None:
    """In the table of its package."""
    text = (REFERENCE / page).read_text()
    section = text.partition(f"## {package}")[2].partition("\n## ")[0]
    events = events_of(package)
    assert len(events) >= minimum
    assert {name for name in events if f"`{name}`" not in section} == set()


def test_reading_every_key_imports_no_torch() -> None:
    """`--help` is fast, and the site builds without torch."""
    script = (
        "import sys; sys.path.insert(0, 'docs/extensions'); import generated\n"
        "for read in generated.commands().values(): read()\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("page", ["run-files.md", "run-files.zh.md"])
def test_every_command_with_a_run_file_is_on_the_page(page: str) -> None:
    """Exactly once; a new trainer, method or rule file needs a section."""
    assert sorted(marks_of(page)) == sorted(("keys", name) for name in COMMANDS)


@pytest.mark.parametrize("page", ["errors.md", "errors.zh.md"])
def test_every_package_has_a_table_of_errors(page: str) -> None:
    """Exactly once."""
    assert sorted(marks_of(page)) == sorted(("errors", package) for package in PACKAGES)


def test_limits_choices_and_defaults_match_the_source() -> None:
    """Check a few of each."""
    train = {row.name: row for row in rows_of("ms-parallel train")}
    assert train["sharding"].accepted == "`auto`, `replicate`, `zero1`, `zero2`, `zero3`"
    assert train["sequence_length"].accepted == "from 2"
    assert train["held_out_fraction"].accepted == "from 0, less than 1.0"
    assert train["layout.tensor"].default == "1"
    assert train["model"].default is None
    assert train["mixed_precision"].types == ("true or false", "text")
    ppo = {row.name: row for row in rows_of("ms-align ppo")}
    assert (ppo["lora.rank"].types, ppo["lora.rank"].default) == (("whole number",), "8")


def test_the_reference_has_every_key_of_the_file_that_init_writes() -> None:
    """No key in the file of `init` is missing in the reference."""
    from ms_align.commands.command import COMMANDS as ALIGN

    for command in ALIGN:
        names = {row.name.partition(".")[0] for row in rows_of(f"ms-align {command.name}")}
        written = set(re.findall(r"^(?:# )?(\w+) = ", command.template(), re.MULTILINE))
        tables = set(re.findall(r"^(?:# )?\[(\w+)\]$", command.template(), re.MULTILINE))
        inner = {row.name.rpartition(".")[2] for row in rows_of(f"ms-align {command.name}")}
        assert tables <= names
        assert written <= names | inner


@pytest.mark.parametrize("package", PACKAGES)
def test_most_messages_have_a_remedy(package: str) -> None:
    """More than half of the messages say how to fix the problem."""
    messages = messages_of(package)
    with_remedy = [message for message in messages if message.remedy]
    assert len(messages) > 20
    assert len(with_remedy) > len(messages) / 2


def test_every_message_has_a_remedy_in_both_languages() -> None:
    """Its own or one in `remedies.toml`, which has no others; a few new ones may be missing."""
    messages = [message for package in PACKAGES for message in messages_of(package)]
    without_remedy = {message.wrong for message in messages if not message.remedy}
    allowance = 0.01 * len(messages)
    assert len(without_remedy - set(remedies())) < allowance, sorted(
        without_remedy - set(remedies())
    )
    assert len(set(remedies()) - without_remedy) < allowance, sorted(
        set(remedies()) - without_remedy
    )
    for english, chinese in remedies().values():
        assert english
        assert re.search(r"[\u4e00-\u9fff]", chinese) or chinese == english
    texts = [with_tables("<!-- errors: ms-profile -->", language) for language in ("en", "zh")]
    assert ["| use one of the three |" in text for text in texts] == [True, False]
    assert "| 给出三者之一 |" in texts[1]


@pytest.mark.parametrize("page", ["errors.md", "errors.zh.md"])
def test_the_quoted_common_messages_are_in_the_source(page: str) -> None:
    """The table at the top quotes messages verbatim."""
    text = (REFERENCE / page).read_text().partition("\n## ms-")[0]
    quoted = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    existing = {message.wrong for package in PACKAGES for message in messages_of(package)}
    assert len(quoted) > 10
    assert set(quoted) <= existing


def test_tables_have_one_row_per_key_in_both_languages() -> None:
    """The Chinese page has the same rows under Chinese column heads."""
    texts = [with_tables("<!-- keys: ms-align ppo -->", language) for language in ("en", "zh")]
    rows = [re.findall(r"^\| \[`(.+?)`\]\(#ms-align-ppo\.", text, re.MULTILINE) for text in texts]
    assert rows[0] == rows[1] == [row.name for row in rows_of("ms-align ppo")]
    assert "| 键 | 含义 | 类型 | 默认值 |" in texts[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_a_unique_anchor(command: str) -> None:
    """Each key links to its own anchor."""
    anchors = re.findall(
        r"\]\(#(\S+)\)\{: id=\"(\S+)\" \}", with_tables(f"<!-- keys: {command} -->", "en")
    )
    assert len(anchors) == len(rows_of(command))
    assert all(link == anchor for link, anchor in anchors)
    assert len({anchor for _, anchor in anchors}) == len(anchors)


@pytest.mark.parametrize("command", COMMANDS)
def test_meanings_use_toml_spelling(command: str) -> None:
    """TOML has no None, and spells true and false in lower case."""
    words = re.compile(r"\b(None|True|False)\b")
    assert [row.meaning for row in rows_of(command) if words.search(row.meaning)] == []


def test_meanings_are_translated_to_chinese() -> None:
    """Keys without a translation are shown in English; `nox -s translations` lists them."""
    translations = chinese_meanings()
    text = with_tables("<!-- keys: ms-align ppo -->", "zh")
    assert translations["Discount factor per token."] in text
    assert "Discount factor per token." not in text
