"""Damaged files of a run give one line: no traceback, no hang, no large allocation."""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import write_run

from ms_parallel.checkpoint import read_manifest
from ms_parallel.cli import main
from ms_parallel.errors import DamageError
from ms_parallel.schedules import zb_v

DEEP = 100_000
JSON = {
    "deep nesting": b"[" * DEEP,
    "a deep table": b'{"asked":' * DEEP,
    "invalid UTF-8": b'{"type":"\xff\xfe"}',
    "nothing": b"",
    "a cut": b'{"type":"timeline.v1","step":',
    "another type": b"[]",
    "null": b"null",
    "a huge number": b'{"type":"timeline.v1","step":1' + b"0" * 5000 + b"}",
    "an endless power": b'{"step":1e999999999}',
    "a NUL": b"\0" * 100,
}


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that refuses its input."""
    capsys.readouterr()
    try:
        code: object = main(list(words))
    except SystemExit as ended:  # from argparse, which also names the subcommand
        code = ended.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"ms-parallel( {words[0]})?: ", line)
    assert len(line) < 1000
    return line


@pytest.mark.parametrize("damage", JSON)
def test_a_damaged_recorded_step_gives_a_one_line_error(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file."""
    path = tmp_path / "step.json"
    path.write_bytes(JSON[damage])
    assert "step.json" in complaint(capsys, "schedule", str(path))


@pytest.mark.parametrize("damage", JSON)
def test_a_damaged_searched_schedule_gives_a_one_line_error(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy is to restore it or to search again."""
    run = write_run(tmp_path / "run.toml", tmp_path, schedule="search")
    run.with_suffix("").mkdir()
    (run.with_suffix("") / "schedule.json").write_bytes(JSON[damage])
    words = ("inspect", str(run), "--set", "layout.pipeline=2")
    assert "delete it to search again" in complaint(capsys, *words)


def test_a_damaged_schedule_table_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not UTF-8, nested overlaps, huge numbers, and truncated rows."""
    path = tmp_path / "table.csv"
    valid = zb_v(2, 4).to_csv().encode()
    damaged = (b"\xff\xfe", b"(" * DEEP, b"9" * 9999 + b"F0", b"", b"\0", valid[: len(valid) // 2])
    for content in damaged:
        path.write_bytes(content)
        assert "table.csv" in complaint(capsys, "schedule", str(path))


@pytest.mark.parametrize("damage", JSON)
def test_a_damaged_manifest_is_detected(damage: str, tmp_path: Path) -> None:
    """Also with a valid checksum, as an attacker could write it."""
    (tmp_path / "checkpoint.json").write_bytes(JSON[damage])
    with pytest.raises(DamageError, match=r"checkpoint\.json"):
        read_manifest(tmp_path)
    content = JSON[damage] or b"{}"
    sealed = b'{"crc32":%d,"content":%s}' % (zlib.crc32(content), content)
    (tmp_path / "checkpoint.json").write_bytes(sealed)
    with pytest.raises(DamageError, match=r"checkpoint\.json"):
        read_manifest(tmp_path)


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and update its checksum."""
    content = json.loads(path.read_bytes())["content"]
    change(content)
    text = json.dumps(content).encode()
    path.write_bytes(b'{"crc32":%d,"content":%s}' % (zlib.crc32(text), text))


@pytest.mark.parametrize("facts", [{}, {"model": 1}, None])
def test_a_checkpoint_without_its_facts_is_set_aside(
    facts: object, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The previous one is used, as if bytes were damaged."""
    run = write_run(tmp_path / "run.toml", corpus, steps=6)
    assert main(["train", str(run)]) == 0
    checkpoints = run.with_suffix("") / "checkpoints"
    reseal(
        checkpoints / "step-00000006" / "checkpoint.json",
        lambda content: content.update(facts=facts),
    )
    assert main(["train", str(run)]) == 0
    assert (checkpoints / "step-00000006.damaged-1").is_dir()


def test_a_damaged_shards_source_gives_a_one_line_error(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the remedy; without shards it is simply rewritten."""
    run = write_run(tmp_path / "run.toml", corpus, steps=1)
    assert main(["train", str(run)]) == 0
    source = run.with_suffix("") / "shards-source.json"
    for content in JSON.values():
        source.write_bytes(content)
        assert "shards" in complaint(capsys, "train", str(run))
    (run.with_suffix("") / "shards").rename(tmp_path / "away")
    assert main(["train", str(run)]) == 0


@pytest.mark.parametrize("name", ["output_dir", "dataset", "model", "tokenizer"])
def test_an_impossible_path_gives_a_one_line_error(
    name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NUL, a million characters or circular links; the setting is named."""
    run = write_run(tmp_path / "run.toml", corpus, steps=1)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path in ('"a\\u0000b"', f'"{"x" * 1_000_000}"', f'"{circle}/inside"'):
        line = complaint(capsys, "train", str(run), "--set", f"{name}={path}")
        assert name.removesuffix("_dir") in line


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * DEEP,
        b"a" + b".a" * DEEP + b" = 1",
        b"\xff\xfe",
        b"steps = 1" + b"0" * 5000,
        b"steps = \0",
        b"learning_rate = 1e999",
    ],
    ids=["deep list", "deep table", "no UTF-8", "endless number", "NUL", "infinity"],
)
def test_a_damaged_run_file_gives_a_one_line_error(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file."""
    path = tmp_path / "run.toml"
    path.write_bytes(b'model = "llama"\ndataset = "x"\n' + content + b"\n")
    assert "run.toml" in complaint(capsys, "train", str(path))


@pytest.mark.parametrize("command", ["train", "inspect"])
def test_an_impossible_run_file_path_gives_a_one_line_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NUL, or a name that is too long."""
    for path in ("a\0b", "x" * 100_000):
        complaint(capsys, command, path)
        complaint(capsys, "schedule", f"{path}.csv")
        complaint(capsys, "schedule", f"{path}.json")


@pytest.mark.parametrize(
    "setting",
    [
        "steps=1" + "0" * 400,
        "learning_rate=1" + "0" * 400,
        "eps=1" + "0" * 400,
        "batch_size=1" + "0" * 30,
        "seed=1" + "0" * 400,
        "vocab_size=1" + "0" * 18,
        "timeout_s=1e300",
        "betas=[1" + "0" * 400 + ", 0.9]",
        "betas=['a', 'b']",
        "layout.data=1" + "0" * 400,
        "layout.tensor=1e300",
        "output_dir=[1]",
        "tokenizer=3",
        "x=" + "[" * DEEP,
        ".".join("a" * 3000) + "=1",
    ],
    ids=lambda setting: setting[:20],
)
def test_an_absurd_setting_gives_a_one_line_error(
    setting: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before memory is allocated."""
    run = write_run(tmp_path / "run.toml", corpus)
    complaint(capsys, "train", str(run), "--set", setting)


@pytest.mark.parametrize(
    "words",
    [
        ["zb-v", "--stages", "99999999", "--microbatches", "99999999"],
        ["zb-v", "--stages", "-1", "--microbatches", "4"],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", "forward=1e999999999"],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", "forward=1e-999999999"],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", "forward=" + "9" * 5000],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", "forward=nan"],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--costs", "forward=1/0"],
        ["1f1b", "--stages", "2", "--microbatches", "4", "--out", "a\0b.svg"],
        ["search", "--stages", "2", "--microbatches", "4", "--memory-cap", "nan"],
        ["search", "--stages", "2", "--microbatches", "4", "--memory-cap", "-1"],
    ],
    ids=lambda words: " ".join(words)[-30:],
)
def test_an_absurd_schedule_gives_a_one_line_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and costs are checked before anything is built."""
    complaint(capsys, "schedule", *words)
