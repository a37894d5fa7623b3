"""A hook of mkdocs that writes the tables of reference pages where a page asks for them.

`<!-- keys: ms-align ppo -->` stands for the keys of that command's run files, and
`<!-- errors: ms-data -->` for the messages of that package's errors. Pages of both languages hold
the same marks; the tables' heads are translated.
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
    """The meanings of keys and the titles of their groups in Chinese, by their English words."""
    return tomllib.loads(Path(__file__).with_name("meanings.zh.toml").read_text(encoding="utf-8"))


def untranslated_meanings() -> list[str]:
    """The meanings and titles of today that have no Chinese yet."""
    sections = [section for read in commands().values() for section in read()]
    words = [word for each in sections for word in (each.title, *(r.meaning for r in each.rows))]
    return [word for word in dict.fromkeys(words) if word not in chinese_meanings()]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the tables where a page asks for them."""
    language = "zh" if page.file.src_uri.endswith(".zh.md") else "en"
    return with_tables(markdown, language)


def with_tables(markdown: str, language: str) -> str:
    """Replace each mark by its tables.

    Raises:
        KeyError: a mark names a command that takes no run file.
    """
    tables = {"keys": tables_of_keys, "errors": tables_of_errors}
    return MARK.sub(lambda mark: tables[mark[1]](mark[2], HEADS[language]), markdown)


def tables_of_keys(command: str, heads: dict[str, Any]) -> str:
    """A table for each group of a command's keys."""
    return "\n\n".join(table_of_keys(section, command, heads) for section in commands()[command]())


def table_of_keys(section: Section, command: str, heads: dict[str, Any]) -> str:
    """A group of keys with its title; each key has an anchor, such as `#ms-align-ppo.kl_coeff`.

    The keys of a rule, whose title begins with its table, have that in their anchor.
    """
    rule = re.match(r"\[(\w+)\]", section.title)
    place = "-".join(command.split()) + (f".{rule[1]}" if rule else "")
    words = chinese_meanings() if heads is HEADS["zh"] else {}
    rows = [
        (
            f'[`{row.name}`](#{place}.{row.name}){{: id="{place}.{row.name}" }}',
            words.get(row.meaning, row.meaning),
            " / ".join(heads.get(one, one) for one in row.types),
            heads["needed"] if row.default is None else row.default and f"`{row.default}`",
            limits(row.accepted, heads),
        )
        for row in section.rows
    ]
    return f"**{words.get(section.title, section.title)}**\n\n{table(heads['keys'], rows)}"


def limits(text: str, heads: dict[str, Any]) -> str:
    """Limits in the words of a language; names to choose from stay as they are."""
    if text.startswith("`"):
        return text
    for word in ("from", "to", "less than"):
        text = re.sub(rf"\b{word}\b", heads.get(word, word), text)
    return text


def tables_of_errors(package: str, heads: dict[str, Any]) -> str:
    """A table of a package's errors, and one of messages for each of its rooms."""
    source = ROOT / "packages" / package / "src" / package.replace("-", "_")
    classes = [(f"`{name}`", text) for name, text in error_classes(source / "errors.py").items()]
    parts = [table(heads["classes"], classes)]
    messages = messages_of(package)
    for room in dict.fromkeys(each.room for each in messages):
        rows = [m for m in messages if m.room == room]
        escaped = [(code(m.wrong), remedy_of(m, heads), f"`{m.error}`") for m in rows]
        parts.append(f"**{room}**\n\n{table(heads['errors'], escaped)}")
    return "\n\n".join(parts)


def remedy_of(message: Message, heads: dict[str, Any]) -> str:
    """What to do: as the message says, or as this site does in its own language."""
    if message.remedy:
        return code(message.remedy)
    english, chinese = remedies().get(message.wrong, ("", ""))
    return chinese if heads is HEADS["zh"] else english


def code(text: str) -> str:
    """A message as it is printed, with nothing in it read as markup."""
    return re.sub(r"([\\`*_\[\]<>{}#])", r"\\\1", text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
