"""The page of refused combinations: one row per reason, for all commands of a package."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axes import COMMANDS, UNSET, axes_of, package_of

Choices = dict[str, tuple[str, ...]]
"""Values of each key, as TOML; every combination of them is refused."""
INTRODUCTION = (
    "`nox -s combinations` tries every pair of values of the keys of a run file. A pair trains, or"
    " it is refused before the first step with exit code 2 and one line, shown here. Keys and"
    " values added after a command's last full run are only among the pairs today."
)


def toml(value: Any) -> str:
    """Format a value as TOML, with inline tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def pair_count(command: str) -> int:
    """Number of pairs of values of a command's axes."""
    sizes = [len(values) for values in axes_of(command).values()]
    return sum(first * second for first, second in itertools.combinations(sizes, 2))


def write_page(
    results: Mapping[str, list[dict[str, Any]]], coverage: Mapping[str, dict[str, int]]
) -> str:
    """Return the page of refused combinations and of the coverage of the last full run."""
    lines = ["# Refused combinations", "", INTRODUCTION]
    for package in dict.fromkeys(map(package_of, COMMANDS)):
        commands = {
            name: refused for name, refused in results.items() if package_of(name) == package
        }
        lines += ["", f"## {package}", "", *coverage_table(commands, coverage)]
        rows = refused_rows(commands)
        if rows:
            lines += ["", "| commands | settings | reason |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def coverage_table(commands: Iterable[str], coverage: Mapping[str, dict[str, int]]) -> list[str]:
    """Table of the pairs that the last full run of each command covered."""
    lines = ["| command | runs | pairs | covered | failures | pairs today |", "|---|" + "--:|" * 5]
    for command in commands:
        name = f"`{command.partition(' ')[2]}`"
        if command not in coverage:
            lines.append(f"| {name} | 0 | 0 | 0 | 0 | {pair_count(command)} |")
            continue
        counts = [coverage[command][key] for key in ("runs", "pairs", "covered", "failed")]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {pair_count(command)} |")
    return lines


def refused_rows(results: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Rows of a package's table: one per reason and set of commands."""
    commands: dict[tuple[str, str], list[str]] = {}
    values: dict[tuple[str, str], list[list[Any]]] = {}
    for command, refused in results.items():
        for combination in refused:
            key = (combination["reason"], json.dumps(combination["values"]))
            commands.setdefault(key, []).append(command.partition(" ")[2])
            values[key] = combination["values"]
    rows: dict[tuple[str, str], list[list[Any]]] = {}
    for key, names in commands.items():
        rows.setdefault((key[0], ", ".join(names)), []).append(values[key])
    return [
        f"| {names} | {settings_cell(combinations)} | {escaped(reason)} |"
        for (reason, names), combinations in rows.items()
    ]


def settings_cell(combinations: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Combinations as lines of a cell; those that differ in one value share a line."""
    merged: list[Choices] = []
    for combination in combinations:
        choices: Choices = {axis: (shown(value),) for axis, value in combination}
        while (other := next((m for m in merged if is_similar(m, choices)), None)) is not None:
            merged.remove(other)
            choices = {
                axis: tuple(dict.fromkeys((*other[axis], *shown_values)))
                for axis, shown_values in choices.items()
            }
        merged.append(choices)
    return "<br>".join(
        ", ".join(f"`{axis}` = {' or '.join(shown)}" for axis, shown in choices.items())
        for choices in merged
    )


def is_similar(first: Choices, second: Choices) -> bool:
    """Whether two sets of choices have the same keys and differ in the values of at most one."""
    return first.keys() == second.keys() and sum(first[k] != second[k] for k in first) <= 1


def shown(value: Any) -> str:
    """A value as code; `unset` for a key that the run file does not have."""
    return "unset" if value is UNSET else f"`{toml(value).replace('@', '')}`"


def escaped(reason: str) -> str:
    """Escape a message for a cell of a table."""
    return reason.replace("|", "\\|").replace("<", "&lt;")
