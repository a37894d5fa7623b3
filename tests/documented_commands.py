"""Find our command lines in pages, docstrings, messages and run files."""

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
    """A command line of our packages and its source."""

    source: str
    program: str
    """The installed command, such as `ms-data`."""
    words: tuple[str, ...]
    """Its arguments."""
    complete: bool
    """Whether it is a full command. Inline code often shows only a part."""


@functools.cache
def documented() -> tuple[Line, ...]:
    """All of our command lines in the repository."""
    return tuple(_documented())


def _documented() -> Iterator[Line]:
    for page in pages():
        yield from lines_in_markdown(page.read_text(), str(page.relative_to(ROOT)))
    for package in PACKAGES:
        for path, tree in sources_of(package):
            yield from lines_in_python(tree, str(path.relative_to(ROOT)))
        for command in (None, *subcommands(package)):
            source = f"{package} {command or ''} --help"
            for example in re.findall(r"^example: (.+)$", help_of(package, command), re.MULTILINE):
                yield from lines_in_shell(example, source, complete=True)
    for path in sorted((ROOT / "examples").rglob("*")):
        source = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            yield from lines_in_python(ast.parse(path.read_text()), source)
        elif path.suffix in (".toml", ".sbatch"):
            for match in re.finditer(r"^#? *(.*(?:\\\n.*)*)$", path.read_text(), re.MULTILINE):
                yield from lines_in_shell(match[1], source, complete=path.suffix == ".sbatch")


def pages() -> list[Path]:
    """All Markdown pages for readers."""
    top = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted([*top, *ROOT.glob("packages/*/*.md"), *ROOT.glob("packages/*/benchmarks/*.md")])


def lines_in_markdown(text: str, source: str) -> Iterator[Line]:
    """Command lines of a page: complete in fenced blocks, possibly partial in inline code."""
    for _, _, language, block in FENCE.findall(text):
        if language in SHELL:
            console = language == "console"
            lines = re.findall(r"^\$ (.*(?:\\\n.*)*)$", block, re.MULTILINE) if console else [block]
            for line in lines:
                yield from lines_in_shell(line, source, complete=True)
    for _, span in INLINE.findall(FENCE.sub("", text)):
        yield from lines_in_shell(" ".join(span.split()), source, complete=False)


def lines_in_python(tree: ast.AST, source: str) -> Iterator[Line]:
    """Command lines of docstrings, `example=` and messages; f-string fields become VALUE."""
    parts = {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        location = f"{source}:{node.lineno}"
        for line in INDENTED.findall(text):
            yield from lines_in_shell(line, location, complete=False)
        for _, span in INLINE.findall(text):
            yield from lines_in_shell(" ".join(span.split()), location, complete=False)


def lines_in_shell(text: str, source: str, *, complete: bool) -> Iterator[Line]:
    """Our command lines in shell code."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            tokens = list(lexer)
        except ValueError:  # prose with an unmatched quote
            continue
        simple: list[str] = []
        for token in [*tokens, ";"]:
            if OPERATORS.fullmatch(token):
                yield from our_commands(simple, source, complete=complete)
                simple = []
            else:
                simple.append(token)


def our_commands(words: list[str], source: str, *, complete: bool) -> Iterator[Line]:
    """Our command in a simple command, and the command after its `--`."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    start = 0
    if words and words[0] in ("python", "python3", "torchrun", "srun", "sudo"):
        start = next((i + 1 for i, word in enumerate(words) if word == "-m"), len(words))
    if start < len(words) and words[start] in PROGRAMS:
        program = PROGRAMS[words[start]].replace("_", "-")
        arguments = [
            word.strip("[]") if word.startswith("[") else word for word in words[start + 1 :]
        ]
        arguments = [
            word.removesuffix("]...").removesuffix("]") if "[" not in word else word
            for word in arguments
        ]
        arguments = [word for word in arguments if word not in ("...", "…")]
        nested = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
        yield Line(source, program, tuple(arguments), complete)
        if nested and program == "ms-profile":
            yield from our_commands(nested, source, complete=complete)


def subcommands(program: str) -> list[str]:
    """Names of a program's subcommands."""
    (choices,) = re.findall(r"choose from ([^)]+)\)", parser_error(program, ("?",)) or "")
    return re.findall(r"[a-z-]+", choices)


def error_of(line: Line) -> str | None:
    """Error of the command's parser, or unknown key of its run file; None if valid."""
    if line.complete:
        error = parser_error(line.program, line.words)
        if error:
            return error
    else:
        command = next((word for word in line.words[:1] if re.fullmatch(r"[a-z]+", word)), None)
        if command and command not in subcommands(line.program):
            return f"{line.program} has no command {command!r}"
        help_text = help_of(line.program, command)
        own_words = line.words[: line.words.index("--")] if "--" in line.words else line.words
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", " ".join(own_words)):
            if not re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text):
                return f"{line.program} {command or ''} has no option {flag}"
    return unknown_key(line)


def parser_error(program: str, words: tuple[str, ...]) -> str | None:
    """Error message of the program's parser, or None."""
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr), redirect_stdout(io.StringIO()):
            _, unparsed = parser_of(program, words).parse_known_args(words)
    except SystemExit as stop:
        return stderr.getvalue().strip() if stop.code else None
    # ms-kernels accepts `NAME=VALUE` after options, which argparse does not parse.
    unrecognized = [word for word in unparsed if program != "ms-kernels" or word.startswith("-")]
    return f"{program}: unrecognized arguments: {' '.join(unrecognized)}" if unrecognized else None


def parser_of(program: str, words: tuple[str, ...]) -> argparse.ArgumentParser:
    """Argument parser that the program builds for these arguments."""
    cli = importlib.import_module(f"{module_of(program)}.cli")
    parser_arguments = {"ms-parallel": (words,), "ms-profile": (words,)}
    options = {"with_epilog": "--help" in words} if program == "ms-align" else {}
    parser: argparse.ArgumentParser = cli._parser(*parser_arguments.get(program, ()), **options)
    return parser


@functools.cache
def help_of(program: str, command: str | None) -> str:
    """Output of `--help`; empty if the command does not exist."""
    words = (command, "--help") if command else ("--help",)
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(io.StringIO()):
            parser_of(program, words).parse_args(words)
    except SystemExit:
        pass
    return output.getvalue()


@functools.cache
def keys_of(command: str) -> frozenset[str]:
    """Keys of a command's run file; keys of open tables end with a dot."""
    read_sections = run_files().get(command)
    if read_sections is None and command.startswith("ms-parallel "):
        read_sections = run_files()["ms-parallel train"]
    sections = read_sections() if read_sections else []
    if command == "ms-data clean":  # each section is a rule, with its table name in brackets
        rules = [(section.title[1:].partition("]")[0], section.rows) for section in sections]
        names = {f"{rule}.{row.name}" for rule, rows in rules for row in rows}
        return frozenset(names | {f"{rule}." for rule, _ in rules})
    rows = [row for section in sections for row in section.rows]
    return frozenset(row.name + ("." if "table" in row.types else "") for row in rows)


def unknown_key(line: Line) -> str | None:
    """Error for an override (`KEY=VALUE` or `--set KEY=VALUE`) with an unknown key, or None."""
    if not line.words:
        return None
    keys = keys_of(f"{line.program} {line.words[0]}")
    for word, setting in zip(line.words, line.words[1:], strict=False):
        name, equals, _ = setting.partition("=")
        follows_operand = not word.startswith("--") and line.words[0] != "explain"
        is_override = word == "--set" or (equals and follows_operand)
        if not is_override or not keys or not re.fullmatch(r"[a-z][a-z_.]*", name):
            continue
        if not accepts(keys, name):
            return f"{line.program} {line.words[0]} has no key {name!r}"
    return None


def accepts(keys: frozenset[str], name: str) -> bool:
    """Whether a run file accepts a key: a known one, or any key of an open table."""
    if {name, f"{name}."} & keys:
        return True
    tables = [table for table in keys if table.endswith(".") and name.startswith(table)]
    return any(not any(key.startswith(table) and key != table for key in keys) for table in tables)


def run_file_blocks() -> Iterator[tuple[str, str]]:
    """Yield (page, block) for all TOML blocks."""
    for page in pages():
        source = str(page.relative_to(ROOT))
        for _, _, language, block in FENCE.findall(page.read_text()):
            if language == "toml":
                yield source, block


def readers_of(block: str) -> list[str]:
    """Commands whose run files accept every key of a TOML block."""
    names = list(_names(tomllib.loads(block)))
    keys_by_command = {command: keys_of(command) for command in run_files()}
    return [
        command
        for command, keys in keys_by_command.items()
        if all(accepts(keys, name) for name in names)
    ]


def _names(table: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def lone_options() -> Iterator[tuple[str, str]]:
    """Long options in READMEs and guides without a command, each with its page.

    Pages for users of other trainers are skipped because they list those trainers' options.
    """
    for page in pages():
        source = str(page.relative_to(ROOT))
        if not re.match(r"docs/(?!coming-from)|packages/[\w-]+/README|README", source):
            continue
        for _, span in INLINE.findall(FENCE.sub("", page.read_text())):
            if span.startswith("--"):
                for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", span):
                    yield source, option


@functools.cache
def options_of_all() -> frozenset[str]:
    """Every long option of every command."""
    texts = [
        help_of(program, command)
        for program in PACKAGES
        for command in (None, *subcommands(program))
    ]
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(texts)))
