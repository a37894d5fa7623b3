"""Shows docstrings in Chinese on the API pages of the Chinese site.

`docstrings/PACKAGE.zh.toml` and `meanings.zh.toml` hold the Chinese of each paragraph and each
described parameter, result and error by its English words, so that changed English has no Chinese
until it is translated again: it is shown in English, and named by

    python docs/extensions/chinese_docstrings.py            # what has no Chinese
    python docs/extensions/chinese_docstrings.py --write    # with a line for it in the tables
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from attrs_classes import AttrsClasses

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).parent / "docstrings"
MEANINGS = Path(__file__).with_name("meanings.zh.toml")
"""The Chinese of the keys of run files, which are fields of classes with the same words."""
PACKAGES = ("ms_data", "ms_kernels", "ms_parallel", "ms_profile", "ms_align", "ms_compress")
OPTIONS = {"returns_multiple_items": False}
"""How docstrings are parsed, as mkdocs.yml has it."""
HEAD = """\
# The Chinese of {package}'s docstrings by their English words, in the order of the API page.
# `python docs/extensions/chinese_docstrings.py --write` adds what is new and drops what is gone.
"""
BREAKS = re.compile(r"(^```.*?^```$|\n\s*\n|\n(?=\d+\. |- ))", re.DOTALL | re.MULTILINE)
"""What stands between two pieces of a text: an empty line, a new item of a list, a code block."""


def table_of(package: str) -> Path:
    """Where the Chinese of a package's docstrings lies."""
    return TABLES / f"{package}.zh.toml"


@cache
def chinese() -> dict[str, str]:
    """The Chinese of pieces by their English words."""
    tables = [MEANINGS, *map(table_of, PACKAGES)]
    read = [tomllib.loads(each.read_text(encoding="utf-8")) for each in tables if each.exists()]
    return {english: words for table in read for english, words in table.items() if words}


def in_chinese(text: str) -> str:
    """A text in Chinese, but for code and for what has no Chinese."""
    return changed(text, lambda piece: chinese().get(" ".join(piece.split()), piece))


def changed(text: str, change: Callable[[str], str]) -> str:
    """A text with each piece of it changed, code blocks and empty lines left as they are."""
    parts = BREAKS.split(text)
    for at in range(0, len(parts), 2):
        if parts[at].strip() and not parts[at].startswith("    "):
            parts[at] = change(parts[at])
    return "".join(parts)


def change_all(sections: Iterable[Any], change: Callable[[str], str]) -> None:
    """Change each text of a parsed docstring: paragraphs, and what parameters and others are."""
    for section in sections:
        if isinstance(section.value, str):
            section.value = change(section.value)
        for item in section.value if isinstance(section.value, list) else ():
            item.description = change(item.description)


class ChineseDocstring(griffe.Docstring):
    """A docstring that is parsed in English and then read in Chinese."""

    def parse(self, *arguments: Any, **options: Any) -> list[griffe.DocstringSection]:
        """The docstring's sections."""
        sections = super().parse(*arguments, **options)
        change_all(sections, in_chinese)
        return sections


class ChineseDocstrings(griffe.Extension):
    """Gives every object of a package its docstring in Chinese."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Is told of a package once it is loaded, after those that change docstrings."""
        for each in objects_of(pkg):
            if (old := each.docstring) is not None:
                each.docstring = ChineseDocstring(
                    old.value,
                    lineno=old.lineno,
                    endlineno=old.endlineno,
                    parent=old.parent,
                    parser=old.parser,
                    parser_options=old.parser_options,
                )


def objects_of(place: griffe.Object) -> Iterator[griffe.Object]:
    """A place with all that is defined in it, however deep."""
    yield place
    for member in place.members.values():
        if isinstance(member, griffe.Object):
            yield from objects_of(member)


def shown_by(package: str) -> list[str]:
    """The English pieces that a package's API page shows, each once and in their order."""
    name = package.replace("_", "-")
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / "packages" / name / "src"],
        extensions=griffe.load_extensions(AttrsClasses),
        docstring_parser=griffe.Parser.google,
        docstring_options=OPTIONS,
    )
    loader.load(package)
    loader.resolve_aliases(implicit=False)
    page = (ROOT / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8")
    found: dict[str, None] = {}

    def note(piece: str) -> str:
        found[" ".join(piece.split())] = None
        return piece

    for root in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        for each in shown_in(loader.modules_collection[root]):
            if each.docstring is not None:
                change_all(each.docstring.parse(), lambda text: changed(text, note))
    return list(found)


def shown_in(place: griffe.Object) -> Iterator[griffe.Object]:
    """What mkdocstrings shows of a module or class: itself and its public members."""
    yield place
    for name, member in place.members.items():
        if re.match("_[^_]", name) or (member.is_alias and not member.is_public):
            continue
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if not target.is_module:
            yield from shown_in(target)


def untranslated(package: str) -> list[str]:
    """The pieces of a package's API page that have no Chinese."""
    return [piece for piece in shown_by(package) if piece not in chinese()]


def left_over() -> list[str]:
    """What the tables translate and no API page shows any more."""
    shown = {piece for package in PACKAGES for piece in shown_by(package)}
    read = (tomllib.loads(table_of(p).read_text("utf-8")) for p in PACKAGES if table_of(p).exists())
    return [piece for table in read for piece in table if piece not in shown]


def write() -> None:
    """Write the tables anew: a line for each piece, empty where it has no Chinese."""
    done = set(tomllib.loads(MEANINGS.read_text(encoding="utf-8")))
    for package in PACKAGES:
        pieces = [piece for piece in shown_by(package) if piece not in done]
        done.update(pieces)
        lines = [f"{quoted(piece)} = {quoted(chinese().get(piece, ''))}\n" for piece in pieces]
        text = HEAD.format(package=package) + "\n" + "".join(lines)
        table_of(package).write_text(text, encoding="utf-8")


def quoted(text: str) -> str:
    """A text as TOML writes it."""
    return json.dumps(text, ensure_ascii=False)


def main() -> int:
    """Print what has no Chinese and what is left over; exit with 1 where there is any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables anew")
    if parser.parse_args().write:
        write()
    lines = [f"{package}: {piece}" for package in PACKAGES for piece in untranslated(package)]
    lines += [f"left over: {piece}" for piece in left_over()]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
