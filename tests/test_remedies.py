"""Remedies name existing commands, flags, extras and keys, the same in both languages."""

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

EXTERNAL_NAMES = {
    *("--nproc-per-node", "--standalone", "aoti_load_package", "named_modules"),
    *("generation_config", "tokenizer_config", "eos_token", "max_gen_toks", "self_attn"),
    *("full_attention", "sliding_attention", "partial_rotary_factor", "quant_method"),
    *("--logprobs-mode", "--max-model-len", "--enable-scale-out", "processed_logprobs"),
    *("profile_memory", "--type", "--dist-ckpt-optim-fully-reshardable"),
    *("flatten_indices", "merge_and_unload", "stdlib", "post_processor", "kv_b_proj"),
}
"""Names from torch, torchrun, other libraries and their files, and ms-data's corpus."""
QUOTED = re.compile(r"`([^`]+)`")


@functools.cache
def remedy_texts() -> tuple[str, ...]:
    """All remedies: from messages, and from `remedies.toml` in both languages."""
    ends = [message.remedy for package in PACKAGES for message in messages_of(package)]
    return (*ends, *(text for pair in remedies().values() for text in pair))


def matches(pattern: str, texts: Iterable[str]) -> list[str]:
    """Unique matches of a pattern in the texts, sorted."""
    return sorted({match for text in texts for match in re.findall(pattern, text)})


@functools.cache
def sources() -> tuple[ast.Module, ...]:
    """Every module of every package."""
    return tuple(tree for package in PACKAGES for _, tree in sources_of(package))


@functools.cache
def python_names() -> set[str]:
    """Names of functions, classes, parameters and fields."""
    names = set()
    for node in (node for tree in sources() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def flags() -> set[str]:
    """Flags of the packages' parsers."""
    calls = (node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = {word.value for call in calls for word in call.args if isinstance(word, ast.Constant)}
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


def test_flags_exist_in_a_parser() -> None:
    """Both quoted and unquoted flags."""
    named = matches(r"(?<![\w-])--[a-z][a-z-]+", remedy_texts())
    assert len(named) > 10
    assert set(named) - flags() - EXTERNAL_NAMES == set()


def test_keys_exist_in_a_run_file_or_in_python() -> None:
    """Checks single quoted words, table names in brackets, and words with underscores."""
    keys = {row.name for read in commands().values() for part in read() for row in part.rows}
    existing = {part for key in keys for part in key.split(".")} | python_names() | EXTERNAL_NAMES
    existing |= {module_of(package) for package in PACKAGES}
    names = matches(r"`\[?([a-z_]+)\]?`", remedy_texts()) + matches(
        r"\b([a-z]+_[a-z_]+)\b", remedy_texts()
    )
    assert len(names) > 50
    assert [name for name in names if name not in existing] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_commands_exist_and_extras_are_declared(package: str) -> None:
    """`ms-data build` is a command, and `ms-data[clean]` can be installed."""
    extras = project_of(package)["optional-dependencies"]
    assert set(matches(rf"{package}\[([a-z]+)\]", remedy_texts())) <= set(extras)
    for command in matches(rf"`{package} ([a-z]+)", remedy_texts()):
        arguments = (sys.executable, "-m", module_of(package), command, "--help")
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{package} {command}: {result.stderr}"


def test_both_languages_quote_the_same_names() -> None:
    """Commands, keys and values are in backquotes and are not translated."""
    for problem, (english, chinese) in remedies().items():
        assert sorted(QUOTED.findall(english)) == sorted(QUOTED.findall(chinese)), problem
