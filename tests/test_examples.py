"""Every example answers its question as it says, with public names alone, and stands in the index.

`FAST` run in the default tests, one after the other in this process; all others are marked slow
and run in processes of their own, as their first lines say (`nox -s examples`).
"""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from packages import PACKAGES, ROOT, module_of
from test_public_names import FROZEN

EXAMPLES = ROOT / "examples"
ROOMS = ("train", "data", "align", "compress", "kernels", "profile", "launch")
QUESTIONS = sorted(path for room in ROOMS for path in (EXAMPLES / room).glob("*.py"))
NAMES = [str(path.relative_to(EXAMPLES)) for path in QUESTIONS]
LINES, FILES_A_FOLDER = 150, 14
NEEDS = {
    "align/evaluate.py": ("lm_eval", "onnxruntime", "onnx"),
    "compress/qat_to_gguf.py": ("gguf",),
    "data/transformers_trainer.py": ("transformers", "accelerate"),
    "profile/trackers.py": ("wandb", "mlflow", "sqlalchemy", "tensorboard"),
    "train/hugging_face_folder.py": ("transformers",),
}
"""Modules without which an example's own command has nothing to show."""


def command_of(path: Path) -> list[str]:
    """The command that the first lines of an example give."""
    text = ast.get_docstring(ast.parse(path.read_text()), clean=True) or ""
    found = re.search(r"^    (.*examples/.*)$", text, re.MULTILINE)
    assert found, f"{path}: the docstring gives a command"
    return shlex.split(found[1])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_question_on_a_page(name: str) -> None:
    """It begins with the question, its command, and what one sees; and it is short."""
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= LINES
    question, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    assert re.match(r"(How|Which|What|Where|Why|Does|Can) .*\?$", question), question
    assert f"examples/{name}" in rest
    assert len(rest.split("\n\n")) >= 2, "what one sees"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_imports_public_names_alone(name: str) -> None:
    """What it takes of our packages is what `__all__` gives to everybody."""
    ours = {module_of(package) for package in PACKAGES}
    hidden = []
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ours:
            public = FROZEN.get(str(node.module), [])
            hidden += [f"{node.module}.{n.name}" for n in node.names if n.name not in public]
        if isinstance(node, ast.Import):
            hidden += [
                n.name for n in node.names if n.name.split(".")[0] in ours and n.name not in FROZEN
            ]
    assert hidden == []


def test_the_index_names_every_example_with_its_question_and_command() -> None:
    """The table of examples/README.md is made of the files' own first lines."""
    rows = re.findall(
        r"^\| (.*?) \| \[(.*?)\]\(\2\) \| `(.*?)` \| (\d+) \|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    there = {}
    for path in QUESTIONS:
        question = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        there[str(path.relative_to(EXAMPLES))] = (question, shlex.join(command_of(path)))
    assert {row[1]: (row[0], row[2]) for row in rows} == there
    for room in ROOMS:
        assert len(list((EXAMPLES / room).glob("*.py"))) <= FILES_A_FOLDER


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FAST = {
    "data/plain_loop.py": (["--steps", "30"], r"held-out loss [0-5]\.\d+"),
    "kernels/own_operator.py": ([], r"mine \d\.\de-1[4-9]"),
    "launch/check.py": ([], r"32 processes meet"),
    "train/custom_trainer.py": (["--steps", "20"], r"loss 6\.\d+ -> [0-5]\.\d+"),
    "train/schedule_search.py": ([], r"found:  573 ms, and none is below 573 ms"),
}
"""Examples that the default tests run: their arguments, and what they then print."""


@pytest.mark.parametrize("name", FAST)
def test_a_small_example_answers(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It runs to its end in an empty folder and prints what it promises."""
    arguments, printed = FAST[name]
    if name == "launch/check.py":
        pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    load(name).main(arguments)
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    """The very command, in an empty folder that links to the examples; it ends with 0."""
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    program, *rest = command_of(EXAMPLES / name)
    started = [sys.executable, *rest] if program == "python" else [program, *rest]
    run = subprocess.run(
        started, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.strip()
