"""Mistakes in a run file are reported before torch is imported, which takes seconds."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import sys
from ms_align.cli import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("sft RUN", None, "cannot be read"),
        ("reward RUN", None, "cannot be read"),
        ("dpo RUN", None, "cannot be read"),
        ("ppo RUN", None, "cannot be read"),
        ("grpo RUN", None, "cannot be read"),
        ("generate RUN", None, "cannot be read"),
        ("evaluate RUN", None, "cannot be read"),
        (
            "sft RUN",
            'model="Qwen/Qwen3-0.6B"\ndataset="x"\nepochs=1\nsequence_length=64\n',
            "not a local folder, and names of the Hugging Face Hub are not downloaded",
        ),
        (
            "sft RUN",
            'model="/no/where"\ndataset="x"\nepochs=1\nsequence_length=64\n',
            "'/no/where' does not exist",
        ),
        ("sft RUN", 'modle="x"\n', "unknown key 'modle'; did you mean 'model'?"),
        (
            "grpo RUN",
            'model="."\ndataset="x"\nreward_model="no_such:right"\n',
            "'no_such:right' cannot be imported: No module named 'no_such'",
        ),
        (
            "ppo RUN",
            'model="."\ndataset="x"\nreward_model={a="/no/where"}\n',
            "reward_model must be a local folder",
        ),
    ],
)
def test_a_mistake_is_reported_before_torch_is_imported(
    command: str, content: str | None, message: str, tmp_path: Path
) -> None:
    """A missing file, an unknown key, a missing folder: one line and exit code 2."""
    run_file = tmp_path / "RUN.toml"
    if content is not None:
        run_file.write_text(content)
    words = command.replace("RUN", str(run_file)).split()
    result = subprocess.run(
        [sys.executable, "-c", CALL, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.stdout == "2 False\n", result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ['modle="x"\n', 'model="."\ndataset="x"\nsteps=1\nlora=3\n'])
def test_ranks_report_a_mistake_once(content: str, tmp_path: Path) -> None:
    """Before torch is imported or by the trainer: one line from one rank, and both exit with 2."""
    from .processes import run_processes

    (tmp_path / "run.toml").write_text(content)
    codes = run_processes(
        2, __file__, "run_sft", run_file=str(tmp_path / "run.toml"), log=str(tmp_path / "log")
    )
    lines = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert codes == [2, 2], lines
    assert sorted(text.count("\n") for text in lines) == [0, 1]
    assert "".join(lines).startswith("ms-align: ")


def run_sft(run_file: str, log: str) -> int:
    """Run `ms-align sft` in one rank, with its standard error in a file."""
    from ms_align.cli import main

    with Path(f"{log}{os.environ['RANK']}").open("w") as file, contextlib.redirect_stderr(file):
        return main(["sft", run_file])
