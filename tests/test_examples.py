"""Every example runs, uses only public names, and is in the index.

The `FAST` ones run in the default tests, in this process; all run as the command in their docstring
in the slow tests (`nox -s examples`).
"""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from packages import PACKAGES, ROOT, module_of
from test_public_names import FROZEN

EXAMPLES = ROOT / "examples"
FOLDERS = ("train", "data", "align", "compress", "kernels", "profile", "launch")
PATHS = sorted(path for folder in FOLDERS for path in (EXAMPLES / folder).glob("*.py"))
NAMES = [str(path.relative_to(EXAMPLES)) for path in PATHS]
MAX_LINES, MAX_FILES_PER_FOLDER = 150, 14
NEEDS = {
    "align/calculator_tool.py": ("transformers", "tokenizers"),
    "align/evaluate.py": ("lm_eval", "onnxruntime", "onnx"),
    "align/sound.py": ("transformers", "tokenizers", "soundfile"),
    "compress/qat_to_gguf.py": ("gguf",),
    "data/transformers_trainer.py": ("transformers", "accelerate"),
    "profile/trackers.py": ("wandb", "mlflow", "sqlalchemy", "tensorboard"),
    "train/hugging_face_folder.py": ("transformers",),
}
"""Optional modules that an example needs."""


def documented_command(path: Path) -> list[str]:
    """Command in the docstring of an example."""
    text = ast.get_docstring(ast.parse(path.read_text()), clean=True) or ""
    command = re.search(r"^    (.*examples/.*)$", text, re.MULTILINE)
    assert command, f"{path}: the docstring must contain a command"
    return shlex.split(command[1])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_starts_with_a_question(name: str) -> None:
    """The docstring has the question, the command and a description of the output."""
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= MAX_LINES
    question, _, body = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    assert re.match(r"(How|Which|What|Where|Why|Does|Can) .*\?$", question), question
    assert f"examples/{name}" in body
    assert len(body.split("\n\n")) >= 2, "describe the output"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_imports_only_public_names(name: str) -> None:
    """All imports from our packages are in `__all__`."""
    modules = {module_of(package) for package in PACKAGES}
    private = []
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            public = FROZEN.get(str(node.module), [])
            private += [
                f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public
            ]
        if isinstance(node, ast.Import):
            private += [
                alias.name
                for alias in node.names
                if alias.name.split(".")[0] in modules and alias.name not in FROZEN
            ]
    assert private == []


def test_the_index_lists_every_example_with_its_question_and_command() -> None:
    """The table in examples/README.md matches the docstrings."""
    rows = re.findall(
        r"^\| (.*?) \| \[(.*?)\]\(\2\) \| `(.*?)` \| (\d+) \|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    expected = {}
    for path in PATHS:
        question = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        expected[str(path.relative_to(EXAMPLES))] = (question, shlex.join(documented_command(path)))
    assert {row[1]: (row[0], row[2]) for row in rows} == expected
    for folder in FOLDERS:
        assert len(list((EXAMPLES / folder).glob("*.py"))) <= MAX_FILES_PER_FOLDER


def load(name: str) -> ModuleType:
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FAST = {
    "data/plain_loop.py": (["--steps", "30"], r"held-out loss [0-5]\.\d+"),
    "kernels/own_operator.py": ([], r"custom \d\.\de-1[4-9]"),
    "launch/check.py": ([], r"32 processes meet"),
    "train/custom_trainer.py": (["--steps", "20"], r"loss 6\.\d+ -> [0-5]\.\d+"),
    "train/schedule_search.py": ([], r"found:  573 ms; no schedule is faster than 573 ms"),
}
"""Examples in the default tests, with arguments and a pattern of their output."""


@pytest.mark.parametrize("name", FAST)
def test_a_fast_example_prints_its_result(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It runs in an empty folder and prints the expected output."""
    arguments, pattern = FAST[name]
    if name == "launch/check.py":
        pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    load(name).main(arguments)
    assert re.search(pattern, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_an_examples_docstring_runs(name: str, tmp_path: Path) -> None:
    """Run in an empty folder with a link to the examples; the exit code is 0."""
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    program, *arguments = documented_command(EXAMPLES / name)
    command = [sys.executable, *arguments] if program == "python" else [program, *arguments]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.strip()


@pytest.fixture
def calculator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module that the process of its tool can import, too."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES / "align")
    return importlib.import_module("calculator_tool")


def test_the_calculator_example_draws_both_curves(tmp_path: Path, calculator: Any) -> None:
    """Two updates of each run, after one step of the format."""
    options = ["--format-steps", "1", "--steps", "2", "--batch-size", "16"]
    curves = calculator.main(["--folder", str(tmp_path), *options])
    assert [len(curve) for curve in curves.values()] == [2, 2]
    assert (tmp_path / "learning.svg").read_text().count("<polyline") == 2


@pytest.mark.slow
def test_the_calculator_is_learned_from_the_rewards_alone(tmp_path: Path, calculator: Any) -> None:
    """Right answers become frequent, and not with the same rewards in random order."""
    curves = calculator.main(["--folder", str(tmp_path)])
    learned, control = (sum(curve[-10:]) / 10 for curve in curves.values())
    assert all(len(curve) == 60 and curve[0] < 0.4 for curve in curves.values())
    assert learned > 0.7
    assert learned > control + 0.4
