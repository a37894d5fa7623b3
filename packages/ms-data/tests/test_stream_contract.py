"""All streams keep their position, identify their data and check their states in the same way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ms_data import (
    InstructionStream,
    PreferenceStream,
    SettingError,
    StateError,
    TokenStream,
    UnpairedStream,
    build,
)

from .chat_templates import write_rows, write_tokenizer
from .test_build import random_texts, write_lines
from .test_instructions import PAIRS, Reader

MESSAGES = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Since it is so."},
]
OpenStream = Callable[..., Any]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of each type with different content."""
    folder = tmp_path_factory.mktemp("frame")
    model = write_tokenizer(folder / "model")
    for number, name in enumerate(("one", "two")):
        text = write_lines(folder / f"{name}.jsonl", random_texts(number, 60))
        build(text, tokenizer=model, out=folder / name / "texts")
        rows = [{"messages": MESSAGES * n} for n in range(1, 30 + number)]
        chats = write_rows(folder / f"{name}-rows.jsonl", rows)
        build(chats, tokenizer=model, out=folder / name / "chats", chat=model)
        pairs = write_rows(folder / f"{name}-pairs.jsonl", PAIRS[number:])
        build(pairs, tokenizer=model, out=folder / name / "pairs", chat=model, pairs=True)
    return folder


STREAMS: dict[str, OpenStream] = {
    "texts": lambda folder, **options: TokenStream(folder / "texts", **options),
    "mixed": lambda folder, **options: TokenStream({"a": folder / "texts"}, **options),
    "chats": lambda folder, **options: InstructionStream(folder / "chats", **options),
    "pairs": lambda folder, **options: PreferenceStream(folder / "pairs", **options),
    "unpaired": lambda folder, **options: UnpairedStream(folder / "pairs", **options),
}
COMMON: dict[str, Any] = {"sequence_length": 64, "batch_size": 4}


@pytest.fixture(params=STREAMS)
def open_stream(request: pytest.FixtureRequest) -> OpenStream:
    """Open a stream of one type."""
    return lambda folder, **options: STREAMS[request.param](folder, **{**COMMON, **options})


def next_batches(stream: Any, count: int) -> list[dict[str, Any]]:
    """Return the next batches with arrays as lists."""
    return [{name: array.tolist() for name, array in next(stream).items()} for _ in range(count)]


def test_ranks_split_each_batch_and_have_equal_states(
    open_stream: OpenStream, datasets: Path
) -> None:
    reference = open_stream(datasets / "one")
    readers = [open_stream(datasets / "one", place=Reader(rank, 2)) for rank in range(2)]
    for _ in range(3):
        (batch,) = next_batches(reference, 1)
        parts = [next_batches(reader, 1)[0] for reader in readers]
        for name, rows in batch.items():
            assert rows == [row for part in parts for row in part[name]]
        assert all(reader.state_dict() == reference.state_dict() for reader in readers)
    for overrides, match in (
        ({"place": Reader(2, 2)}, "got 2 of 2"),
        ({"place": Reader(0, 3)}, "batch_size 4 cannot be divided among 3 ranks"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length"),
    ):
        with pytest.raises(SettingError, match=match):
            open_stream(datasets / "one", **overrides)


def test_a_state_resumes_with_any_number_of_ranks(open_stream: OpenStream, datasets: Path) -> None:
    """Through JSON, and with another batch size, which the state does not record."""
    stream = open_stream(datasets / "one")
    next_batches(stream, 2)
    state = json.loads(json.dumps(stream.state_dict()))
    remaining = next_batches(stream, 2)
    resumed = open_stream(datasets / "one", place=Reader(1, 2))
    resumed.load_state_dict(state)
    for batch, expected in zip(next_batches(resumed, 2), remaining, strict=True):
        for name, rows in expected.items():
            assert batch[name] == rows[len(rows) // 2 :]
    open_stream(datasets / "one", batch_size=2).load_state_dict(state)


def test_other_data_and_other_settings_are_refused_by_name(
    open_stream: OpenStream, datasets: Path
) -> None:
    """Settings that would change the samples must match."""
    state = open_stream(datasets / "one").state_dict()
    assert open_stream(datasets / "one").fingerprint != open_stream(datasets / "two").fingerprint
    for folder, change, match in (
        ("two", {}, "stream state has (dataset|sources) "),
        ("one", {"seed": 3}, "stream state has seed 0, this stream has 3"),
        ("one", {"shuffle": False}, "stream state has shuffle True"),
        ("one", {"sequence_length": 48}, "stream state has sequence_length 64"),
    ):
        with pytest.raises(StateError, match=match):
            open_stream(datasets / folder, **change).load_state_dict(state)


def test_a_damaged_state_changes_nothing(open_stream: OpenStream, datasets: Path) -> None:
    """Wrong versions, missing parts and impossible values are refused."""
    stream = open_stream(datasets / "one")
    next_batches(stream, 1)
    valid = stream.state_dict()
    expected = next_batches(resume(open_stream, datasets, valid), 2)
    damaged: list[dict[str, Any]] = [{}, {**valid, "version": 1}, {**valid, "settings": None}]
    for name in valid.keys() - {"version", "settings"}:
        damaged += [{**valid, name: bad_value} for bad_value in (-1, "x", [["x"]], 1.5)]
        damaged.append({key: value for key, value in valid.items() if key != name})
    for state in damaged:
        with pytest.raises(StateError):
            stream.load_state_dict(state)
        assert stream.state_dict() == valid
    assert next_batches(stream, 2) == expected


def resume(open_stream: OpenStream, datasets: Path, state: dict[str, Any]) -> Any:
    """Open a stream at a state."""
    stream = open_stream(datasets / "one")
    stream.load_state_dict(state)
    return stream
