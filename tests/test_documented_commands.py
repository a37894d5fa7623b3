"""Parsers accept every command line of ours in pages, docstrings and messages.

`nox -s readme` also runs the commands of pages. They are only parsed here, which covers commands
that need a GPU, several machines or another program.
"""

import pytest

from documented_commands import (
    NOT_RUN,
    Line,
    documented,
    error_of,
    lines_in_markdown,
    lines_in_shell,
    lone_options,
    options_of_all,
    pages,
    readers_of,
    run_file_blocks,
    subcommands,
)
from packages import PACKAGES

ELSEWHERE = {
    *("--dry", "--update", "--max-restarts", "--layout", "--list", "--try-with", "--address"),
    "--dist-ckpt-optim-fully-reshardable",
}
"""Options of the demo, the examples, the tools of this repository, torchrun and Megatron-LM."""
OF_VLLM = {
    *("--enable-scale-out", "--logprobs-mode", "--enable-return-routed-experts"),
    "--kv-cache-dtype",
}
"""Options of vLLM's server."""


def test_every_documented_command_line_is_valid() -> None:
    """Subcommands, options, values and `--set` keys of all pages, docstrings and messages."""
    lines = documented()
    assert sum(line.complete for line in lines) > 150
    assert sum(not line.complete for line in lines) > 150
    problems = {
        f"{line.source}: {line.program} {' '.join(line.words)}": error_of(line) for line in lines
    }
    assert {line: problem for line, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("program", PACKAGES)
def test_every_command_has_an_example_in_its_help(program: str) -> None:
    """The line after `example:` in each `--help` is among the lines that are checked."""
    helps = {line.source for line in documented() if line.source.endswith("--help")}
    shown = {
        source.removeprefix(program).split()[0] for source in helps if source.startswith(program)
    }
    moved = {"doctor"} if program == "ms-parallel" else set()  # it only names its replacement
    assert set(subcommands(program)) - moved <= shown


def test_an_option_without_a_command_exists() -> None:
    """Options in READMEs and guides."""
    options = list(lone_options())
    assert len(options) > 50
    assert [
        entry for entry in options if entry[1] not in options_of_all() | ELSEWHERE | OF_VLLM
    ] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```sh\nms-data build a.jsonl --tokenizer t --chats --out o\n```", "--chats"),
        ("```bash\nms-data build a.jsonl --out o\n```", "--tokenizer"),
        ("```console\n$ ms-data inpsect shards\n```", "inpsect"),
        ("`ms-parallel watch`", "watch"),
        ("or `ms-data build --chats`, which", "--chats"),
        ("```sh\ntorchrun --nproc-per-node 2 -m ms_align sft R.toml --set stesp=1\n```", "stesp"),
        ("```sh\nms-compress qat R.toml --set tuning.stesp=1\n```", "tuning.stesp"),
        ("```sh\nX=1 ms-profile run --train-script a.py -- ms_parallel train\n```", "RUN.toml"),
        ("`ms-align ppo --set stesp=1`", "stesp"),
    ],
)
def test_an_invalid_command_line_is_reported(text: str, reason: str) -> None:
    """In shell blocks and in inline code."""
    problems = [error_of(line) for line in lines_in_markdown(text, "page")]
    assert any(reason in problem for problem in problems if problem), problems


def test_open_tables_accept_any_key_and_shell_syntax_is_parsed() -> None:
    """`model_config` accepts any key; pipes, comments and variables are skipped."""
    text = "A=1 ms-parallel train R.toml --set model_config.a=32 --set layout.data=2 | tee x # y"
    (line,) = lines_in_shell(text, "page", complete=True)
    assert line == Line("page", "ms-parallel", line.words, complete=True)
    assert line.words[-1] == "layout.data=2"
    assert error_of(line) is None


def test_every_toml_block_fits_some_command() -> None:
    """Some command accepts all keys of each run, cluster or rule file on the pages."""
    blocks = list(run_file_blocks())
    assert len(blocks) > 30
    assert [block for block in blocks if not readers_of(block[1])] == []
    assert readers_of("model = 'llama'\nstesp = 2") == []
    assert readers_of("[tuning]\nstesp = 2") == []
    assert readers_of("[model_config]\nanything = 2")


def test_a_block_that_is_not_run_states_the_reason() -> None:
    """Its commands are still parsed by the tests above."""
    reasons = [reason for page in pages() for reason in NOT_RUN.findall(page.read_text())]
    assert len(reasons) > 20
    assert [reason for reason in reasons if len(reason.split()) < 2] == []
