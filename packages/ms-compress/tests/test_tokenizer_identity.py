"""A dataset, teacher or evaluated folder with another tokenizer is refused before any work."""

import json
import shutil
from pathlib import Path

import pytest
from folders import write_model, write_shards

from ms_compress.cli import main

COMMANDS = {
    "qat": 'scheme = "ct.int4_g32"',
    "quantize": 'scheme = "ct.int4_g32"\nmethod = "gptq"',
    "prune": 'pattern = "2:4"',
    "distill": "layers = 1",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of its shards, and one whose tokenizer has two ids swapped."""
    folder = tmp_path_factory.mktemp("work")
    write_shards(folder)
    tokenizer = json.loads((folder / "shards" / "tokenizer.json").read_text())
    for name in ("same", "other"):
        write_model(folder / name)
        if name == "other":
            vocab = tokenizer["model"]["vocab"]
            vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        # Indented: the bytes differ, but `same` still has the tokenizer of the shards.
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    return folder


def run(command: str, folder: Path, text: str) -> int:
    """Run the command with a new run file."""
    file = folder / "run.toml"
    file.write_text(f'output_dir = "{folder}/out"\n{text}\n')
    return main([command, str(file)])


def refusal(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Return the single line on standard error, with no output written."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must have the same tokenizer: token " in error
    assert [path.name for path in folder.iterdir()] == ["run.toml"]
    return str(error)


def settings(work: Path, model: str, extra: str) -> str:
    """Return a short run on the shards."""
    return (
        f'model = "{work}/{model}"\ndataset = "{work}/shards"\nrows = 4\n{extra}\n'
        "[tuning]\nsteps = 1\nbatch_size = 2\nsequence_length = 16\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dataset_with_another_tokenizer_is_refused(
    command: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabularies have the same size; with the model's tokenizer the command runs."""
    assert run(command, tmp_path, settings(work, "other", COMMANDS[command])) == 2
    assert "model and dataset must" in refusal(capsys, tmp_path)
    assert run(command, tmp_path, settings(work, "same", COMMANDS[command])) == 0


def test_an_explicit_tokenizer_is_compared_instead_of_the_models(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export gets this tokenizer."""
    other = f'{COMMANDS["qat"]}\ntokenizer = "{work}/other/tokenizer.json"'
    assert run("qat", tmp_path, settings(work, "same", other)) == 2
    assert "tokenizer and dataset must" in refusal(capsys, tmp_path)
    matching = f'{COMMANDS["qat"]}\ntokenizer = "{work}/same"'
    assert run("qat", tmp_path, settings(work, "other", matching)) == 0


def test_a_teacher_with_another_tokenizer_is_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if its vocabulary has the same size."""
    extra = f'{COMMANDS["qat"]}\nteacher = "{work}/other"'
    assert run("qat", tmp_path, settings(work, "same", extra)) == 2
    assert "model and teacher must" in refusal(capsys, tmp_path)


@pytest.mark.parametrize(
    ("baseline", "model", "message"),
    [("other", "other", "baseline and dataset must"), ("same", "other", "baseline and 'x'")],
)
def test_evaluate_refuses_folders_with_another_tokenizer(
    baseline: str,
    model: str,
    message: str,
    work: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shards, baseline and every folder must have the same one."""
    text = f'baseline = "{work}/{baseline}"\ndataset = "{work}/shards"\n[models]\nx = "{work}/'
    assert run("evaluate", tmp_path, f'{text}{model}"') == 2
    assert message in refusal(capsys, tmp_path)


def test_a_model_without_a_tokenizer_is_not_compared(work: Path, tmp_path: Path) -> None:
    """A model folder does not need a tokenizer."""
    bare = shutil.copytree(work / "same", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    text = settings(work, "same", COMMANDS["prune"]).replace(f"{work}/same", str(bare))
    assert run("prune", tmp_path, text) == 0
