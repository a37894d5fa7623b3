"""Text from several sources is mixed in exact proportion, and goes on from any place."""

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import DamageError, Mixture, Phase, SettingError, StateError, TokenStream
from ms_data.streams.batch import Batch

from .truth import random_documents, write_dataset

SIZES = {"code": 30, "prose": 20, "law": 5}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three datasets of different sizes."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: write_dataset(folder / name, random_documents(number, count, 40))
        for number, (name, count) in enumerate(SIZES.items())
    }


def stream_of(sources: Any, **changes: Any) -> TokenStream:
    """Rows of eight tokens, six a batch."""
    given_settings: dict[str, Any] = {"sequence_length": 8, "batch_size": 6, "chunk_samples": 2}
    return TokenStream(sources, **(given_settings | {"window_chunks": 3, "seed": 5} | changes))


def rows_of(stream: TokenStream, batches: int) -> list[tuple[int, bytes]]:
    """The source and the content of each row."""
    found = []
    for _ in range(batches):
        batch: Any = next(stream)
        for at, task in enumerate(batch["task"]):
            found.append((int(task), content_of(batch, at)))
    return found


def content_of(batch: Any, row: int) -> bytes:
    """All arrays of one row, but for its source."""
    return b"".join(batch[name][row].tobytes() for name in Batch.__annotations__)


def test_a_mix_is_the_sources_alone_in_the_order_of_the_ledger(sources: dict[str, Path]) -> None:
    """Each source gives its own samples in its own order and epochs; the ledger says when."""
    weights = {"code": 0.5, "prose": 0.2, "law": 0.3}
    mixed = stream_of(sources, weights=weights)
    ledger = Mixture(list(sources), weights)
    alone = [
        stream_of(folder, batch_size=1, seed=5 * 1_000_003 + number)
        for number, folder in enumerate(sources.values())
    ]
    rows = rows_of(mixed, 60)
    for row in rows:
        task = ledger.draw()
        assert row == (task, content_of(next(alone[task]), 0))
    assert mixed.mixture.counts == ledger.counts
    assert mixed.consumed_samples == 360
    assert Counter(task for task, _ in rows) == {0: 180, 1: 72, 2: 108}


def test_by_default_each_source_is_read_once_an_epoch(sources: dict[str, Path]) -> None:
    """As many of each as it holds, and the stream ends as one of one source does."""
    stream = stream_of(sources, epochs=1)
    rows = rows_of(stream, stream.batches_per_epoch)
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.samples_per_epoch - len(rows) < 6
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("count", [2, 3])
def test_the_mix_of_all_ranks_is_that_of_one(sources: dict[str, Path], count: int) -> None:
    """Each rank reads its own rows alone, and all hold the same ledger."""
    whole = stream_of(sources, weights=[3, 2, 1])
    ranks = [
        stream_of(sources, weights=[3, 2, 1], place=SimpleNamespace(rank=rank, count=count))
        for rank in range(count)
    ]
    for _ in range(9):
        expected = rows_of(whole, 1)
        assert [row for rank in ranks for row in rows_of(rank, 1)] == expected
    assert all(rank.state_dict() == whole.state_dict() for rank in ranks)


@settings(max_examples=20, deadline=None)
@given(before=st.integers(0, 40), change=st.booleans(), batch_size=st.sampled_from([1, 3, 6]))
def test_a_mix_goes_on_from_anywhere(
    sources: dict[str, Path], before: int, change: bool, batch_size: int
) -> None:
    """Within phases, caps and unforeseen changes, through JSON, with another batch size."""
    phases = [Phase(0, [1, 1, 1]), Phase(50, [5, 1, 1])]
    options: dict[str, Any] = {"weights": phases, "max_epochs": {"law": 2.5}}
    stream = stream_of(sources, **options)
    rows_of(stream, before)
    if change:
        stream.change_weights([1, 4, 1])
    state = json.loads(json.dumps(stream.state_dict()))
    follows = rows_of(stream, 12)
    again = stream_of(sources, **options, batch_size=batch_size)
    again.load_state_dict(state)
    assert rows_of(again, 72 // batch_size) == follows


def test_a_source_is_never_read_more_often_than_its_cap(sources: dict[str, Path]) -> None:
    """The others share its weight from there on, and the ledger still holds; then all end."""
    held = {name: stream_of(folder).samples_per_epoch for name, folder in sources.items()}
    caps = {"law": 2.0, "prose": 0.5}
    stream = stream_of(sources, weights=[1, 1, 1], max_epochs=caps)
    for _ in range(200):
        next(stream)
        due = stream.mixture.due(stream.consumed_samples)
        for name, count in stream.mixture.counts.items():
            assert abs(count - due[name]) < 1
            assert count <= int(caps.get(name, 1e9) * held[name])
    for name, cap in caps.items():
        assert stream.mixture.counts[name] >= int(cap * held[name]) - 1
    ends = stream_of(sources, max_epochs={**caps, "code": 1})
    rows = rows_of(ends, ends.mixture.end // 6)  # type: ignore[operator]
    with pytest.raises(StopIteration):
        next(ends)
    every = sum(int(cap * held[name]) for name, cap in {**caps, "code": 1}.items())
    assert every - 6 - 3 < len(rows) <= every


def test_other_weights_on_resume_take_effect_and_are_named(
    sources: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """From the place of the state on, with nothing skipped; the same weights change nothing."""
    stream = stream_of(sources, weights=[2, 1, 1])
    rows_of(stream, 10)
    state = stream.state_dict()
    with caplog.at_level(logging.WARNING, logger="ms_data"):
        stream_of(sources, weights=[2, 1, 1]).load_state_dict(state)
        assert not caplog.records
        other = stream_of(sources, weights=[1, 1, 2])
        other.load_state_dict(state)
    (record,) = caplog.records
    assert "weights changed on resume after 60 samples" in record.message
    assert "code 0.5 -> 0.25, law 0.25 -> 0.5" in record.message
    stream.change_weights([1, 1, 2])
    assert rows_of(other, 20) == rows_of(stream, 20)
    # What was changed so is not changed again when it is resumed as it was.
    caplog.clear()
    third = stream_of(sources, weights=[1, 1, 2])
    third.load_state_dict(other.state_dict())
    assert not caplog.records
    assert rows_of(third, 20) == rows_of(other, 20)


def test_a_batch_that_cannot_be_read_is_not_drawn(sources: dict[str, Path], tmp_path: Path) -> None:
    """The ledger stands where it stood, so that the same batch comes once the file is mended."""
    documents = random_documents(9, 30, 40)
    mended = write_dataset(tmp_path / "b", documents)
    both = {"code": sources["code"], "b": mended}
    stream, sound = stream_of(both), stream_of(both)
    shard = mended / "shard-00001.msd"
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamageError):
        rows_of(stream, 50)
    state = stream.state_dict()
    shard.write_bytes(content)
    again = stream_of(both)
    again.load_state_dict(state)
    before = rows_of(sound, again.consumed_samples // 6)
    assert len(before) == again.consumed_samples
    assert rows_of(again, 5) == rows_of(stream, 5) == rows_of(sound, 5)


def test_mixes_that_cannot_be_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """Weights for one folder, a cap for nobody, other tokenizers, a state of other sources."""
    with pytest.raises(SettingError, match="need named sources"):
        stream_of(sources["code"], weights=[1])
    with pytest.raises(SettingError, match="limits has 'poems', the sources are"):
        stream_of(sources, max_epochs={"poems": 1})
    with pytest.raises(SettingError, match="max_epochs of 'law' must be 0 or more, got -1"):
        stream_of(sources, max_epochs={"law": -1})
    with pytest.raises(SettingError, match="reach their limits after"):
        stream_of(
            sources, weights=[Phase(0, [0, 0, 1]), Phase(10_000, [1, 1, 1])], max_epochs={"law": 1}
        )
    with pytest.raises(SettingError, match="too few to fill one batch"):
        stream_of(sources, max_epochs=dict.fromkeys(sources, 0.0))
    state = stream_of(sources).state_dict()
    other = {"code": sources["code"], "prose": sources["prose"]}
    with pytest.raises(StateError, match="stream state has sources"):
        stream_of(other).load_state_dict(state)
    with pytest.raises(StateError, match="is damaged"):
        stream_of(sources).load_state_dict(state | {"mixture": {**state["mixture"], "counts": [1]}})
    assert np.isfinite(stream_of(sources).mixture.weights["law"])
