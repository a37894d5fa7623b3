"""The reference pages show every key of every run file, and messages that are in the source."""

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
    """All keys of a command."""
    return [row for section in COMMANDS[command]() for row in section.rows]


def marks_of(page: str) -> list[tuple[str, str]]:
    """What a reference page asks for."""
    return MARK.findall((REFERENCE / page).read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_says_what_it_means_and_what_it_takes(command: str) -> None:
    """A key without a docstring or a type would leave a hole in the table."""
    rows = rows_of(command)
    assert rows
    assert [row.name for row in rows if not row.meaning] == []
    assert [row.name for row in rows if not row.types] == []


def test_reading_every_key_imports_no_torch() -> None:
    """`--help` answers at once, and the site is built where no torch is."""
    script = (
        "import sys; sys.path.insert(0, 'docs/extensions'); import generated\n"
        "for read in generated.commands().values(): read()\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("page", ["run-files.md", "run-files.zh.md"])
def test_every_command_that_takes_a_file_is_on_the_page(page: str) -> None:
    """Once each; a new trainer, method or rule file without its section fails here."""
    assert sorted(marks_of(page)) == sorted(("keys", name) for name in COMMANDS)


@pytest.mark.parametrize("page", ["errors.md", "errors.zh.md"])
def test_every_package_shows_its_errors(page: str) -> None:
    """Once each."""
    assert sorted(marks_of(page)) == sorted(("errors", package) for package in PACKAGES)


def test_limits_choices_and_defaults_are_those_of_the_source() -> None:
    """A few of each kind, as a reader would look them up."""
    train = {row.name: row for row in rows_of("ms-parallel train")}
    assert train["sharding"].accepted == "`auto`, `replicate`, `zero1`, `zero2`, `zero3`"
    assert train["sequence_length"].accepted == "from 2"
    assert train["held_out_fraction"].accepted == "from 0, less than 1.0"
    assert train["layout.tensor"].default == "1"
    assert train["model"].default is None
    assert train["mixed_precision"].types == ("true or false", "text")
    ppo = {row.name: row for row in rows_of("ms-align ppo")}
    assert (ppo["lora.rank"].types, ppo["lora.rank"].default) == (("whole number",), "8")


def test_a_page_shows_every_key_of_the_file_that_init_writes() -> None:
    """What people begin with holds no key that the reference lacks."""
    from ms_align.commands.command import COMMANDS as ALIGN

    for command in ALIGN:
        names = {row.name.partition(".")[0] for row in rows_of(f"ms-align {command.name}")}
        written = set(re.findall(r"^(?:# )?(\w+) = ", command.template(), re.MULTILINE))
        tables = set(re.findall(r"^(?:# )?\[(\w+)\]$", command.template(), re.MULTILINE))
        inner = {row.name.rpartition(".")[2] for row in rows_of(f"ms-align {command.name}")}
        assert tables <= names
        assert written <= names | inner


@pytest.mark.parametrize("package", PACKAGES)
def test_most_messages_tell_a_remedy(package: str) -> None:
    """Messages are found, and of those that users meet most say what to do."""
    messages = messages_of(package)
    told = [message for message in messages if message.remedy]
    assert len(messages) > 20
    assert len(told) > len(messages) / 2


def test_every_message_is_shown_with_a_remedy_in_both_languages() -> None:
    """Its own, or that of `remedies.toml`, which knows no other; but for a few just written."""
    messages = [message for package in PACKAGES for message in messages_of(package)]
    alone = {message.wrong for message in messages if not message.remedy}
    few = 0.01 * len(messages)
    assert len(alone - set(remedies())) < few, sorted(alone - set(remedies()))
    assert len(set(remedies()) - alone) < few, sorted(set(remedies()) - alone)
    for english, chinese in remedies().values():
        assert english
        assert re.search(r"[\u4e00-\u9fff]", chinese) or chinese == english
    texts = [with_tables("<!-- errors: ms-profile -->", language) for language in ("en", "zh")]
    assert ["| use one of the three |" in text for text in texts] == [True, False]
    assert "| 给出三者之一 |" in texts[1]


@pytest.mark.parametrize("page", ["errors.md", "errors.zh.md"])
def test_the_commonest_messages_are_in_the_source(page: str) -> None:
    """The table at the top quotes messages word for word."""
    text = (REFERENCE / page).read_text().partition("\n## ms-")[0]
    quoted = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    known = {message.wrong for package in PACKAGES for message in messages_of(package)}
    assert len(quoted) > 10
    assert set(quoted) <= known


def test_tables_hold_a_row_a_key_in_both_languages() -> None:
    """The Chinese page shows the same rows under Chinese heads."""
    texts = [with_tables("<!-- keys: ms-align ppo -->", language) for language in ("en", "zh")]
    rows = [re.findall(r"^\| \[`(.+?)`\]\(#ms-align-ppo\.", text, re.MULTILINE) for text in texts]
    assert rows[0] == rows[1] == [row.name for row in rows_of("ms-align ppo")]
    assert "| 键 | 含义 | 类型 | 默认值 |" in texts[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_an_anchor_of_its_own(command: str) -> None:
    """Its link leads to itself, so that a key can be linked to."""
    anchors = re.findall(
        r"\]\(#(\S+)\)\{: id=\"(\S+)\" \}", with_tables(f"<!-- keys: {command} -->", "en")
    )
    assert len(anchors) == len(rows_of(command))
    assert all(link == anchor for link, anchor in anchors)
    assert len({anchor for _, anchor in anchors}) == len(anchors)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_meaning_speaks_of_what_a_run_file_can_hold(command: str) -> None:
    """TOML has no None, and writes true and false."""
    words = re.compile(r"\b(None|True|False)\b")
    assert [row.meaning for row in rows_of(command) if words.search(row.meaning)] == []


def test_the_meanings_of_keys_are_told_in_chinese() -> None:
    """Keys without a translation are shown in English; `nox -s translations` lists them."""
    known = chinese_meanings()
    text = with_tables("<!-- keys: ms-align ppo -->", "zh")
    assert known["Discount factor per token."] in text
    assert "Discount factor per token." not in text
