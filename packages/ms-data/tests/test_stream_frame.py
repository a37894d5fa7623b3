"""All streams keep their place, name their data and check their states in the same way."""

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
    build,
)

from .chats import write_rows, write_tokenizer
from .test_build import texts_of, write_lines
from .test_instructions import PAIRS, Reader

SAID = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Since it is so."}]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of each kind, and of each a second one with other content."""
    place = tmp_path_factory.mktemp("frame")
    model = write_tokenizer(place / "model")
    for number, name in enumerate(("one", "two")):
        text = write_lines(place / f"{name}.jsonl", texts_of(number, 60))
        build(text, tokenizer=model, out=place / name / "texts")
        rows = [{"messages": SAID * n} for n in range(1, 30 + number)]
        chats = write_rows(place / f"{name}-rows.jsonl", rows)
        build(chats, tokenizer=model, out=place / name / "chats", chat=model)
        pairs = write_rows(place / f"{name}-pairs.jsonl", PAIRS[number:])
        build(pairs, tokenizer=model, out=place / name / "pairs", chat=model, pairs=True)
    return place


MAKES: dict[str, Make] = {
    "texts": lambda folder, **more: TokenStream(folder / "texts", **more),
    "mixed": lambda folder, **more: TokenStream({"a": folder / "texts"}, **more),
    "chats": lambda folder, **more: InstructionStream(folder / "chats", **more),
    "pairs": lambda folder, **more: PreferenceStream(folder / "pairs", **more),
}
COMMON: dict[str, Any] = {"sequence_length": 64, "batch_size": 4}


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a stream of one kind."""
    return lambda folder, **more: MAKES[request.param](folder, **{**COMMON, **more})


def taken(stream: Any, count: int) -> list[dict[str, Any]]:
    """Batches as lists."""
    return [{name: each.tolist() for name, each in next(stream).items()} for _ in range(count)]


def test_processes_share_each_batch_and_stand_at_one_place(make: Make, place: Path) -> None:
    """Rows of all ranks are those of one reader, and every rank's state is the same."""
    whole = make(place / "one")
    readers = [make(place / "one", place=Reader(rank, 2)) for rank in range(2)]
    for _ in range(3):
        (batch,) = taken(whole, 1)
        parts = [taken(reader, 1)[0] for reader in readers]
        for name, rows in batch.items():
            assert rows == [row for part in parts for row in part[name]]
        assert all(reader.state_dict() == whole.state_dict() for reader in readers)
    for wrong, match in (
        ({"place": Reader(2, 2)}, "got 2 of 2"),
        ({"place": Reader(0, 3)}, "batch_size 4 cannot be divided among 3 ranks"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
        ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"sequence_length": 0}, "sequence_length"),
    ):
        with pytest.raises(SettingError, match=match):
            make(place / "one", **wrong)


def test_a_state_goes_on_with_any_number_of_processes(make: Make, place: Path) -> None:
    """As JSON, with another batch size too, which no state names."""
    stream = make(place / "one")
    taken(stream, 2)
    state = json.loads(json.dumps(stream.state_dict()))
    rest = taken(stream, 2)
    again = make(place / "one", place=Reader(1, 2))
    again.load_state_dict(state)
    for batch, expected in zip(taken(again, 2), rest, strict=True):
        for name, rows in expected.items():
            assert batch[name] == rows[len(rows) // 2 :]
    make(place / "one", batch_size=2).load_state_dict(state)


def test_other_data_and_other_settings_are_refused_by_name(make: Make, place: Path) -> None:
    """Whatever a state is asked to go on with that would give other samples."""
    state = make(place / "one").state_dict()
    assert make(place / "one").fingerprint != make(place / "two").fingerprint
    for folder, change, match in (
        ("two", {}, "stream state has (dataset|sources) "),
        ("one", {"seed": 3}, "stream state has seed 0, this stream has 3"),
        ("one", {"shuffle": False}, "stream state has shuffle True"),
        ("one", {"sequence_length": 48}, "stream state has sequence_length 64"),
    ):
        with pytest.raises(StateError, match=match):
            make(place / folder, **change).load_state_dict(state)


def test_a_damaged_state_changes_nothing(make: Make, place: Path) -> None:
    """States of another version, without a part, or with an impossible one are refused."""
    stream = make(place / "one")
    taken(stream, 1)
    sound = stream.state_dict()
    expected = taken(make_at(make, place, sound), 2)
    damaged: list[dict[str, Any]] = [{}, {**sound, "version": 1}, {**sound, "settings": None}]
    for name in sound.keys() - {"version", "settings"}:
        damaged += [{**sound, name: wrong} for wrong in (-1, "x", [["x"]], 1.5)]
        damaged.append({key: value for key, value in sound.items() if key != name})
    for state in damaged:
        with pytest.raises(StateError):
            stream.load_state_dict(state)
        assert stream.state_dict() == sound
    assert taken(stream, 2) == expected


def make_at(make: Make, place: Path, state: dict[str, Any]) -> Any:
    """A new stream at a state."""
    stream = make(place / "one")
    stream.load_state_dict(state)
    return stream
