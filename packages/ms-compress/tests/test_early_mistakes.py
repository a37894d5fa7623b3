"""Mistakes in a run file are reported before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import sys
from ms_compress.cli import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("qat RUN", None, "cannot be read"),
        ("prune RUN", None, "cannot be read"),
        ("distill RUN", None, "cannot be read"),
        ("quantize RUN", None, "cannot be read"),
        (
            "qat RUN",
            'model="Qwen/Qwen3-0.6B"\ndataset="x"\noutput_dir="y"\nscheme="gguf.q4_0"\n',
            "not a local folder, and names of the Hugging Face Hub are not downloaded",
        ),
        (
            "qat RUN",
            'model="/no/where"\ndataset="x"\noutput_dir="y"\nscheme="gguf.q4_0"\n',
            "'/no/where' does not exist",
        ),
        ("qat RUN", 'modle="x"\n', "unknown key 'modle'; did you mean 'model'?"),
    ],
)
def test_a_mistake_is_reported_before_torch_is_imported(
    command: str, content: str | None, message: str, tmp_path: Path
) -> None:
    """A missing file, an unknown key, a missing folder: one line and exit code 2."""
    run_file = tmp_path / "RUN.toml"
    if content is not None:
        run_file.write_text(content)
    arguments = command.replace("RUN", str(run_file)).split()
    process = subprocess.run(
        [sys.executable, "-c", CALL, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert process.stdout == "2 False\n", process.stderr
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
