"""Mistakes in a run file are reported before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import sys
from ms_parallel.cli import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("train RUN", None, "cannot be read"),
        ("inspect RUN", None, "cannot be read"),
        ("plan RUN --cluster c.toml", None, "cannot be read"),
        (
            "train RUN",
            'model="Qwen/Qwen3-0.6B"\ndataset="x"\nsteps=1\n',
            "not a local folder, and names of the Hugging Face Hub are not downloaded",
        ),
        ("train RUN", 'model="/no/where"\ndataset="x"\nsteps=1\n', "'/no/where' does not exist"),
        ("train RUN", 'modle="llama"\n', "unknown key 'modle'; did you mean 'model'?"),
        (
            "explain data=2 Qwen/Qwen3-0.6B",
            None,
            "not a local folder, and names of the Hugging Face Hub are not downloaded",
        ),
        ("prove /no/where", None, "'/no/where' does not exist"),
        ("generate /no/where --prompt x", None, "'/no/where' does not exist"),
    ],
)
def test_a_mistake_is_reported_before_torch_is_imported(
    command: str, content: str | None, message: str, tmp_path: Path
) -> None:
    """A missing file, an unknown key or a missing folder: one line and exit code 2."""
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
