"""Truncated files and changed bytes give one line and exit code 2, or valid results."""

import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from chats import write_tokenizer
from folders import model, write_model, write_run, write_shards

from ms_compress import CompressError, export, qat
from ms_compress.cli import main
from ms_compress.corpus import read_batch
from ms_compress.targets.footprint import footprint
from ms_compress.targets.target import open_runtime
from ms_compress.text_ends import read_tokenizer

DEEP = b"[" * 200_000
SEEDS = int(os.environ.get("MS_FUZZ", "40"))
"""Number of damaged copies per file; `MS_FUZZ=1000` for more."""
FILES = [
    ("ct", "model.safetensors"),
    ("ct", "config.json"),
    ("ort", "model.onnx"),
    ("ort", "model.onnx.data"),
    ("gguf", "model.gguf"),
    ("ct", "tokenizer.json"),
    ("ct", "tokenizer_config.json"),
    ("ct", "generation_config.json"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, its exports, and token shards."""
    folder = tmp_path_factory.mktemp("work")
    write_model(folder / "base")
    write_shards(folder)
    tokenizer = write_tokenizer(folder / "tokenizer")
    for name, scheme in (("ct", "ct.int4_g32"), ("ort", "ort.matmulnbits"), ("gguf", "gguf.q4_0")):
        export(qat(model(), scheme), folder / name, tokenizer=tokenizer)
    return folder


def damage_bytes(content: bytes, seed: int) -> bytes:
    """Truncate the content or change some bytes, mostly near the start."""
    rng = random.Random(seed)
    if seed % 2:
        return content[: int(len(content) * rng.random() ** 3)]
    modified = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        modified[int(len(modified) * rng.random() ** 4)] = rng.choice((0, 1, 0x7F, 0xFF))
    return bytes(modified)


def error_of(folder: Path, *, runs: bool) -> str | None:
    """Return the error for a folder; None if it loads."""
    try:
        read_tokenizer(folder)
        facts = footprint(folder)
        if runs:
            open_runtime(folder, facts.target)
    except CompressError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "file"), FILES)
def test_damaged_bytes_give_one_line(name: str, file: str, work: Path, tmp_path: Path) -> None:
    """For any failure of the format's library, and within a memory limit."""
    original = (work / name / file).read_bytes()
    folder = shutil.copytree(work / name, tmp_path / name)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(SEEDS):
        (folder / file).write_bytes(damage_bytes(original, seed))
        error = error_of(folder, runs=name == "ort")
        assert error is None or ("\n" not in error and str(folder) in error)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    assert grown_kb < 500_000


@pytest.mark.parametrize(
    ("name", "file"), [("ct", "model.safetensors"), ("ort", "model.onnx"), ("gguf", "model.gguf")]
)
def test_evaluate_reports_a_truncated_file_in_one_line(
    name: str, file: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncated at twenty positions."""
    original = (work / name / file).read_bytes()
    folder = shutil.copytree(work / name, tmp_path / name)
    (folder / "tokenizer.json").unlink(missing_ok=True)  # differs from the shards' tokenizer
    run = tmp_path / "run.toml"
    run.write_text(
        f'baseline = "{work}/base"\ndataset = "{work}/shards"\noutput_dir = "{tmp_path}/report"\n'
        f'sequence_length = 16\nsequences = 1\n[models]\nx = "{folder}"\n'
    )
    for part in range(20):
        (folder / file).write_bytes(original[: len(original) * part // 20])
        assert main(["evaluate", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith(f"ms-compress: {folder}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + DEEP, "nested too deeply"),
        (b'model = "\xff"', "not UTF-8 text"),
        (b"learning_rate = " + b"9" * 5000, "run.toml: "),
        (b'model = "a\\u0000b"\noutput_dir = "x"\nscheme = "ct.w8a8"', "which contains a NUL"),
        (
            b'model = "' + b"a" * 10**6 + b'"\noutput_dir = "x"\nscheme = "ct.w8a8"',
            "which is longer than the system allows",
        ),
        (
            b"[tuning]\nlearning_rate = 1" + b"0" * 400,
            "tuning.learning_rate is an integer of more than 128 bits",
        ),
    ],
)
def test_a_damaged_run_file_gives_one_line(
    content: bytes,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nesting, invalid text, and numbers and paths beyond all limits."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_bytes(content)
    assert main(["quantize", "run.toml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 1000


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "9" * 5000, "{a=" * 50_000, '"\\ud800"', "1e999999"]
)
def test_a_damaged_setting_gives_one_line(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for settings on the command line."""
    file = write_run(tmp_path)
    for key in ("rows", "tuning.learning_rate", "scheme", "model"):
        assert main(["quantize", str(file), "--set", f"{key}={value}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dataset.json", DEEP),
        ("dataset.json", b'[["a"]]'),
        ("dataset.json", b"[[1.5]]"),
        ("dataset.json", b"\xff\xfe"),
        ("dataset.json", b"[[" + b"9" * 400 + b"]]"),
        ("dataset.jsonl", b'{"messages": ' + DEEP),
        ("dataset.jsonl", b'{"messages": [{"role": "user", "content": "\xff"}]}'),
        ("dataset.jsonl", b"{}"),
        ("dataset.jsonl", b""),
    ],
)
def test_a_damaged_dataset_gives_one_line(
    file: str, content: bytes, work: Path, tmp_path: Path
) -> None:
    """Tokens and conversations."""
    import ms_data

    (tmp_path / file).write_bytes(content)
    with pytest.raises((CompressError, ms_data.DataError)) as caught:
        read_batch(tmp_path / file, count=1, length=8, chat=work / "tokenizer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("config.json", lambda path: path.write_bytes(b'{"a": ' + DEEP)),
        ("config.json", lambda path: path.write_bytes(b"\xff")),
        ("tokenizer.json", lambda path: path.write_bytes(DEEP)),
        ("generation_config.json", lambda path: path.write_bytes(b"{")),
        ("tokenizer_config.json", lambda path: (path.unlink(), path.symlink_to(path.name))),
        ("chat_template.jinja", lambda path: path.write_bytes(b"\xff\xfe")),
    ],
)
def test_a_damaged_model_folder_gives_one_line(
    file: str,
    damage: Callable[[Path], object],
    work: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In each of the files next to the weights."""
    folder = shutil.copytree(work / "base", tmp_path / "model")
    for path in (work / "tokenizer").iterdir():
        shutil.copy(path, folder)
    damage(folder / file)
    run = tmp_path / "run.toml"
    run.write_text(f'model = "{folder}"\noutput_dir = "{tmp_path}/out"\nscheme = "ct.int4_g32"\n')
    code = main(["quantize", str(run)])
    error = capsys.readouterr().err
    if file == "tokenizer_config.json":  # a circular link counts as absent
        assert code == 0
        assert all(line.startswith("tensor ") for line in error.splitlines())  # progress
        return
    assert code == 2
    assert error.count("\n") == 1
    assert str(folder) in error
    assert not (tmp_path / "out").exists()
