"""What a remedy names is there: commands, flags, extras, keys; and both languages name the same."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "extensions"))
from error_messages import messages_of, remedies
from run_keys import commands

from packages import PACKAGES, module_of, project_of, sources_of

BESIDE = {
    *("--nproc-per-node", "--standalone", "aoti_load_package", "named_modules"),
    *("generation_config", "tokenizer_config", "eos_token", "max_gen_toks", "self_attn"),
    *("full_attention", "sliding_attention", "partial_rotary_factor", "quant_method"),
    *("flatten_indices", "merge_and_unload", "stdlib", "post_processor", "kv_b_proj"),
}
"""What torch, torchrun, other libraries, their files and the corpus of ms-data call so."""
QUOTED = re.compile(r"`([^`]+)`")


@functools.cache
def told() -> tuple[str, ...]:
    """All that tells what to do: the ends of messages, and `remedies.toml` in both languages."""
    ends = [message.remedy for package in PACKAGES for message in messages_of(package)]
    return (*ends, *(text for pair in remedies().values() for text in pair))


def found(pattern: str, texts: Iterable[str]) -> list[str]:
    """What matches a pattern somewhere, each once."""
    return sorted({match for text in texts for match in re.findall(pattern, text)})


@functools.cache
def sources() -> tuple[ast.Module, ...]:
    """Every module of every package."""
    return tuple(tree for package in PACKAGES for _, tree in sources_of(package))


@functools.cache
def names_of_python() -> set[str]:
    """Names of functions and of what they take, and of fields of classes."""
    names = set()
    for node in (node for tree in sources() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@functools.cache
def flags() -> set[str]:
    """Flags of the packages' parsers."""
    calls = (node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = {word.value for call in calls for word in call.args if isinstance(word, ast.Constant)}
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


def test_flags_are_those_of_a_parser() -> None:
    """Whether a message names them in quotes or not."""
    named = found(r"(?<![\w-])--[a-z][a-z-]+", told())
    assert len(named) > 10
    assert [flag for flag in named if flag not in flags() | BESIDE] == []


def test_keys_are_those_of_a_run_file_or_of_python() -> None:
    """Whatever stands in quotes alone, a table in its brackets; and all that is joined by `_`."""
    keys = {row.name for read in commands().values() for part in read() for row in part.rows}
    known = {part for key in keys for part in key.split(".")} | names_of_python() | BESIDE
    known |= {module_of(package) for package in PACKAGES}
    named = found(r"`\[?([a-z_]+)\]?`", told()) + found(r"\b([a-z]+_[a-z_]+)\b", told())
    assert len(named) > 50
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_commands_answer_and_extras_are_declared(package: str) -> None:
    """`ms-data build` is a command, and `ms-data[clean]` can be installed."""
    extras = project_of(package)["optional-dependencies"]
    assert set(found(rf"{package}\[([a-z]+)\]", told())) <= set(extras)
    for command in found(rf"`{package} ([a-z]+)", told()):
        words = (sys.executable, "-m", module_of(package), command, "--help")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{package} {command}: {done.stderr}"


def test_both_languages_name_the_same() -> None:
    """Commands, keys and values stand in quotes, and are not translated."""
    for wrong, (english, chinese) in remedies().items():
        assert sorted(QUOTED.findall(english)) == sorted(QUOTED.findall(chinese)), wrong
