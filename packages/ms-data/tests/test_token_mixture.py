"""Text from several sources is mixed in exact proportions and resumes at any point."""

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

from .reference_samples import random_documents, write_dataset

SIZES = {"code": 30, "prose": 20, "law": 5}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three datasets of different sizes."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: write_dataset(folder / name, random_documents(number, count, 40))
        for number, (name, count) in enumerate(SIZES.items())
    }


def open_stream(sources: Any, **options: Any) -> TokenStream:
    """Open a stream with rows of eight tokens and batches of six."""
    base_settings: dict[str, Any] = {"sequence_length": 8, "batch_size": 6, "chunk_samples": 2}
    return TokenStream(sources, **(base_settings | {"window_chunks": 3, "seed": 5} | options))


def read_rows(stream: TokenStream, batches: int) -> list[tuple[int, bytes]]:
    """Return the source and content of each row in the next batches."""
    rows = []
    for _ in range(batches):
        batch: Any = next(stream)
        for row, task in enumerate(batch["task"]):
            rows.append((int(task), row_content(batch, row)))
    return rows


def row_content(batch: Any, row: int) -> bytes:
    """Return the bytes of all arrays of a row except its source."""
    return b"".join(batch[name][row].tobytes() for name in Batch.__annotations__)


def test_a_mixture_interleaves_the_single_source_streams(sources: dict[str, Path]) -> None:
    """Every source keeps its order and epochs; the mixture decides which source is next."""
    weights = {"code": 0.5, "prose": 0.2, "law": 0.3}
    mixed = open_stream(sources, weights=weights)
    mixture = Mixture(list(sources), weights)
    single_streams = [
        open_stream(folder, batch_size=1, seed=5 * 1_000_003 + number)
        for number, folder in enumerate(sources.values())
    ]
    rows = read_rows(mixed, 60)
    for row in rows:
        task = mixture.draw()
        assert row == (task, row_content(next(single_streams[task]), 0))
    assert mixed.mixture.counts == mixture.counts
    assert mixed.consumed_samples == 360
    assert Counter(task for task, _ in rows) == {0: 180, 1: 72, 2: 108}


def test_by_default_each_source_is_read_once_per_epoch(sources: dict[str, Path]) -> None:
    """Weights follow the sizes, and the stream ends like one with a single source."""
    stream = open_stream(sources, epochs=1)
    rows = read_rows(stream, stream.batches_per_epoch)
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.samples_per_epoch - len(rows) < 6
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_together_read_the_single_reader_mixture(
    sources: dict[str, Path], count: int
) -> None:
    """Ranks read disjoint rows and have equal states."""
    reference = open_stream(sources, weights=[3, 2, 1])
    ranks = [
        open_stream(sources, weights=[3, 2, 1], place=SimpleNamespace(rank=rank, count=count))
        for rank in range(count)
    ]
    for _ in range(9):
        expected = read_rows(reference, 1)
        assert [row for rank in ranks for row in read_rows(rank, 1)] == expected
    assert all(rank.state_dict() == reference.state_dict() for rank in ranks)


@settings(max_examples=20, deadline=None)
@given(
    batches_before=st.integers(0, 40), change=st.booleans(), batch_size=st.sampled_from([1, 3, 6])
)
def test_a_mixture_resumes_at_any_point(
    sources: dict[str, Path], batches_before: int, change: bool, batch_size: int
) -> None:
    """With phases, caps and unplanned changes, through JSON, and with another batch size."""
    phases = [Phase(0, [1, 1, 1]), Phase(50, [5, 1, 1])]
    options: dict[str, Any] = {"weights": phases, "max_epochs": {"law": 2.5}}
    stream = open_stream(sources, **options)
    read_rows(stream, batches_before)
    if change:
        stream.change_weights([1, 4, 1])
    state = json.loads(json.dumps(stream.state_dict()))
    expected = read_rows(stream, 12)
    resumed = open_stream(sources, **options, batch_size=batch_size)
    resumed.load_state_dict(state)
    assert read_rows(resumed, 72 // batch_size) == expected


def test_a_source_is_never_read_more_often_than_its_cap(sources: dict[str, Path]) -> None:
    """The other sources share its weight from then on; once all are exhausted, the stream ends."""
    sizes = {name: open_stream(folder).samples_per_epoch for name, folder in sources.items()}
    caps = {"law": 2.0, "prose": 0.5}
    stream = open_stream(sources, weights=[1, 1, 1], max_epochs=caps)
    for _ in range(200):
        next(stream)
        due = stream.mixture.due(stream.consumed_samples)
        for name, count in stream.mixture.counts.items():
            assert abs(count - due[name]) < 1
            assert count <= int(caps.get(name, 1e9) * sizes[name])
    for name, cap in caps.items():
        assert stream.mixture.counts[name] >= int(cap * sizes[name]) - 1
    finite = open_stream(sources, max_epochs={**caps, "code": 1})
    rows = read_rows(finite, finite.mixture.end // 6)  # type: ignore[operator]
    with pytest.raises(StopIteration):
        next(finite)
    total = sum(int(cap * sizes[name]) for name, cap in {**caps, "code": 1}.items())
    assert total - 6 - 3 < len(rows) <= total


def test_other_weights_on_resume_take_effect_and_are_named(
    sources: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """They apply from the restored position on; equal weights change nothing and log nothing."""
    stream = open_stream(sources, weights=[2, 1, 1])
    read_rows(stream, 10)
    state = stream.state_dict()
    with caplog.at_level(logging.WARNING, logger="ms_data"):
        open_stream(sources, weights=[2, 1, 1]).load_state_dict(state)
        assert not caplog.records
        resumed = open_stream(sources, weights=[1, 1, 2])
        resumed.load_state_dict(state)
    (record,) = caplog.records
    assert "weights changed on resume after 60 samples" in record.message
    assert "code 0.5 -> 0.25, law 0.25 -> 0.5" in record.message
    stream.change_weights([1, 1, 2])
    assert read_rows(resumed, 20) == read_rows(stream, 20)
    # Resuming with the same changed weights logs nothing.
    caplog.clear()
    third = open_stream(sources, weights=[1, 1, 2])
    third.load_state_dict(resumed.state_dict())
    assert not caplog.records
    assert read_rows(third, 20) == read_rows(resumed, 20)


def test_a_batch_that_failed_to_read_is_not_counted(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """Once the file is repaired, the same batch comes next."""
    documents = random_documents(9, 30, 40)
    repaired = write_dataset(tmp_path / "b", documents)
    pair = {"code": sources["code"], "b": repaired}
    stream, reference = open_stream(pair), open_stream(pair)
    shard = repaired / "shard-00001.msd"
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamageError):
        read_rows(stream, 50)
    state = stream.state_dict()
    shard.write_bytes(content)
    resumed = open_stream(pair)
    resumed.load_state_dict(state)
    skipped = read_rows(reference, resumed.consumed_samples // 6)
    assert len(skipped) == resumed.consumed_samples
    assert read_rows(resumed, 5) == read_rows(stream, 5) == read_rows(reference, 5)


def test_invalid_mixtures_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """Weights without named sources, a cap for an unknown source, other tokenizers or sources."""
    with pytest.raises(SettingError, match="need named sources"):
        open_stream(sources["code"], weights=[1])
    with pytest.raises(SettingError, match="limits has 'poems', the sources are"):
        open_stream(sources, max_epochs={"poems": 1})
    with pytest.raises(
        SettingError, match="max_epochs of 'law' must be a number of at least 0, got -1"
    ):
        open_stream(sources, max_epochs={"law": -1})
    with pytest.raises(SettingError, match="reach their limits after"):
        open_stream(
            sources, weights=[Phase(0, [0, 0, 1]), Phase(10_000, [1, 1, 1])], max_epochs={"law": 1}
        )
    with pytest.raises(SettingError, match="too few to fill one batch"):
        open_stream(sources, max_epochs=dict.fromkeys(sources, 0.0))
    state = open_stream(sources).state_dict()
    two_sources = {"code": sources["code"], "prose": sources["prose"]}
    with pytest.raises(StateError, match="stream state has sources"):
        open_stream(two_sources).load_state_dict(state)
    with pytest.raises(StateError, match="is damaged"):
        open_stream(sources).load_state_dict(
            state | {"mixture": {**state["mixture"], "counts": [1]}}
        )
    assert np.isfinite(open_stream(sources).mixture.weights["law"])
