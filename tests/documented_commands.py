"""Find the command lines of ours that pages, docstrings, messages and run files show."""

import argparse
import ast
import functools
import importlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from packages import PACKAGES, ROOT, module_of, sources_of

sys.path.insert(0, str(ROOT / "docs" / "extensions"))
from run_keys import commands as run_files

SHELL = {"bash", "sh", "console", "shell"}
FENCE = re.compile(r"^( *)(`{3,}|~{3,})(\w*)[^\n]*\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
INDENTED = re.compile(r"^(?: {4}|\t|# ?)(\S.*(?:\\\n.*)*)$", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
OPERATORS = re.compile(r"[|&;()<>]+")
PROGRAMS = {name: name for package in PACKAGES for name in (package, module_of(package))}


class Line(NamedTuple):
    """A command line of ours with the place that shows it."""

    place: str
    program: str
    """The installed command, such as `ms-data`."""
    words: tuple[str, ...]
    """Its arguments."""
    complete: bool
    """Whether a reader would type it as it is. Inline code often shows only part of a command."""


@functools.cache
def documented() -> tuple[Line, ...]:
    """Every command line of ours in the repository."""
    return tuple(_documented())


def _documented() -> Iterator[Line]:
    for page in pages():
        yield from in_markdown(page.read_text(), str(page.relative_to(ROOT)))
    for package in PACKAGES:
        for path, tree in sources_of(package):
            yield from in_python(tree, str(path.relative_to(ROOT)))
        for command in (None, *subcommands(package)):
            place = f"{package} {command or ''} --help"
            for example in re.findall(r"^example: (.+)$", help_of(package, command), re.MULTILINE):
                yield from in_shell(example, place, complete=True)
    for path in sorted((ROOT / "examples").rglob("*")):
        place = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            yield from in_python(ast.parse(path.read_text()), place)
        elif path.suffix in (".toml", ".sbatch"):
            for match in re.finditer(r"^#? *(.*(?:\\\n.*)*)$", path.read_text(), re.MULTILINE):
                yield from in_shell(match[1], place, complete=path.suffix == ".sbatch")


def pages() -> list[Path]:
    """Every Markdown page that a reader meets."""
    top = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted([*top, *ROOT.glob("packages/*/*.md"), *ROOT.glob("packages/*/benchmarks/*.md")])


def in_markdown(text: str, place: str) -> Iterator[Line]:
    """Command lines of a page: whole ones from fenced blocks, possibly parts from inline code."""
    for _, _, language, block in FENCE.findall(text):
        if language in SHELL:
            console = language == "console"
            lines = re.findall(r"^\$ (.*(?:\\\n.*)*)$", block, re.MULTILINE) if console else [block]
            for line in lines:
                yield from in_shell(line, place, complete=True)
    for _, span in INLINE.findall(FENCE.sub("", text)):
        yield from in_shell(" ".join(span.split()), place, complete=False)


def in_python(tree: ast.AST, place: str) -> Iterator[Line]:
    """Command lines of docstrings, `example=` and messages; what an f-string fills in is VALUE."""
    parts = {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        where = f"{place}:{node.lineno}"
        for line in INDENTED.findall(text):
            yield from in_shell(line, where, complete=False)
        for _, span in INLINE.findall(text):
            yield from in_shell(" ".join(span.split()), where, complete=False)


def in_shell(text: str, place: str, *, complete: bool) -> Iterator[Line]:
    """Command lines of ours in a piece of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            tokens = list(lexer)
        except ValueError:  # a quote that prose leaves open
            continue
        simple: list[str] = []
        for token in [*tokens, ";"]:
            if OPERATORS.fullmatch(token):
                yield from of_ours(simple, place, complete=complete)
                simple = []
            else:
                simple.append(token)


def of_ours(words: list[str], place: str, *, complete: bool) -> Iterator[Line]:
    """The command of ours in a simple command, with that which it starts after `--`."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    at = 0
    if words and words[0] in ("python", "python3", "torchrun", "srun", "sudo"):
        at = next((i + 1 for i, word in enumerate(words) if word == "-m"), len(words))
    if at < len(words) and words[at] in PROGRAMS:
        program = PROGRAMS[words[at]].replace("_", "-")
        rest = [word.strip("[]") if word.startswith("[") else word for word in words[at + 1 :]]
        rest = [
            word.removesuffix("]...").removesuffix("]") if "[" not in word else word
            for word in rest
        ]
        rest = [word for word in rest if word not in ("...", "…")]
        nested = rest[rest.index("--") + 1 :] if "--" in rest else []
        yield Line(place, program, tuple(rest), complete)
        if nested and program == "ms-profile":
            yield from of_ours(nested, place, complete=complete)


def subcommands(program: str) -> list[str]:
    """Names of a program's commands."""
    (choices,) = re.findall(r"choose from ([^)]+)\)", refused_by_parser(program, ("?",)) or "")
    return re.findall(r"[a-z-]+", choices)


def mistake(line: Line) -> str | None:
    """What the command's own parser, or the keys of its run file, refuse; None for nothing."""
    if line.complete:
        refused = refused_by_parser(line.program, line.words)
        if refused:
            return refused
    else:
        command = next((word for word in line.words[:1] if re.fullmatch(r"[a-z]+", word)), None)
        if command and command not in subcommands(line.program):
            return f"{line.program} has no command {command!r}"
        known = help_of(line.program, command)
        before = line.words[: line.words.index("--")] if "--" in line.words else line.words
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", " ".join(before)):
            if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known):
                return f"{line.program} {command or ''} has no option {flag}"
    return unknown_key(line)


def refused_by_parser(program: str, words: tuple[str, ...]) -> str | None:
    """The complaint of the program's parser."""
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint), redirect_stdout(io.StringIO()):
            _, rest = parser_of(program, words).parse_known_args(words)
    except SystemExit as ending:
        return complaint.getvalue().strip() if ending.code else None
    # ms-kernels takes `NAME=VALUE` after options, which argparse leaves over.
    left = [word for word in rest if program != "ms-kernels" or word.startswith("-")]
    return f"{program}: unrecognized arguments: {' '.join(left)}" if left else None


def parser_of(program: str, words: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser that the program itself makes for these words."""
    cli = importlib.import_module(f"{module_of(program)}.cli")
    takes = {"ms-parallel": (words,), "ms-profile": (words,)}
    options = {"with_epilog": "--help" in words} if program == "ms-align" else {}
    parser: argparse.ArgumentParser = cli._parser(*takes.get(program, ()), **options)
    return parser


@functools.cache
def help_of(program: str, command: str | None) -> str:
    """What `--help` prints; empty if there is no such command."""
    words = (command, "--help") if command else ("--help",)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            parser_of(program, words).parse_args(words)
    except SystemExit:
        pass
    return printed.getvalue()


@functools.cache
def keys_of(command: str) -> frozenset[str]:
    """Names of the keys that a command's run file may hold; those of open tables end with a dot."""
    read = run_files().get(command)
    if read is None and command.startswith("ms-parallel "):
        read = run_files()["ms-parallel train"]
    sections = read() if read else []
    if command == "ms-data clean":  # a section is a rule, whose table it names in brackets
        rules = [(section.title[1:].partition("]")[0], section.rows) for section in sections]
        named = {f"{rule}.{row.name}" for rule, rows in rules for row in rows}
        return frozenset(named | {f"{rule}." for rule, _ in rules})
    rows = [row for section in sections for row in section.rows]
    return frozenset(row.name + ("." if "table" in row.types else "") for row in rows)


def unknown_key(line: Line) -> str | None:
    """An override, `KEY=VALUE` or `--set KEY=VALUE`, whose key no run file of the command has."""
    if not line.words:
        return None
    known = keys_of(f"{line.program} {line.words[0]}")
    for word, setting in zip(line.words, line.words[1:], strict=False):
        name, equals, _ = setting.partition("=")
        follows_operand = not word.startswith("--") and line.words[0] != "explain"
        is_override = word == "--set" or (equals and follows_operand)
        if not is_override or not known or not re.fullmatch(r"[a-z][a-z_.]*", name):
            continue
        if not accepts(known, name):
            return f"{line.program} {line.words[0]} has no key {name!r}"
    return None


def accepts(known: frozenset[str], name: str) -> bool:
    """Whether a run file may hold a key: a known one, or any in a table whose keys are open."""
    if {name, f"{name}."} & known:
        return True
    tables = [table for table in known if table.endswith(".") and name.startswith(table)]
    return any(not any(key.startswith(table) and key != table for key in known) for table in tables)


def run_file_blocks() -> Iterator[tuple[str, str]]:
    """Each page and each of its TOML blocks."""
    for page in pages():
        place = str(page.relative_to(ROOT))
        for _, _, language, block in FENCE.findall(page.read_text()):
            if language == "toml":
                yield place, block


def readers_of(block: str) -> list[str]:
    """The commands whose run files may hold every key of a TOML block."""
    names = list(_names(tomllib.loads(block)))
    known = {command: keys_of(command) for command in run_files()}
    return [
        command for command, keys in known.items() if all(accepts(keys, name) for name in names)
    ]


def _names(table: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def lone_options() -> Iterator[tuple[str, str]]:
    """Long options that READMEs and guides name without a command, each with its page.

    Pages for users of other trainers name the options of those in their tables.
    """
    for page in pages():
        place = str(page.relative_to(ROOT))
        if not re.match(r"docs/(?!coming-from)|packages/[\w-]+/README|README", place):
            continue
        for _, span in INLINE.findall(FENCE.sub("", page.read_text())):
            if span.startswith("--"):
                for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", span):
                    yield place, option


@functools.cache
def options_of_all() -> frozenset[str]:
    """Every long option of every command."""
    texts = [
        help_of(program, command)
        for program in PACKAGES
        for command in (None, *subcommands(program))
    ]
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(texts)))
