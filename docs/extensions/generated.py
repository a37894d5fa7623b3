"""An mkdocs hook that inserts the generated tables of reference pages.

`<!-- keys: ms-align ppo -->` is replaced by the keys of that command's run files, and
`<!-- errors: ms-data -->` by the error messages of that package. Pages of both languages have the
same marks; the table heads are translated.
"""

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from error_messages import Message, error_classes, messages_of, remedies  # noqa: E402
from run_keys import Section, commands  # noqa: E402

MARK = re.compile(r"^<!-- (keys|errors): (.+?) -->$", re.MULTILINE)
HEADS = {
    "en": {
        "keys": ("Key", "Meaning", "Type", "Default", "Allowed"),
        "errors": ("Problem", "Remedy", "Error class"),
        "classes": ("Error class", "Meaning"),
        "needed": "required",
    },
    "zh": {
        "keys": ("键", "含义", "类型", "默认值", "可取的值"),
        "errors": ("出了什么问题", "怎么办", "错误类"),
        "classes": ("错误类", "含义"),
        "needed": "必填",
        "text": "文本",
        "whole number": "整数",
        "number": "数",
        "true or false": "true 或 false",
        "table": "表",
        "list": "列表",
        "from": "不小于",
        "to": "不大于",
        "less than": "小于",
    },
}


@cache
def chinese_meanings() -> dict[str, str]:
    """Chinese meanings of keys and titles of groups, by their English text."""
    return tomllib.loads(Path(__file__).with_name("meanings.zh.toml").read_text(encoding="utf-8"))


def untranslated_meanings() -> list[str]:
    """Meanings and titles without a Chinese translation."""
    sections = [section for read in commands().values() for section in read()]
    texts = [text for s in sections for text in (s.title, *(row.meaning for row in s.rows))]
    return [text for text in dict.fromkeys(texts) if text not in chinese_meanings()]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Insert the tables of a page."""
    language = "zh" if page.file.src_uri.endswith(".zh.md") else "en"
    return with_tables(markdown, language)


def with_tables(markdown: str, language: str) -> str:
    """Replace marks by their tables.

    Raises:
        KeyError: a mark names a command without a run file.
    """
    tables = {"keys": tables_of_keys, "errors": tables_of_errors}
    return MARK.sub(lambda mark: tables[mark[1]](mark[2], HEADS[language]), markdown)


def tables_of_keys(command: str, heads: dict[str, Any]) -> str:
    """Tables of a command's keys, one per group."""
    return "\n\n".join(table_of_keys(section, command, heads) for section in commands()[command]())


def table_of_keys(section: Section, command: str, heads: dict[str, Any]) -> str:
    """Table of a group of keys; every key has an anchor, such as `#ms-align-ppo.kl_coeff`.

    The title of a cleaning rule starts with its TOML table, which is part of the anchor.
    """
    rule = re.match(r"\[(\w+)\]", section.title)
    prefix = "-".join(command.split()) + (f".{rule[1]}" if rule else "")
    words = chinese_meanings() if heads is HEADS["zh"] else {}
    rows = [
        (
            f'[`{row.name}`](#{prefix}.{row.name}){{: id="{prefix}.{row.name}" }}',
            words.get(row.meaning, row.meaning),
            " / ".join(heads.get(name, name) for name in row.types),
            heads["needed"] if row.default is None else row.default and f"`{row.default}`",
            limits(row.accepted, heads),
        )
        for row in section.rows
    ]
    return f"**{words.get(section.title, section.title)}**\n\n{table(heads['keys'], rows)}"


def limits(text: str, heads: dict[str, Any]) -> str:
    """Translate limits into a language; choices stay unchanged."""
    if text.startswith("`"):
        return text
    for word in ("from", "to", "less than"):
        text = re.sub(rf"\b{word}\b", heads.get(word, word), text)
    return text


def tables_of_errors(package: str, heads: dict[str, Any]) -> str:
    """Table of a package's error classes, and a table of messages per subpackage."""
    source = ROOT / "packages" / package / "src" / package.replace("-", "_")
    classes = [(f"`{name}`", text) for name, text in error_classes(source / "errors.py").items()]
    parts = [table(heads["classes"], classes)]
    messages = messages_of(package)
    for subpackage in dict.fromkeys(message.room for message in messages):
        rows = [m for m in messages if m.room == subpackage]
        escaped = [(code(m.wrong), remedy_of(m, heads), f"`{m.error}`") for m in rows]
        parts.append(f"**{subpackage}**\n\n{table(heads['errors'], escaped)}")
    return "\n\n".join(parts)


def remedy_of(message: Message, heads: dict[str, Any]) -> str:
    """Remedy in the message, or the one in `remedies.toml` in the page's language."""
    if message.remedy:
        return code(message.remedy)
    english, chinese = remedies().get(message.wrong, ("", ""))
    return chinese if heads is HEADS["zh"] else english


def code(text: str) -> str:
    """Escape the Markdown markup of a message."""
    return re.sub(r"([\\`*_\[\]<>{}#])", r"\\\1", text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
